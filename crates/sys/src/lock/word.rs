//! A word of memory that threads wait on, with futex(2).

use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

pub(super) use std::sync::atomic::{AtomicU32 as Word, Ordering};

/// Number of times that a waiter polls a lock before it sleeps in the kernel. Critical sections of these locks are
/// short.
pub(super) const LOOKS: u32 = 100;

/// Waits until [`wake`] is called for the word, the word's value is not `while_it_is`, a signal interrupts the wait, or
/// the time has run out. Returns true only where the time has run out. The caller checks the word again.
pub(super) fn wait(word: &Word, while_it_is: u32, at_most: Option<Duration>) -> bool {
    let patience = at_most.and_then(|time| Timespec::try_from(time).ok());
    futex::wait(word, futex::Flags::PRIVATE, while_it_is, patience.as_ref()) == Err(Errno::TIMEDOUT)
}

pub(super) fn wake(word: &Word, how_many: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, how_many);
}
