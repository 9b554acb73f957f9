//! Tests of what the steering programs decide, without a kernel. The tests in crates/handoff/tests/steering check that
//! the programs decide the same in a kernel.
#![allow(missing_docs)]

mod arrivals;
mod connection;
mod departures;
mod histories;
mod regions;
mod senders;
mod spaces;
