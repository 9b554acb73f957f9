//! `shuntd`, the agent: one per machine, and the only privileged part of Shunt.
//!
//! It takes offers (payloads that are ready) from the servers of its machine, and sends their payloads when a
//! frontend's agent claims them. It tells backends' agents of the handoffs of its own servers. Each handoff lets a
//! backend send a payload on a client's connection. The agent loads the steering programs (BPF), which translate these
//! connections' packets. `docs/shuntd.md` is the operator's page, and `docs/protocols.md` describes the protocols with
//! servers and between agents.
#![forbid(unsafe_code)]

mod backend;
mod daemon;
mod detach;
mod errors;
mod frontend;
mod kernel;
pub mod os;
pub mod peers;
mod servers;
mod slots;
mod steering;
mod store;
pub mod telemetry;

pub use daemon::{Daemon, SetLog};
pub use detach::detach;
pub use errors::StartError;
pub use steering::SteerError;
pub use store::programs::StoreError;
