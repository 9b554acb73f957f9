//! Placement of the hosts' work on cores.
//!
//! The work of a host is that of its processes, which affinity places, and the reception of its packets, which RPS
//! places. Without RPS, a veth device receives on the sender's core. Sending runs on the core of the process that
//! sends.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::host::{Host, Role};

/// Selection of the hosts whose work is on the measured core.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Placement {
    /// No placement: every host may use every core, without RPS.
    #[default]
    None,
    /// All tiers on the measured core, clients on [`Cores::rest`], the switch on [`Cores::link`].
    WholeService,
    /// One host, given by name, on the measured core; the others on [`Cores::rest`], the switch on [`Cores::link`].
    Tier(String),
}

/// Numbers of the cores that a measurement uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// The core whose busy time is read.
    pub measured: usize,
    /// The core of the hosts that are not measured.
    pub rest: usize,
    /// The core of the switch. With `None`, the switch's work is done on the core of the host that sends, as with a
    /// bare veth pair. A measured service then also pays for the link, but not for interrupts from it.
    pub link: Option<usize>,
}

impl Cores {
    /// One core for everything. Between cores a veth pair reorders packets, and TCP retransmits packets that were only
    /// late.
    pub const ONE: Self = Self { measured: 0, rest: 0, link: None };
}

impl Default for Cores {
    /// Core 1 is measured, because device interrupts arrive on core 0.
    fn default() -> Self {
        Self { measured: 1, rest: 0, link: None }
    }
}

impl Placement {
    /// The core of each host, by the host's name. `None`: the host may use any core.
    pub(crate) fn cores_of<'a>(
        &self,
        hosts: impl Iterator<Item = &'a Host>,
        cores: Cores,
    ) -> Result<BTreeMap<&'a str, Option<usize>>> {
        let of = |host: &Host| match self {
            Self::None => None,
            _ if host.role() == Role::Switch => cores.link,
            Self::WholeService if host.role().is_tier() => Some(cores.measured),
            Self::Tier(name) if host.name() == name => Some(cores.measured),
            Self::WholeService | Self::Tier(_) => Some(cores.rest),
        };
        let placed: BTreeMap<_, _> = hosts.map(|host| (host.name(), of(host))).collect();
        if let Self::Tier(name) = self
            && !placed.contains_key(name.as_str())
        {
            bail!("the lab has no host {name:?} to place");
        }
        Ok(placed)
    }
}
