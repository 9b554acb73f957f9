//! The agent's side of one connection with a server (a program of this machine that hands off or offers bodies).

use std::os::fd::OwnedFd;

use super::board::WorkerCounters;

/// One connection with a server.
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// Counters that the server writes; present once the server has sent HELLO.
    pub(crate) counters: Option<WorkerCounters>,
}
