//! Mutex and condition variable, built on direct futex(2) calls. In builds for loom, which tries every order of the
//! threads' steps (scripts/loom), loom's own take their place. Loom also tests the futex-based ones, with words of
//! memory that it can follow (tests/lock_orders.rs).

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
