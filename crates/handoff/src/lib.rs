//! The shortcut: who may send on a client's connection, and how its packets are steered.
//!
//! * [`frontend`], [`backend`]: loading, attaching and using the steering programs (bpf/). The programs outlive the
//!   agent that loaded them: a restarted agent takes them over.
//! * [`sender`], [`payload`]: the backend's socket for a client whose connection belongs to the frontend, and the bytes
//!   sent.
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
