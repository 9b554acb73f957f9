//! The faults: how each is injected, and how an operator or a supervisor repairs the damage. An *agent* is Shunt's
//! daemon on a machine. A *bystander* is a client that must not notice the fault.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::bed::{Bed, Way};
use super::scarcity;
use super::step::Part;
use crate::disk::Reads;
use crate::host::Host;
use crate::upgrade;

/// Duration of the faults that are repaired although the response may not have ended.
const WHILE: Duration = Duration::from_secs(1);

/// A fault of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    BackendServerKilled,
    BackendServerReloaded,
    BackendAgentKilled,
    BackendAgentRestarted,
    BackendAgentStopped,
    FrontendWorkerKilled,
    FrontendServerKilled,
    FrontendServerReloaded,
    FrontendServerUpgraded,
    FrontendAgentKilled,
    FrontendAgentRestarted,
    FrontendAgentStopped,
    IntermediateKilled,
    BackendCut,
    BackendCutBriefly,
    FrontendCut,
    FrontendCutBriefly,
    SessionLost,
    FlowTableFull,
    FrontendAgentNoDescriptors,
    BackendAgentNoDescriptors,
    FrontendAgentNoMemory,
    BackendAgentNoMemory,
    NoPorts,
    DiskReadError,
}

impl Fault {
    pub const ALL: [Self; 25] = [
        Self::BackendServerKilled,
        Self::BackendServerReloaded,
        Self::BackendAgentKilled,
        Self::BackendAgentRestarted,
        Self::BackendAgentStopped,
        Self::FrontendWorkerKilled,
        Self::FrontendServerKilled,
        Self::FrontendServerReloaded,
        Self::FrontendServerUpgraded,
        Self::FrontendAgentKilled,
        Self::FrontendAgentRestarted,
        Self::FrontendAgentStopped,
        Self::IntermediateKilled,
        Self::BackendCut,
        Self::BackendCutBriefly,
        Self::FrontendCut,
        Self::FrontendCutBriefly,
        Self::SessionLost,
        Self::FlowTableFull,
        Self::FrontendAgentNoDescriptors,
        Self::BackendAgentNoDescriptors,
        Self::FrontendAgentNoMemory,
        Self::BackendAgentNoMemory,
        Self::NoPorts,
        Self::DiskReadError,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BackendServerKilled => "backend-server-killed",
            Self::BackendServerReloaded => "backend-server-reloaded",
            Self::BackendAgentKilled => "backend-agent-killed",
            Self::BackendAgentRestarted => "backend-agent-restarted",
            Self::BackendAgentStopped => "backend-agent-stopped",
            Self::FrontendWorkerKilled => "frontend-worker-killed",
            Self::FrontendServerKilled => "frontend-server-killed",
            Self::FrontendServerReloaded => "frontend-server-reloaded",
            Self::FrontendServerUpgraded => "frontend-server-upgraded",
            Self::FrontendAgentKilled => "frontend-agent-killed",
            Self::FrontendAgentRestarted => "frontend-agent-restarted",
            Self::FrontendAgentStopped => "frontend-agent-stopped",
            Self::IntermediateKilled => "intermediate-killed",
            Self::BackendCut => "backend-cut",
            Self::BackendCutBriefly => "backend-cut-briefly",
            Self::FrontendCut => "frontend-cut",
            Self::FrontendCutBriefly => "frontend-cut-briefly",
            Self::SessionLost => "session-lost",
            Self::FlowTableFull => "flow-table-full",
            Self::FrontendAgentNoDescriptors => "frontend-agent-no-descriptors",
            Self::BackendAgentNoDescriptors => "backend-agent-no-descriptors",
            Self::FrontendAgentNoMemory => "frontend-agent-no-memory",
            Self::BackendAgentNoMemory => "backend-agent-no-memory",
            Self::NoPorts => "no-ports",
            Self::DiskReadError => "disk-read-error",
        }
    }

    /// Beginning of the paths that clients ask for.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::DiskReadError => "/t/disk/",
            _ => "/t/",
        }
    }

    /// Path of the bystander, on which there is nothing that the fault breaks.
    pub(super) fn bystander(self) -> Way {
        match self {
            Self::FrontendWorkerKilled | Self::FrontendServerKilled | Self::FrontendCut | Self::FrontendCutBriefly => {
                Way::Straight
            }
            Self::FrontendAgentKilled
            | Self::FrontendAgentRestarted
            | Self::FrontendAgentStopped
            | Self::FrontendAgentNoMemory => Way::Plain,
            _ => Way::Other,
        }
    }

    /// Duration of a fault that is repaired although the response may not have ended. `None` for a fault that is
    /// repaired after the response has ended.
    pub(crate) fn lasts(self) -> Option<Duration> {
        match self {
            Self::BackendAgentStopped | Self::FrontendAgentStopped => Some(WHILE),
            Self::BackendCutBriefly | Self::FrontendCutBriefly => Some(WHILE),
            _ => None,
        }
    }

    /// Prepares what the fault needs before the response begins.
    pub(super) fn prepare(self, bed: &mut Bed<'_>) -> Result<()> {
        match self {
            Self::FrontendServerUpgraded => {
                let frontend = bed.frontend();
                upgrade::daemonize(bed.service.chain_mut(), frontend)
            }
            Self::DiskReadError => bed.disk().map(drop),
            _ => Ok(()),
        }
    }

    pub(crate) fn inject(self, bed: &mut Bed<'_>) -> Result<()> {
        let (frontend, backend) = (bed.frontend(), bed.backend());
        match self {
            Self::BackendServerKilled => Part::BackendServer.signal(bed, Signal::KILL),
            Self::BackendServerReloaded => Part::BackendServer.signal(bed, Signal::HUP),
            Self::BackendAgentKilled => bed.service.kill_agent(backend),
            Self::BackendAgentRestarted => {
                bed.service.kill_agent(backend)?;
                bed.service.start_agent(backend)
            }
            Self::BackendAgentStopped => Part::BackendAgent.signal(bed, Signal::STOP),
            Self::FrontendWorkerKilled => kill_workers(frontend),
            Self::FrontendServerKilled => Part::FrontendServer.signal(bed, Signal::KILL),
            Self::FrontendServerReloaded => Part::FrontendServer.signal(bed, Signal::HUP),
            Self::FrontendServerUpgraded => upgrade::upgrade(frontend),
            Self::FrontendAgentKilled => bed.service.kill_agent(frontend),
            Self::FrontendAgentRestarted => {
                bed.service.kill_agent(frontend)?;
                bed.service.start_agent(frontend)
            }
            Self::FrontendAgentStopped => Part::FrontendAgent.signal(bed, Signal::STOP),
            Self::IntermediateKilled => Part::Intermediate.signal(bed, Signal::KILL),
            Self::BackendCut | Self::BackendCutBriefly => bed.lab.cut(backend, SERVICE_PORT),
            Self::FrontendCut | Self::FrontendCutBriefly => bed.lab.cut(frontend, SERVICE_PORT),
            Self::SessionLost => lose_session(frontend, backend),
            Self::FlowTableFull => scarcity::fill_flow_table(bed),
            Self::FrontendAgentNoDescriptors => scarcity::take_descriptors(bed, frontend),
            Self::BackendAgentNoDescriptors => scarcity::take_descriptors(bed, backend),
            Self::FrontendAgentNoMemory => scarcity::take_memory(bed, frontend),
            Self::BackendAgentNoMemory => scarcity::take_memory(bed, backend),
            Self::NoPorts => {
                let taken = [frontend, bed.intermediate()].into_iter().map(scarcity::take_ports);
                bed.taken_ports = taken.collect::<Result<_>>()?;
                Ok(())
            }
            Self::DiskReadError => bed.disk()?.set(Reads::Fail),
        }
    }

    /// Repairs what the fault broke.
    pub(crate) fn repair(self, bed: &mut Bed<'_>) -> Result<()> {
        let (frontend, backend) = (bed.frontend(), bed.backend());
        match self {
            Self::BackendServerKilled => bed.service.chain_mut().restart(backend),
            Self::FrontendServerKilled => bed.service.chain_mut().restart(frontend),
            Self::FrontendServerUpgraded => {
                upgrade::end_servers(frontend)?;
                bed.service.chain_mut().restart(frontend)
            }
            Self::IntermediateKilled => {
                let intermediate = bed.intermediate();
                bed.service.chain_mut().restart(intermediate)
            }
            Self::BackendAgentKilled => bed.service.start_agent(backend),
            Self::FrontendAgentKilled => bed.service.start_agent(frontend),
            Self::BackendAgentStopped => Part::BackendAgent.signal(bed, Signal::CONT),
            Self::FrontendAgentStopped => Part::FrontendAgent.signal(bed, Signal::CONT),
            Self::BackendCut | Self::BackendCutBriefly => bed.lab.join(backend, SERVICE_PORT),
            Self::FrontendCut | Self::FrontendCutBriefly => bed.lab.join(frontend, SERVICE_PORT),
            Self::FlowTableFull => scarcity::empty_flow_table(bed),
            Self::FrontendAgentNoDescriptors | Self::FrontendAgentNoMemory => scarcity::give_back(bed, frontend),
            Self::BackendAgentNoDescriptors | Self::BackendAgentNoMemory => scarcity::give_back(bed, backend),
            Self::NoPorts => {
                bed.taken_ports.clear();
                [frontend, bed.intermediate()].into_iter().try_for_each(scarcity::give_ports)
            }
            Self::DiskReadError => bed.disk()?.set(Reads::Well),
            Self::BackendServerReloaded
            | Self::BackendAgentRestarted
            | Self::FrontendWorkerKilled
            | Self::FrontendServerReloaded
            | Self::FrontendAgentRestarted
            | Self::SessionLost => Ok(()),
        }
    }
}

const SERVICE_PORT: &str = "service0";

fn kill_workers(host: &Host) -> Result<()> {
    upgrade::signal_servers(host, "worker", Signal::KILL)
}

/// Destroys the TCP connection between the agents of two hosts (by sock_diag), as the kernel does after a timeout.
fn lose_session(one: &Host, other: &Host) -> Result<()> {
    let other = other.service_address().context("the backend is on the service network")?.to_string();
    let mut ss = Command::new("ss");
    ss.args(["-K", "-t", "dst", &other, "and", "(", "sport", "=", ":7440", "or", "dport", "=", ":7440", ")"]);
    one.check(ss).map(drop)
}
