//! Byte layouts of messages that leave a process, without I/O.
//!
//! * [`address`]: IP addresses and endpoints.
//! * [`addresses`]: addresses of a machine's programs under `shunt run`.
//! * [`flow`]: state of a client's connection that another machine needs in order to send on it.
//! * [`frame`]: headers and kinds of the frames between two agents.
//! * [`local`]: messages between a server and the agent of its machine (`include/shunt.h` has the same in C).
//! * [`options`]: socket options that steering programs answer.
//! * [`parts`]: payload of a handoff without an offer, as ranges of bytes in a store (memory for the
//!   bodies of programs under `shunt run`).
//! * [`peer`]: messages between two agents.
//! * [`prefixes`]: server addresses in whose name a backend sends payloads.
//! * [`reason`]: reasons why a handoff (a body is sent on a client's connection by another machine), a fetch (a body
//!   comes through both agents) or a session between two agents has ended.
//! * [`sources`]: stores that a machine's programs can fetch from.
//! * [`trace`]: trace-id of a client's request.
//! * [`tag`]: proof that an offer (a body that a backend holds ready) was made for this request, by this backend, with
//!   this length.
//! * [`tls`]: parameters of TLS 1.3 records that two tiers have to agree on.
//! * [`versions`]: choice of the version that two parties speak, and growth of messages.
#![forbid(unsafe_code)]

pub mod address;
pub mod addresses;
pub mod flow;
pub mod frame;
pub mod local;
pub mod options;
pub mod parts;
pub mod peer;
pub mod prefixes;
pub mod reason;
pub mod sources;
pub mod tag;
pub mod tls;
pub mod trace;
pub mod versions;

pub use address::{Address, Endpoint};
pub use tag::Tag;
pub use trace::TraceId;
