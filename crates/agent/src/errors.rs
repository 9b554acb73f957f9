//! Errors of the agent's start.

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::steering::SteerError;
use crate::store::programs::StoreError;
use shunt_host::packets;
use shunt_host::sockets::PortTaken;
use shunt_transport::credentials::CredentialsError;

/// Reason why the agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The Unix socket for servers cannot be made.
    #[error("{0} (`socket` in the configuration)")]
    Socket(packets::ListenError),
    /// The address for other agents cannot be listened at.
    #[error("cannot listen at {address}: {error}; set `listen` to an unused address and port of this machine")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The address for counters cannot be listened at.
    #[error("cannot serve counters at {address}: {error}; set `metrics` to an unused address and port of this machine")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The steering programs (BPF) cannot be loaded.
    #[error(transparent)]
    Steer(#[from] SteerError),
    /// A user or group that the configuration names in `user`, `users`, `groups` or `observers` does not exist here.
    #[error("{0}; name an existing one, or create it")]
    Account(String),
    /// An address of `[backend] addresses` cannot be used.
    #[error("[backend] addresses: {address}: {error}; name addresses of this machine, or leave the key out")]
    Address {
        /// The address.
        address: IpAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// A program listens at one of the ports of `[backend] ports`.
    #[error(transparent)]
    PortTaken(#[from] PortTaken),
    /// The certificates cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The store, which has the payloads of programs under `shunt run`, cannot start.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another system call has failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}
