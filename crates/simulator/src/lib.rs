//! Simulation of whole services: 2 to 20 machines with the logic of their agents (an *agent* is Shunt's daemon; see
//! crates/logic), the steering programs' decisions (crates/decisions), and models of all else. The *steering programs*
//! are Shunt's BPF programs, which pass packets between clients, frontends and backends. The models are workers,
//! sockets, clients, and a network that delays, loses, duplicates and reorders packets. Agents stand still, are killed
//! and start again, and machines are cut off from each other.
//!
//! ```text
//!   history.rs   a seed decides everything: the service, its load, its faults
//!   script.rs    a test decides when clients ask, and when faults happen
//!   world.rs     the service and its network: one event after the other
//!   machine.rs   an agent and its kernel      worker.rs   its servers
//!   flow.rs      a client's connection at its frontend: socket, flow table
//!   sender.rs    a backend's socket           client.rs   a client: a TCP receiver that knows what it must get
//!   checks.rs    what must hold each time that an agent has looked at its limits, and at the end
//! ```
//!
//! A *history* is one simulated run. It is deterministic: the same seed gives the same history, on any machine.
#![forbid(unsafe_code)]

pub mod checks;
pub mod client;
pub mod content;
pub mod flow;
pub mod history;
pub mod host;
pub mod machine;
pub mod random;
pub mod schedule;
pub mod script;
pub mod sender;
pub mod worker;
pub mod world;

pub use history::{History, Outcome, run};
pub use script::Script;
pub use world::Fault;
