//! The order in which a thread takes the library's locks. While it has a lock of one [`Rank`], it takes only locks of
//! later ranks, and never one twice. So no two threads wait for each other.
//!
//! The locks of shunt-odb (connections to stores, shares to give back) and of shunt-sys come after all ranks here: a
//! thread that has such a lock takes none of the locks listed here.
//!
//! Tests switch on a check of the order ([`check`]). Without the check, a lock costs only one more look at a flag.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ending::end_process;

/// The locks, in the order in which they are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// [`crate::connections::states`]: lets one thread at a time find out whether a connection has a state.
    Entering,
    /// One direction of a connection; the next rank is the other direction. Other processes lock them, too.
    Receiving,
    Sending,
    /// [`crate::tls`]: state of the library in OpenSSL.
    OpenSsl,
    /// [`crate::bypass`]: handoffs under way.
    Handings,
    /// [`crate::store`]: the leased segment.
    Segment,
    /// [`crate::memory`]: absent memory.
    Absent,
    /// [`crate::bypass`]: connections where the bytes of a failed handoff are written after all (a rescue). A thread
    /// that has this lock or the next one takes no other lock of this list.
    Rescues,
    /// [`crate::memory`]: the share that was taken last.
    Recent,
}

static CHECKS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Locks that this thread has, a bit for each rank.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// Begins to check the order. From now on a thread that breaks it ends the process.
pub fn check() {
    CHECKS.store(true, Ordering::Relaxed);
}

const fn bit(rank: Rank) -> u32 {
    1 << rank as u32
}

/// Record of a lock of some rank that this thread has. It is made before the thread waits for the lock.
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
            end_process(&format!("lock {rank:?} is taken out of order by a thread that holds {held:#b}"));
        }
        HELD.set(held | bit(rank));
        bit(rank)
    }

    /// Records a lock that the thread got without waiting. That is allowed in any order, because no thread waits.
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

/// Checks that this thread has no lock, before it waits for something that may take arbitrarily long.
#[inline]
pub fn none_held() {
    if CHECKS.load(Ordering::Relaxed) && HELD.get() != 0 {
        end_process("a thread waits while it holds a lock");
    }
}
