//! One handoff, in which another machine sends bytes on a client's connection. [`Handing`] has references to the
//! handoff's bytes, the connection, and the message to this machine's *agent* (Shunt's daemon). The bytes are *absent*:
//! this program's memory stands for them, and another machine's store has them, in *payloads* of which this process
//! keeps *shares*. A *run* is absent bytes in a row that one machine has. The *region* is the range of the connection's
//! sequence numbers that the handoff's bytes take.

use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::sync::Arc;

use shunt_odb::absent::Piece;
use shunt_odb::hold::Hold;
use shunt_odb::link::Link;
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_sys::erase::{Erased, wipe_stack};
use shunt_wire::local::{Handoff, Reason, Tls};
use shunt_wire::parts::{PARTS_MAX, Part, Parts};

/// Most bytes of one region. As long as a region is not complete, absent bytes that are written behind it are fetched,
/// which holds up a program that is faster than its client.
pub const REGION_MAX: u64 = 8 << 20;

/// Least length in bytes for which a handoff is worth its cost. A shorter part of a payload of this length is worth it,
/// too.
const LONG: u64 = 64 << 10;

/// A handoff. This value keeps a share of each payload until the client has all of the handoff's bytes.
pub struct Handing {
    /// Descriptor by which the connection was last written to. The number may stand for another file by now.
    pub fd: RawFd,
    /// Cookie of the connection (SO_COOKIE).
    pub cookie: u64,
    pub message: Handoff,
    parts: Vec<Part>,
    holds: Vec<Arc<Hold>>,
    /// Keys for the bytes of a TLS connection, until the agent is told of the handoff.
    pub keys: Option<Erased<Tls>>,
    /// Whether the connection is a TLS one. If it is, nobody in this process can encrypt the bytes that the other
    /// machine does not send.
    pub is_sealed: bool,
}

/// A handoff whose bytes nobody sends any more, and the reason for that.
pub struct Failed {
    pub handing: Handing,
    pub reason: Reason,
}

fn part(piece: &Piece) -> Part {
    let PayloadId { segment, slot, secret, .. } = piece.hold.payload();
    let (segment, slot, secret) = (segment.into(), slot.into(), secret.into());
    Part { segment, slot, secret, offset: piece.offset.into(), length: (piece.addresses.len() as u64).into() }
}

pub fn bytes(run: &[Piece]) -> u64 {
    run.iter().map(|piece| piece.addresses.len() as u64).sum()
}

/// Whether a handoff of a run of absent bytes costs less than fetching it.
pub fn is_long(run: &[Piece]) -> bool {
    bytes(run) >= LONG || run.iter().any(|piece| piece.hold.of_bytes() >= LONG)
}

/// Number of bytes that `payload` bytes take on the wire; `None` if the keys are not allowed to protect that many.
pub fn region_bytes(keys: Option<&Erased<Tls>>, payload: u64) -> Option<u64> {
    match keys {
        Some(keys) if payload > 0 => keys.generation().region_bytes(payload),
        _ => Some(payload),
    }
}

impl Handing {
    /// Makes a handoff that has no bytes yet.
    pub fn new(fd: RawFd, cookie: u64, message: Handoff, keys: Option<Erased<Tls>>) -> Self {
        let is_sealed = keys.is_some();
        let message = Handoff { length: 0, ..message };
        Self { fd, cookie, message, parts: Vec::new(), holds: Vec::new(), keys, is_sealed }
    }

    /// Whether a run fits into the handoff, and the machine that sends the handoff has the run's bytes.
    pub fn can_take(&self, run: &[Piece]) -> bool {
        self.parts.len() + run.len() <= PARTS_MAX
            && self.message.length + bytes(run) <= REGION_MAX
            && run.first().is_some_and(|first| Some(first.hold.payload().holder) == self.holder())
    }

    fn holder(&self) -> Option<Holder> {
        Some(self.holds.first()?.payload().holder)
    }

    /// Number of bytes by which the region grows with a run of absent bytes; `None` if the keys are not allowed to
    /// protect that many.
    pub fn growth(&self, run: &[Piece]) -> Option<u64> {
        let before = region_bytes(self.keys.as_ref(), self.message.length)?;
        Some(region_bytes(self.keys.as_ref(), self.message.length + bytes(run))? - before)
    }

    pub fn take(&mut self, run: &[Piece]) {
        self.message.length += bytes(run);
        for piece in run {
            let next = part(piece);
            match (self.parts.last_mut(), self.holds.last()) {
                (Some(last), Some(hold))
                    if hold.payload() == piece.hold.payload()
                        && last.offset.get() + last.length.get() == piece.offset =>
                {
                    last.length = (last.length.get() + next.length.get()).into();
                }
                _ => {
                    self.parts.push(next);
                    self.holds.push(Arc::clone(&piece.hold));
                }
            }
        }
    }

    /// References to the handoff's bytes.
    pub fn references(&self) -> impl Iterator<Item = Reference> {
        self.parts.iter().zip(&self.holds).map(|(part, hold)| {
            let (offset, length) = (part.offset.get(), part.length.get());
            Reference { payload: hold.payload(), weight: Weight::WHOLE, offset, length }
        })
    }

    /// Tells the agent of the handoff. The keys are given up here, unless the agent cannot be told yet.
    ///
    /// # Errors
    /// Returns `WouldBlock` if the agent cannot be told yet, `InvalidInput` if the handoff has no bytes or too many
    /// parts, else the error of the connection to the agent.
    pub fn tell(&mut self, link: &Link) -> io::Result<()> {
        let parts = Parts::new(&self.parts).ok_or(ErrorKind::InvalidInput)?;
        let Some(keys) = self.keys.take() else { return link.claim(&self.message, &parts) };
        let told = claim_sealed(link, &self.message, &keys, &parts);
        match &told {
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.keys = Some(keys),
            _ => drop(keys),
        }
        wipe_stack();
        told
    }
}

#[inline(never)]
fn claim_sealed(link: &Link, message: &Handoff, keys: &Tls, parts: &Parts) -> io::Result<()> {
    link.claim(&Handoff { tls: *keys, ..*message }, parts)
}
