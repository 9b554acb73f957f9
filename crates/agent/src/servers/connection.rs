//! The agent's side of one connection with a server.

use std::os::fd::OwnedFd;

use super::board::WorkerCounters;

/// One connection with a server.
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// Counters that the server writes; present once the server has sent HELLO.
    pub(crate) counters: Option<WorkerCounters>,
}
