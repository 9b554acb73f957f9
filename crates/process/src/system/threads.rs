//! The library's own threads.

use std::cell::Cell;

use super::inside::Inside;
use super::signals::SignalsWait;

thread_local! {
    /// While the thread that this one starts is ours.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of that name of the library's, which takes no signals: those are the program's threads'. False: there can be
/// no more.
///
/// It is in the library as long as it lives: its own system calls end no turn of the program, whose thread may hold Handings,
/// and wait for a lock that this one has just dropped and is to wake it for.
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

/// Whether the thread that this one starts now is one of [`start`].
pub fn are_ours() -> bool {
    OURS.get()
}

/// Starts a thread of our own.
fn start_ours<T>(start: impl FnOnce() -> T) -> T {
    OURS.set(true);
    let started = start();
    OURS.set(false);
    started
}
