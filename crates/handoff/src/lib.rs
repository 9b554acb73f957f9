//! The shortcut: who may send on a client's connection, and how the packets find their way.
//!
//! * [`frontend`], [`backend`]: the steering programs (bpf/), loaded, attached and talked to. They outlive their
//!   loader: a restarted agent takes them over.
//! * [`sender`], [`payload`]: the backend's socket for a client that is not its own.
//! * [`reading`]: bytes of files that are not in memory.
//! * [`tls13`]: the payload on a TLS 1.3 connection.

#[doc(hidden)]
pub mod bpf;

mod attach;
pub mod backend;
mod body;
pub mod counters;
pub mod error;
pub mod frontend;
pub mod identity;
mod in_memory;
mod moved;
mod neighbours;
mod ownership;
pub mod payload;
pub mod pins;
pub mod probe;
pub mod reading;
pub mod sender;
mod spacing;
mod strays;
pub mod tls13;

pub use attach::{Attached, TcPrograms, attach_cgroup, attached, detach_all, until_not_interrupted};
pub use backend::{Backend, BackendConfig};
pub use counters::Counter;
pub use error::SteeringError;
pub use frontend::{Frontend, FrontendConfig};
pub use moved::end_handoffs;
pub use strays::{Stray, strays};
