//! Marks threads that are inside the library. There a thread may hold locks, and a signal handler that interrupts it
//! must not wait for them: the handler's calls go straight to the kernel. The library may call the functions that it
//! has replaced, and these calls go straight to the kernel, too.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};

use shunt_sys::lock::{Mutex, MutexGuard};

use super::ranks::{self, Rank, Taken};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Marks the thread as inside the library, for as long as this value lives.
pub struct Inside;

impl Inside {
    /// Returns `None` if the thread is inside already.
    #[inline]
    pub fn enter() -> Option<Self> {
        // `then_some` is not used, because it always makes a value. If the thread is inside already, dropping that
        // value would clear the mark.
        if INSIDE.replace(true) { None } else { Some(Self) }
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Whether the thread is inside the library.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Restores a thread's former mark when it is dropped.
struct Back(bool);

impl Drop for Back {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// Calls `wait` with the thread marked as outside the library. The thread must hold none of the library's locks.
pub fn outside<T>(wait: impl FnOnce() -> T) -> T {
    ranks::none_held();
    let _back = Back(INSIDE.replace(false));
    wait()
}

/// A lock that only a thread inside the library holds. A thread that asks for it is inside until it gives the lock up.
pub struct Lock<T> {
    rank: Rank,
    mutex: Mutex<T>,
}

/// A held [`Lock`]. The lock is given up before the thread leaves the library.
#[clippy::has_significant_drop]
pub struct Held<'a, T> {
    guard: MutexGuard<'a, T>,
    _taken: Taken,
    _back: Back,
}

impl<T> Lock<T> {
    pub const fn new(rank: Rank, of: T) -> Self {
        Self { rank, mutex: Mutex::new(of) }
    }

    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        let (back, taken) = (Back(INSIDE.replace(true)), Taken::new(self.rank));
        Held { guard: self.mutex.lock(), _taken: taken, _back: back }
    }

    /// Returns `None` if another thread has the lock.
    pub fn try_lock(&self) -> Option<Held<'_, T>> {
        let back = Back(INSIDE.replace(true));
        let guard = self.mutex.try_lock()?;
        Some(Held { guard, _taken: Taken::tried(self.rank), _back: back })
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}
