//! The same as in `futex.rs`, of loom's. No wait there ends because time has passed.

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
pub struct Condvar(loom::sync::Condvar);

impl Condvar {
    /// One that nobody waits for.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for a change.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).expect("loom's are not poisoned")
    }

    /// The same: loom knows of no time.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, _time: Duration) -> (MutexGuard<'a, T>, bool) {
        (self.wait(guard), false)
    }

    /// Something has changed.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}
