//! A mutex and a condition variable: by futex(2) calls of our own, and where loom tries every order of steps (scripts/loom), its.
//! It tries our own as well, on words that it knows of (tests/lock_orders.rs).

#[cfg(not(loom))]
mod futex;
#[cfg(loom)]
pub mod futex;
#[cfg(loom)]
mod loomed;
#[cfg(not(loom))]
mod word;
#[cfg(loom)]
#[path = "lock/modelled.rs"]
mod word;

#[cfg(not(loom))]
pub use std::sync::atomic;

#[cfg(not(loom))]
pub use futex::{Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(loom)]
pub use loomed::{Condvar, Mutex, MutexGuard};
