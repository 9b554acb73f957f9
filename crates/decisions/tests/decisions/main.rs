//! What the steering programs decide, without a kernel. That the programs decide the same in one is for
//! crates/handoff/tests/steering.
#![allow(missing_docs)]

mod arrivals;
mod connection;
mod departures;
mod histories;
mod regions;
mod senders;
mod spaces;
