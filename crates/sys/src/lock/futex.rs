//! Mutex and condition variable on direct futex(2) calls. The standard library's locks call libc's syscall(3). In a
//! program under `shunt run`, the preloaded library (crates/preload) replaces syscall(3). The library's own locks must
//! not call this replacement, so the standard library's locks cannot be used there.
//!
//! There is no poisoning: after a panic, the next owner of the lock finds the value as the panic left it.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::word::{LOOKS, Ordering, Word, wait, wake};

/// Values of a mutex's word.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Locked, and other threads may be waiting.
const WAITED_FOR: u32 = 2;

/// A value that one thread at a time may use.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized> {
    word: Word,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and one guard exists at a time.
unsafe impl<T: ?Sized + Send> Send for Mutex<T> {}
// SAFETY: the value is reached only through a guard, and one guard exists at a time.
unsafe impl<T: ?Sized + Send> Sync for Mutex<T> {}

/// Access to the value of a locked [`Mutex`]. Dropping the guard unlocks the mutex.
#[derive(Debug)]
#[clippy::has_significant_drop]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    /// Makes the guard not `Send`, so that the thread that has locked the mutex also unlocks it.
    _thread: std::marker::PhantomData<*const ()>,
}

// SAFETY: a shared guard gives only shared references to the value.
unsafe impl<T: ?Sized + Sync> Sync for MutexGuard<'_, T> {}

impl<T> Mutex<T> {
    /// Makes an unlocked mutex.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self { word: Word::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Makes an unlocked mutex. Not const, because loom creates its words at run time.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self { word: Word::new(FREE), value: UnsafeCell::new(value) }
    }
}

impl<T: ?Sized> Mutex<T> {
    fn guard(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, _thread: std::marker::PhantomData }
    }

    /// Locks, waiting while another thread has the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_contended();
        }
        self.guard()
    }

    #[cold]
    fn lock_contended(&self) {
        for _ in 0..LOOKS {
            if self.word.load(Ordering::Relaxed) == FREE
                && self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            std::hint::spin_loop();
        }
        // A thread that has waited sets WAITED_FOR when it locks, because others may still be waiting.
        while self.word.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            wait(&self.word, WAITED_FOR, None);
        }
    }

    /// Locks without waiting. `None`: another thread has the lock.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let is_free = self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        is_free.then(|| self.guard())
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: no other thread reaches the value while the guard lives.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other thread reaches the value while the guard lives.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.mutex.word.swap(FREE, Ordering::Release) == WAITED_FOR {
            wake(&self.mutex.word, 1);
        }
    }
}

/// Condition variable. A thread that holds a lock waits here for a change, and gives the lock up while it waits.
#[derive(Debug, Default)]
pub struct Condvar {
    /// Number of changes so far; it wraps.
    changes: Word,
}

impl Condvar {
    /// Makes a condition variable without waiters.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { changes: Word::new(0) }
    }

    /// Makes a condition variable without waiters. Not const, because loom creates its words at run time.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { changes: Word::new(0) }
    }

    fn wait_at_most<'a, T: ?Sized>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Option<Duration>,
    ) -> (MutexGuard<'a, T>, bool) {
        let mutex = guard.mutex;
        // Read before the lock is given up, so that the kernel, which compares this value, detects any later change.
        let changes = self.changes.load(Ordering::Relaxed);
        drop(guard);
        let is_over = wait(&self.changes, changes, time);
        (mutex.lock(), is_over)
    }

    /// Waits for a change. May also return without a change.
    pub fn wait<'a, T: ?Sized>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.wait_at_most(guard, None).0
    }

    /// Waits for a change, at most for `time`. The flag is true where the time has run out.
    pub fn wait_timeout<'a, T: ?Sized>(&self, guard: MutexGuard<'a, T>, time: Duration) -> (MutexGuard<'a, T>, bool) {
        self.wait_at_most(guard, Some(time))
    }

    /// Reports a change to all waiters. The caller makes the change with the lock held, and may unlock before this
    /// call.
    pub fn notify_all(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        wake(&self.changes, i32::MAX as u32);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        const THREADS: usize = 8;
        const STEPS: usize = 20_000;
        let counter = Arc::new(Mutex::new(0_usize));
        let count = |counter: Arc<Mutex<usize>>| {
            move || {
                for step in 0..STEPS {
                    let mut counter = counter.lock();
                    let before = *counter;
                    if step % 1000 == 0 {
                        thread::yield_now();
                    }
                    *counter = before + 1;
                }
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|_| thread::spawn(count(Arc::clone(&counter)))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*counter.lock(), THREADS * STEPS);
    }

    #[test]
    fn a_lock_that_is_taken_is_not_taken_twice() {
        let mutex = Mutex::new(1);
        let guard = mutex.lock();
        assert!(mutex.try_lock().is_none());
        drop(guard);
        *mutex.try_lock().unwrap() = 2;
        assert_eq!(*mutex.lock(), 2);
    }

    #[test]
    fn all_who_wait_hear_of_a_change() {
        let shared = Arc::new((Mutex::new(0_u32), Condvar::new()));
        let wait = |shared: Arc<(Mutex<u32>, Condvar)>| {
            move || {
                let (mutex, changed) = &*shared;
                for turn in 1..=500 {
                    let mut value = mutex.lock();
                    while *value < turn {
                        value = changed.wait(value);
                    }
                }
            }
        };
        let threads: Vec<_> = (0..4).map(|_| thread::spawn(wait(Arc::clone(&shared)))).collect();
        for turn in 1..=500 {
            *shared.0.lock() = turn;
            shared.1.notify_all();
            if turn % 50 == 0 {
                thread::yield_now();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_wait_ends_with_its_time() {
        let (mutex, changed) = (Mutex::new(()), Condvar::new());
        let begun = Instant::now();
        while !changed.wait_timeout(mutex.lock(), Duration::from_millis(20)).1 {}
        assert!(begun.elapsed() >= Duration::from_millis(20));
        assert!(mutex.try_lock().is_some());
    }
}
