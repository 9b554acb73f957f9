//! Whether a thread is in the library. There it may hold locks, and a signal's handler that interrupts it must not wait for
//! them: its calls go straight to the kernel. So may the library's own calls of what it has replaced.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};

use shunt_sys::lock::{Mutex, MutexGuard};

use super::ranks::{self, Rank, Taken};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The thread is in the library, for as long as this lives.
pub struct Inside;

impl Inside {
    /// `None`: it was already.
    #[inline]
    pub fn enter() -> Option<Self> {
        // Not `then_some`, which makes one and drops it where the thread was inside already.
        if INSIDE.replace(true) { None } else { Some(Self) }
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Whether the thread is in the library.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Puts the thread back to where it was.
struct Back(bool);

impl Drop for Back {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// Waits, in the library, without any lock.
pub fn outside<T>(wait: impl FnOnce() -> T) -> T {
    ranks::none_held();
    let _back = Back(INSIDE.replace(false));
    wait()
}

/// A lock that only a thread in the library holds: who asks for it is there from then on until it is given up.
pub struct Lock<T> {
    rank: Rank,
    mutex: Mutex<T>,
}

/// [`Lock::lock`]. The lock is given up before the thread leaves the library.
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

    /// `None`: another thread has it.
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
