//! Mutex and condition variable, built on direct futex(2) calls (futex.rs). Loom is a checker that tries every order of
//! the threads' steps (scripts/loom). In builds for loom, loom's own mutex and condition variable replace these two
//! (loomed.rs). Loom also checks the futex-based types themselves (tests/lock_orders.rs), with a model of futex(2)
//! (modelled.rs).

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
