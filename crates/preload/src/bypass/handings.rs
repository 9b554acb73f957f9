//! Handoffs of this process: those that have begun in the kernel, and those that agents know of. A share of each payload is
//! kept until the client has all of it.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use shunt_odb::absent::Piece;
use shunt_odb::hold::Hold;
use shunt_odb::link::{Link, Outcome};
use shunt_odb::reference::{PayloadId, Reference, Weight};
use shunt_odb::segment::now_ms;
use shunt_odb::store::client::Connection;
use shunt_wire::local::{Handoff, Reason};
use shunt_wire::parts::{PARTS_MAX, Part, Parts};

use super::{BEGUN, prepare, refuse};
use crate::descriptors::borrow;
use crate::runtime::Runtime;

/// Bytes of one region at most: what is written behind it is fetched until it is complete, which holds a program up that
/// is faster than its client.
const REGION_MAX: u64 = 8 << 20;
/// After an agent could not be had, it is not asked for so long.
const RETRY_MS: u64 = 1000;
/// How long the end of a handoff is waited for whose agent is gone: its successor says so if nobody sends it.
const ORPHAN_MS: u64 = 60_000;

/// One handoff.
pub struct Handing {
    /// By which it was written to last: the number may be another's by now.
    pub fd: RawFd,
    /// Of the connection (SO_COOKIE).
    pub cookie: u64,
    pub message: Handoff,
    parts: Vec<Part>,
    holds: Vec<Arc<Hold>>,
}

/// One that nobody sends.
pub struct Failed {
    pub handing: Handing,
    pub reason: Reason,
}

#[derive(Default)]
pub struct Handings {
    link: Option<Link>,
    asked_ms: u64,
    /// Begun in this turn, and not told yet.
    begun: Vec<Handing>,
    /// Under way, by name.
    told: HashMap<u64, Handing>,
    /// The newest under way on a connection, by its cookie: a program may close a descriptor and get its number again in one
    /// turn.
    on: HashMap<u64, u64>,
    failed: Vec<Failed>,
    /// Those that an agent knew of that is gone, and when that was noticed.
    orphans: HashMap<u64, (Handing, u64)>,
}

fn part(piece: &Piece) -> Part {
    let PayloadId { segment, slot, secret, .. } = piece.hold.payload();
    let (segment, slot, secret) = (segment.into(), slot.into(), secret.into());
    Part { segment, slot, secret, offset: piece.offset.into(), length: (piece.addresses.len() as u64).into() }
}

impl Handing {
    /// False, and nothing is changed: there is no room.
    fn can_take(&self, run: &[Piece], bytes: u64) -> bool {
        self.parts.len() + run.len() <= PARTS_MAX && self.message.length + bytes <= REGION_MAX
    }

    fn take(&mut self, run: &[Piece]) {
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
}

impl Handings {
    /// Has the holder of a run of absent bytes send them, behind all that was written to the descriptor. False: they are to
    /// be fetched. `is_long`: they are worth a handoff of their own.
    pub fn hand_off(&mut self, runtime: &Runtime, fd: RawFd, run: &[Piece], is_long: bool, flags: i32) -> bool {
        self.settle();
        if !is_long && self.begun.is_empty() {
            return false;
        }
        let bytes = run.iter().map(|piece| piece.addresses.len() as u64).sum();
        let Ok(cookie) = rustix::net::sockopt::socket_cookie(borrow(fd)) else { return false };
        if let Some(at) = self.begun.iter().rposition(|handing| handing.cookie == cookie) {
            return self.grow(at, fd, run, bytes);
        }
        if !is_long || self.on.contains_key(&cookie) || !self.connect(runtime) {
            return false;
        }
        let (Some(link), Some(first)) = (&mut self.link, run.first()) else { return false };
        let Some(sender) = link.sender(first.hold.payload().holder) else { return false };
        prepare(fd);
        let Ok(message) = link.begin(borrow(fd), sender, bytes) else {
            refuse(fd);
            return false;
        };
        let mut handing = Handing { fd, cookie, message, parts: Vec::new(), holds: Vec::new() };
        handing.take(run);
        self.begun.push(handing);
        BEGUN.fetch_add(1, Ordering::Relaxed);
        // Who waits in its calls may not come by here again for long.
        let waits = flags & libc::MSG_DONTWAIT == 0
            && !rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
        if waits {
            self.tell_all();
        }
        true
    }

