//! The types of `futex.rs`, built on loom's mutex and condition variable. Loom has no clock, and explores only runs
//! that end. So on each condition variable, the first wait with a time limit ends at once, and later waits have no time
//! limit.

use std::time::Duration;

pub use loom::sync::MutexGuard;

/// A value that one thread at a time may use.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes an unlocked mutex.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Locks, waiting while another thread has the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("loom's are not poisoned")
    }

    /// Locks without waiting. `None`: another thread has the lock.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// Condition variable. A thread that holds a lock waits here for a change, and gives the lock up while it waits.
#[derive(Debug, Default)]
pub struct Condvar {
    of_loom: loom::sync::Condvar,
    /// Whether a wait with a time limit has been made already. An ordinary atomic, not loom's, so that loom has no
    /// further step to explore.
    is_over: std::sync::atomic::AtomicBool,
}

impl Condvar {
    /// Makes a condition variable without waiters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for a change.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.of_loom.wait(guard).expect("loom's are not poisoned")
    }

    /// Returns at once in the first call, with true: its time has run out. Later calls wait for a change.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, _time: Duration) -> (MutexGuard<'a, T>, bool) {
        if self.is_over.swap(true, std::sync::atomic::Ordering::Relaxed) {
            return (self.wait(guard), false);
        }
        (guard, true)
    }

    /// Reports a change to all waiters.
    pub fn notify_all(&self) {
        self.of_loom.notify_all();
    }
}
