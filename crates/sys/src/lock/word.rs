//! What threads wait by: a word of memory, and futex(2).

use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

pub(super) use std::sync::atomic::{AtomicU32 as Word, Ordering};

/// Looks so often whether a lock is given up before its waiter asks the kernel: what is done under these is short.
pub(super) const LOOKS: u32 = 100;

/// Woken, changed, interrupted, or, where this is true, out of time: the caller looks.
pub(super) fn wait(word: &Word, while_it_is: u32, at_most: Option<Duration>) -> bool {
    let patience = at_most.and_then(|time| Timespec::try_from(time).ok());
    futex::wait(word, futex::Flags::PRIVATE, while_it_is, patience.as_ref()) == Err(Errno::TIMEDOUT)
}

pub(super) fn wake(word: &Word, how_many: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, how_many);
}