    fn grow(&mut self, at: usize, fd: RawFd, run: &[Piece], bytes: u64) -> bool {
        let (Some(link), handing) = (&self.link, &mut self.begun[at]) else { return false };
        if !handing.can_take(run, bytes) || link.grow(borrow(fd), &mut handing.message, bytes).is_err() {
            return false;
        }
        handing.fd = fd;
        handing.take(run);
        true
    }

    /// Has a connection with the agent.
    fn connect(&mut self, runtime: &Runtime) -> bool {
        if self.link.as_ref().is_some_and(|link| !link.is_alive()) {
            self.lose();
        }
        let now = now_ms();
        if self.link.is_none() && (self.asked_ms == 0 || now >= self.asked_ms + RETRY_MS) {
            self.asked_ms = now;
            let asked = Connection::open(&runtime.bypass.store).and_then(|store| store.agent());
            self.link = asked.ok().flatten().and_then(|socket| Link::open(socket).ok());
        }
        self.link.is_some()
    }

    /// The agent is gone. What it knew of goes on without it: the kernel steers, and whoever sends has pinned its bytes. Its
    /// successor looks whether it does.
    fn lose(&mut self) {
        self.tell_all();
        self.link = None;
        let now = now_ms();
        self.orphans.extend(self.told.drain().map(|(handoff, handing)| (handoff, (handing, now))));
        self.on.clear();
    }

    /// Tells the agent of all that has begun.
    pub fn tell_all(&mut self) {
        for handing in std::mem::take(&mut self.begun) {
            BEGUN.fetch_sub(1, Ordering::Relaxed);
            let told = match (&self.link, Parts::new(&handing.parts)) {
                (Some(link), Some(parts)) => link.claim(&handing.message, &parts).is_ok(),
                _ => false,
            };
            if told {
                self.on.insert(handing.cookie, handing.message.handoff);
                self.told.insert(handing.message.handoff, handing);
            } else {
                self.failed.push(Failed { handing, reason: Reason::Limit });
            }
        }
    }

    /// Takes note of what is over.
    fn settle(&mut self) {
        let Some(link) = &mut self.link else { return };
        for (handoff, outcome) in link.outcomes() {
            let known = self.told.get(&handoff).or_else(|| self.orphans.get(&handoff).map(|(handing, _)| handing));
            if !known.is_some_and(|handing| outcome.concerns(handing.message.peer)) {
                continue;
            }
            let Some(handing) = self.told.remove(&handoff) else {
                // That one was counted with the agent before.
                if let (Some((handing, _)), Outcome::Ended { reason, .. }) = (self.orphans.remove(&handoff), outcome) {
                    self.failed.push(Failed { handing, reason });
                }
                continue;
            };
            link.over(&handing.message);
            if self.on.get(&handing.cookie) == Some(&handoff) {
                self.on.remove(&handing.cookie);
            }
            if let Outcome::Ended { reason, .. } = outcome {
                self.failed.push(Failed { handing, reason });
            }
        }
    }

    /// What has failed since the last call.
    pub fn tend(&mut self, runtime: &Runtime) -> Vec<Failed> {
        self.tell_all();
        if self.link.as_mut().is_some_and(|link| link.hear().is_err()) {
            self.settle();
            self.lose();
        }
        if !self.orphans.is_empty() {
            let now = now_ms();
            self.orphans.retain(|_, (_, since)| now.saturating_sub(*since) < ORPHAN_MS);
            self.connect(runtime);
        }
        self.settle();
        std::mem::take(&mut self.failed)
    }

    /// The connection of a handoff that nobody sends is not this program's any more.
    pub fn cancel(&self, handoff: u64) {
        if let Some(link) = &self.link {
            let _ = link.cancel(handoff);
        }
    }

    /// In the child of a fork: all of it is the parent's.
    pub fn forget(&mut self) {
        std::mem::forget(std::mem::take(self));
        BEGUN.store(0, Ordering::Relaxed);
    }
}
