//! One handoff: what its bytes are, whose connection they go to, and what its agent is told.

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

/// Bytes of one region at most: what is written behind it is fetched until it is complete, which holds a program up that
/// is faster than its client.
pub const REGION_MAX: u64 = 8 << 20;

/// What is shorter, and not a part of what is as long, is not worth a handoff of its own.
const LONG: u64 = 64 << 10;

/// A share of each payload is kept until the client has all of it.
pub struct Handing {
    /// By which it was written to last: the number may be another's by now.
    pub fd: RawFd,
    /// Of the connection (SO_COOKIE).
    pub cookie: u64,
    pub message: Handoff,
    parts: Vec<Part>,
    holds: Vec<Arc<Hold>>,
    /// Of a TLS connection, until the agent is told.
    pub keys: Option<Erased<Tls>>,
    /// Whether it is one's: nobody here can seal what is left of it.
    pub is_sealed: bool,
}

/// One that nobody sends.
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

/// Bytes on the wire of a payload; `None`: the keys are not for so many.
pub fn region_bytes(keys: Option<&Erased<Tls>>, payload: u64) -> Option<u64> {
    match keys {
        Some(keys) if payload > 0 => keys.generation().region_bytes(payload),
        _ => Some(payload),
    }
}

impl Handing {
    /// One of no bytes.
    pub fn new(fd: RawFd, cookie: u64, message: Handoff, keys: Option<Erased<Tls>>) -> Self {
        let is_sealed = keys.is_some();
        let message = Handoff { length: 0, ..message };
        Self { fd, cookie, message, parts: Vec::new(), holds: Vec::new(), keys, is_sealed }
    }

    /// Whether there is room, and its sender has them.
    pub fn can_take(&self, run: &[Piece]) -> bool {
        self.parts.len() + run.len() <= PARTS_MAX
            && self.message.length + bytes(run) <= REGION_MAX
            && run.first().is_some_and(|first| Some(first.hold.payload().holder) == self.holder())
    }

    fn holder(&self) -> Option<Holder> {
        Some(self.holds.first()?.payload().holder)
    }

    /// By how much its region grows with a run of absent bytes; `None`: its keys are not for so many.
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

    /// What its bytes are.
    pub fn references(&self) -> impl Iterator<Item = Reference> {
        self.parts.iter().zip(&self.holds).map(|(part, hold)| {
            let (offset, length) = (part.offset.get(), part.length.get());
            Reference { payload: hold.payload(), weight: Weight::WHOLE, offset, length }
        })
    }

    /// Tells the agent of it. Nobody needs the keys here any more, unless it cannot be told yet.
    ///
    /// # Errors
    /// The kernel's.
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
