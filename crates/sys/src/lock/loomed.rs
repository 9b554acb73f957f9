//! The same as in `futex.rs`, of loom's. The first wait of each condition variable's that has a limit ends by it, and no other: loom
//! knows of no time, and of as many steps only as end.

use std::time::Duration;

pub use loom::sync::MutexGuard;

/// What one thread at a time uses.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A free one.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Waits until nobody else has it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("loom's are not poisoned")
    }

    /// `None`: another thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// What threads wait for that have a lock: it is given up meanwhile.
#[derive(Debug, Default)]
pub struct Condvar {
    of_loom: loom::sync::Condvar,
    /// Whether one has ended by its limit. No atomic of loom's: it is no step.
    is_over: std::sync::atomic::AtomicBool,
}

impl Condvar {
    /// One that nobody waits for.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for a change.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.of_loom.wait(guard).expect("loom's are not poisoned")
    }

    /// The same, or not at all: true.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, _time: Duration) -> (MutexGuard<'a, T>, bool) {
        if self.is_over.swap(true, std::sync::atomic::Ordering::Relaxed) {
            return (self.wait(guard), false);
        }
        (guard, true)
    }

    /// Something has changed.
    pub fn notify_all(&self) {
        self.of_loom.notify_all();
    }
}
