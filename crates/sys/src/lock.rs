//! A mutex and a condition variable: by futex(2) calls of our own, and where loom tries every order of steps (scripts/loom), its.

#[cfg(not(loom))]
mod futex;
#[cfg(loom)]
mod loomed;

#[cfg(not(loom))]
pub use std::sync::atomic;

#[cfg(not(loom))]
pub use futex::{Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(loom)]
pub use loomed::{Condvar, Mutex, MutexGuard};
