//! The library's own threads.

use std::cell::Cell;

use super::inside::Inside;
use super::signals::SignalsWait;

thread_local! {
    /// Whether the thread that this one is starting is the library's.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of the library's, with this name. It takes no signals, which are for the program's threads. Returns
/// false if there can be no more threads.
///
/// The thread is inside the library as long as it lives. So its system calls do not end the program's *turn*, at whose
/// end agents are told of handoffs (bypass.rs). The reason: a thread that ends a turn takes the lock of rank Handings.
/// A thread of the program may hold that lock while it waits for a second lock, which this thread has just released.
/// This thread's next system call then has to wake the program's thread, and must not wait for the lock of rank
/// Handings.
pub fn start(name: &'static str, work: impl FnOnce() + Send + 'static) -> bool {
    let _signals = SignalsWait::new();
    let builder = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
    start_ours(|| {
        builder.spawn(|| {
            let _inside = Inside::enter();
            work();
        })
    })
    .is_ok()
}

/// Whether the thread that this one is starting comes from [`start`].
pub fn are_ours() -> bool {
    OURS.get()
}

/// Calls `start`, which starts a thread, with that thread marked as the library's.
fn start_ours<T>(start: impl FnOnce() -> T) -> T {
    OURS.set(true);
    let started = start();
    OURS.set(false);
    started
}
