//! Byte layouts that leave a process, and nothing that does I/O.
//!
//! * [`addresses`]: those of a machine's programs under `shunt run`.
//! * [`flow`]: a client's connection, as whoever sends on it for another has to know it.
//! * [`local`]: between a server and the agent of its machine (`include/shunt.h` is the same in C).
//! * [`parts`]: what a handoff without an offer is of.
//! * [`peer`]: between two agents.
//! * [`prefixes`]: as which servers a backend sends payloads.
//! * [`sources`]: the stores that a machine's programs can fetch from.
//! * [`trace`]: which request of a client's something belongs to.
//! * [`tag`]: the proof that an offer was made for this request, by this backend, with this length.
//! * [`tls`]: TLS 1.3 records, as far as two tiers have to agree on them.
//! * [`versions`]: which version two parties speak, and how a message grows.
#![forbid(unsafe_code)]

pub mod address;
pub mod addresses;
pub mod flow;
pub mod local;
pub mod parts;
pub mod peer;
pub mod prefixes;
pub mod sources;
pub mod tag;
pub mod tls;
pub mod trace;
pub mod versions;

pub use address::{Address, Endpoint};
pub use tag::Tag;
pub use trace::TraceId;
