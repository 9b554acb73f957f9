//! `shuntd`: one per machine, the only privileged part of Shunt.
//!
//! It takes offers from the servers of its machine and sends them when a frontend's agent claims them; it carries the
//! handoffs of its own servers to the backends' agents; it loads the steering programs. `docs/shuntd.md` is the
//! operator's page, `docs/protocols.md` describes both protocols.
#![forbid(unsafe_code)]

mod addresses;
mod agent;
mod alone;
mod asking;
mod board;
mod callers;
mod census;
mod claims;
mod closing;
pub mod config;
mod counters;
pub mod credentials;
mod detach;
mod digests;
pub mod doctor;
mod drain;
mod ends;
mod exposition;
mod fetches;
mod handoffs;
mod hearing;
mod host;
mod incoming;
mod interfaces;
pub mod limits;
pub mod log;
mod losses;
mod metrics;
mod offers;
mod own_addresses;
pub mod packets;
mod paths;
mod peers;
mod poll;
mod ports;
pub mod privileges;
mod proving;
mod reaching;
mod reads;
mod repeated;
mod routes;
pub mod seccomp;
mod servers;
mod serving;
mod sources;
mod speaks_for;
mod stats;
mod steer;
mod store;
#[cfg(test)]
mod test_machine;
mod threads;
mod transport;
mod uplinks;
mod views;
mod waiting;

pub use agent::{Agent, AgentError};
pub use detach::detach;
pub use steer::SteerError;
pub use store::StoreError;
