//! Code for the steering programs (BPF) of both roles, frontend and backend, and the errors of loading them. A *flow*
//! is the record of a client connection in these programs' maps.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::{Map, Value};
use shunt_handoff::frontend::FlowKey;
use shunt_handoff::{Counter, SteeringError};
use shunt_sys::cgroup;
use shunt_wire::{Address, Endpoint};

use crate::os::holder;
use shunt_config::Config;
use shunt_host::errors::chain;
use shunt_host::interfaces::{self, InterfaceError};
use shunt_host::sockets;

/// Reason why the steering programs could not be loaded, used or removed.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    /// An interface of the configuration cannot be used.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// This machine lacks something, or a system call on it has failed.
    #[error("{what}: {error}")]
    Host {
        /// The step that failed.
        what: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
    /// Another agent uses the pins (files in bpffs) of the programs.
    #[error(
        "an agent{} uses the programs pinned in {}: stop it first (systemctl stop shuntd)",
        holder::by(*.by), .pins.display()
    )]
    Running {
        /// Directory with the pins.
        pins: PathBuf,
        /// Process id of the agent, if it is known.
        by: Option<i32>,
    },
    /// The agent that uses the pins has not ended, although it was told to.
    #[error(
        "the agent{} that uses the programs pinned in {} does not end: {}",
        holder::by(*.process), .pins.display(), match .process {
            Some(process) => format!("end it by `kill -KILL {process}`, or restart this machine"),
            None => "end it, or restart this machine".into(),
        }
    )]
    Stays {
        /// Process id of the agent, if it is known.
        process: Option<i32>,
        /// Directory with the pins.
        pins: PathBuf,
    },
    /// Another agent's programs are on an interface.
    #[error("{error}{}", holder::running(.pins.as_ref()))]
    Taken {
        /// Names the interface, and says what to do.
        error: SteeringError,
        /// Directory with the other agent's pins, if it is known.
        pins: Option<PathBuf>,
    },
    /// An agent still uses programs whose pins (files in bpffs) are gone.
    #[error(
        "process {process} uses the program {program} on interface \"{interface}\", whose pins are gone: stop it \
         first (systemctl stop shuntd)"
    )]
    InUse {
        /// Name of the program.
        program: &'static str,
        /// Name of the interface.
        interface: String,
        /// Process id of the agent that uses the program.
        process: i32,
    },
    /// The programs or maps cannot be loaded or used.
    #[error(transparent)]
    Steering(SteeringError),
}

impl From<SteeringError> for SteerError {
    fn from(error: SteeringError) -> Self {
        match &error {
            SteeringError::Taken { pins, .. } => Self::Taken { pins: pins.clone(), error },
            _ => Self::Steering(error),
        }
    }
}

/// Places that the programs are attached to.
pub(crate) struct Place {
    pub(crate) cgroup: PathBuf,
    pub(crate) netns_cookie: u64,
    pub(crate) interfaces: Vec<u32>,
}

impl Place {
    pub(crate) fn of(config: &Config, names: &[String]) -> Result<Self, SteerError> {
        let host = |what| move |error| SteerError::Host { what, error };
        let cgroup = cgroup::chosen(config.cgroup.as_deref()).map_err(host("`cgroup`"))?;
        if config.cgroup.is_none() {
            tracing::info!(
                cgroup = %cgroup.display(),
                "found cgroup v2: servers must be below it (`cgroup` names another)"
            );
        }
        Ok(Self {
            cgroup,
            netns_cookie: sockets::netns_cookie().map_err(host("asking for the network namespace's cookie"))?,
            interfaces: interfaces::present(names)?,
        })
    }
}

/// Returns both ends of a flow's connection, in the order of /proc/net/tcp: this machine's end first.
pub(crate) fn ends(key: &FlowKey) -> (SocketAddr, SocketAddr) {
    let end = |address, port: u16| Endpoint { address: Address(address), port_be: port.to_ne_bytes() }.socket_addr();
    (end(key.server_address, key.server_port), end(key.client_address, key.client_port))
}

pub(crate) fn named(counters: Result<Vec<Counter>, SteeringError>) -> Map<String, Value> {
    let counters = counters.unwrap_or_else(|error| {
        tracing::error!(error = chain(&error), "cannot read the steering programs' counters");
        Vec::new()
    });
    counters.into_iter().map(|counter| (counter.name.to_owned(), Value::from(counter.value))).collect()
}
