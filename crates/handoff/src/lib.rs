//! The shortcut: who may send on a client's connection, and how its packets are steered.
//!
//! * [`frontend`], [`backend`]: loading, attaching and using the steering programs (bpf/). The programs outlive the
//!   agent that loaded them: a restarted agent takes them over.
//! * [`sender`]: the backend's sockets for clients whose connections belong to frontends. Each sends a [`body`], which
//!   is a [`payload`] in a framing, by a [`flow_sender`]. Three traits separate these parts: `Source` has a payload's
//!   bytes, `Framing` puts them into TLS records or leaves them as they are, and `FlowSender` sends.
//! * [`reading`]: threads that read file bytes which are not in memory.
//! * [`tls13`]: the framing of a TLS 1.3 connection.

#[doc(hidden)]
pub mod bpf;

mod attach;
pub mod backend;
pub mod body;
mod calls;
pub mod counters;
mod detach;
pub mod error;
pub mod flow_sender;
pub mod framing;
pub mod frontend;
pub mod identity;
mod in_memory;
mod moved;
mod neighbours;
mod noted;
mod older;
mod ownership;
pub mod payload;
pub mod pins;
pub mod probe;
pub mod reading;
pub mod sender;
mod spacing;
mod strays;
pub mod tls13;

pub use attach::{Attached, TcPrograms, attach_cgroup, attached, until_not_interrupted};
pub use backend::{Backend, BackendConfig};
pub use counters::Counter;
pub use detach::detach_all;
pub use error::SteeringError;
pub use frontend::{Frontend, FrontendConfig};
pub use moved::end_handoffs;
pub use older::Older;
pub use strays::{Stray, strays};
