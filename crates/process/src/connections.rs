//! Connections between programs under Shunt. From the lowest up:
//!
//! * [`entries`]: which descriptor is which; [`states`]: the state of each, which processes share; [`runtime`]: what all of a
//!   process's have in common;
//! * [`users`]: what a process lets go of that becomes another user's;
//! * `learning`: what of a write is not left in the store, because it would be looked at;
//! * [`waiting`]: the program's own waits; `ahead`: what is in a socket;
//! * [`reading`]: a read under way; `peek`, [`receive`], [`available`]: a look (MSG_PEEK), a read, FIONREAD;
//! * [`send`]: a write; [`pipe`]: splice(2), both ways.

mod ahead;
pub mod available;
pub mod entries;
mod learning;
mod peek;
pub mod pipe;
pub mod reading;
pub mod receive;
pub mod runtime;
pub mod send;
pub mod states;
pub mod users;
pub mod waiting;
