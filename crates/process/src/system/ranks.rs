//! The order in which a thread takes the library's locks: a later one of [`Rank`] while it has an earlier one, never the other way,
//! and never one twice. So no two threads wait for each other.
//!
//! Below these are the locks of shunt-odb (ways to stores, shares to give back) and of shunt-sys, which take none of these.
//!
//! Tests have it checked ([`check`]); it costs others one look at a flag.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ending::end_process;

/// The locks, from the outermost in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Of [`crate::connections::states`]: who finds out whether a connection has a state.
    Entering,
    /// One direction of a connection, as other processes lock it, too.
    Receiving,
    Sending,
    /// Of [`crate::tls`]: what is in OpenSSL of ours.
    OpenSsl,
    /// Of [`crate::bypass`]: what is under way.
    Handings,
    /// Of [`crate::store`]: the segment.
    Segment,
    /// Of [`crate::memory`]: what is absent.
    Absent,
    /// Of [`crate::bypass`]: where a rescue is under way. Under these last two no other is taken.
    Rescues,
    /// Of [`crate::memory`]: the share that was taken last.
    Recent,
}

static CHECKS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// One bit for each that this thread has.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// From here on the order is checked: a thread that breaks it ends the process.
pub fn check() {
    CHECKS.store(true, Ordering::Relaxed);
}

const fn bit(rank: Rank) -> u32 {
    1 << rank as u32
}

/// A lock of this rank, for as long as it lives; made before the lock is waited for.
#[derive(Debug)]
pub struct Taken(u32);

impl Taken {
    #[inline]
    pub fn new(rank: Rank) -> Self {
        Self(if CHECKS.load(Ordering::Relaxed) { Self::checked(rank) } else { 0 })
    }

    #[cold]
    fn checked(rank: Rank) -> u32 {
        let held = HELD.get();
        if held >= bit(rank) {
            end_process(&format!("a lock is taken out of order: {rank:?} by a thread that has {held:#b}"));
        }
        HELD.set(held | bit(rank));
        bit(rank)
    }

    /// One of which nobody waits for the other: tried, and in any order.
    #[inline]
    pub fn tried(rank: Rank) -> Self {
        if !CHECKS.load(Ordering::Relaxed) || HELD.get() & bit(rank) != 0 {
            return Self(0);
        }
        HELD.set(HELD.get() | bit(rank));
        Self(bit(rank))
    }
}

impl Drop for Taken {
    #[inline]
    fn drop(&mut self) {
        if self.0 != 0 {
            HELD.set(HELD.get() & !self.0);
        }
    }
}

/// Before this thread waits for somebody who may take as long as he likes: it has no lock.
#[inline]
pub fn none_held() {
    if CHECKS.load(Ordering::Relaxed) && HELD.get() != 0 {
        end_process("a thread waits while it has a lock");
    }
}
