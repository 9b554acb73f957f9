//! Connections between programs under Shunt (started by `shunt run`). From the lowest module up:
//!
//! * [`entries`]: which descriptor is which; [`states`]: the state of each connection, which processes share;
//!   [`runtime`]: state that all connections of a process have in common;
//! * [`users`]: state that a process gives up when it becomes another user's;
//! * `learning`: which bytes of a write are sent inline, not by reference, because the receiver would look at them;
//! * [`waiting`]: waits in place of the program's own; `ahead`: a walk through bytes seen in a socket;
//! * [`reading`]: a read under way; `peek`, [`receive`], [`available`]: MSG_PEEK, recv(2) and FIONREAD;
//! * [`send`]: writes; [`pipe`]: splice(2) in both directions.

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
