//! The parts of a service, and how each goes silent and comes back. An *agent* is Shunt's daemon on a machine. With
//! on-demand buffers (`shunt run`), each agent has a *store* with the bodies that programs of its machine have written.
//! The *holder* is the machine whose store has a body. A *reference* names bytes of the body in a connection, and the
//! last machine *fetches* the bytes from the holder.

use std::process::Command;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::disk::{Disk, Reads};
use crate::faults::{Bed, DISK};
use crate::host::Host;
use crate::lab::Lab;

/// Part of the service that goes silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The backend's nginx.
    Backend,
    BackendAgent,
    FrontendAgent,
    /// The disk with the file that is sent.
    Disk,
    /// The links between the backend and all other hosts.
    Link,
    Intermediate,
    /// With on-demand buffers: the program that has produced the body.
    Holder,
    /// The agent of the holder's machine, whose store has the body.
    HolderStore,
    /// The links between the holder's machine and all other hosts.
    HolderMachine,
    /// The agent of a machine whose programs only pass references on.
    MiddleStore,
    MiddleMachine,
    /// The agent of the machine that fetches bodies.
    ReaderStore,
}

/// Manner in which a part goes silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Manner {
    /// The part does nothing: SIGSTOP, a pulled cable, a disk that does not answer reads.
    Stopped,
    /// All packets to or from the part are lost. On a disk, files cannot be opened or read.
    Blackholed,
    /// The part works only for short moments. On a disk, each read takes long.
    Slow,
}

impl Part {
    pub const ALL: [Self; 12] = [
        Self::Backend,
        Self::BackendAgent,
        Self::FrontendAgent,
        Self::Disk,
        Self::Link,
        Self::Intermediate,
        Self::Holder,
        Self::HolderStore,
        Self::HolderMachine,
        Self::MiddleStore,
        Self::MiddleMachine,
        Self::ReaderStore,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Backend => "backend",
            Self::BackendAgent => "backend-agent",
            Self::FrontendAgent => "frontend-agent",
            Self::Disk => "disk",
            Self::Link => "link",
            Self::Intermediate => "intermediate",
            Self::Holder => "holder",
            Self::HolderStore => "holder-store",
            Self::HolderMachine => "holder-machine",
            Self::MiddleStore => "middle-store",
            Self::MiddleMachine => "middle-machine",
            Self::ReaderStore => "reader-store",
        }
    }

    /// Whether the part belongs to a service of unmodified programs under `shunt run`.
    pub(super) fn is_on_demand(self) -> bool {
        self >= Self::Holder
    }

    fn is_agent(self) -> bool {
        use Part::{BackendAgent, FrontendAgent, HolderStore, MiddleStore, ReaderStore};
        matches!(self, BackendAgent | FrontendAgent | HolderStore | MiddleStore | ReaderStore)
    }

    fn is_machine(self) -> bool {
        matches!(self, Self::Link | Self::HolderMachine | Self::MiddleMachine)
    }

    fn host(self, lab: &Lab) -> &Host {
        match self {
            Self::FrontendAgent | Self::ReaderStore => lab.frontend(),
            Self::Intermediate | Self::MiddleStore | Self::MiddleMachine => lab.intermediates()[0],
            _ => lab.backend(),
        }
    }

    /// Beginning of the URL paths that clients ask for if they need the silent part.
    pub(super) fn prefix(self) -> String {
        if self == Self::Disk { format!("/t/{DISK}/") } else { "/t/".to_owned() }
    }

    /// Beginnings of the URL paths that bystanders (clients that do not need the silent part) ask for.
    pub(super) fn bystanders(self, manner: Manner) -> &'static [&'static str] {
        match (self, manner) {
            // Bystanders also ask for `/t/`, although the same nginx worker reads from the silent disk: a file that
            // cannot be read does not stop the worker. A file that cannot be opened does, with Shunt and without.
            (Self::Disk, Manner::Stopped | Manner::Slow) => &["/t/", "/other/", "/plain/"],
            // All responses that this frontend hands off to backends need the frontend's agent.
            (Self::FrontendAgent, _) => &["/plain/"],
            // Bodies that this frontend fetches come through the frontend's agent.
            (Self::ReaderStore, _) => &["/own/"],
            _ if self.is_on_demand() => &["/other/", "/own/"],
            _ => &["/other/", "/plain/"],
        }
    }
}

impl Manner {
    pub const ALL: [Self; 3] = [Self::Stopped, Self::Blackholed, Self::Slow];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Blackholed => "blackholed",
            Self::Slow => "slow",
        }
    }
}

/// Device of a host's port on the network of the tiers. Backends have no other port.
const PORT: &str = "service0";
const AGENTS_PORT: u16 = 7440;
const SERVERS_PORT: u16 = 80;

/// Way in which a part is made silent.
pub(super) enum Switch<'a> {
    /// Every process of a group is stopped.
    Group(Pid),
    /// The cable is pulled.
    Cable(&'a Lab, &'a Host),
    /// The switch drops the host's frames.
    Port(&'a Lab, &'a Host),
    /// The host sends nothing from or to a port of TCP.
    Tcp(&'a Host, u16),
    Disk(&'a Disk, Reads),
}

impl<'a> Switch<'a> {
    /// Chooses the means for a part and a manner.
    ///
    /// # Errors
    /// When the part does not run.
    pub(super) fn of(part: Part, manner: Manner, bed: &'a mut Bed<'_>) -> Result<Self> {
        let lab = bed.lab();
        let host = part.host(lab);
        Ok(match (part, manner) {
            (Part::Disk, Manner::Slow) => Self::Disk(bed.disk()?, Reads::Slowly),
            (Part::Disk, Manner::Stopped) => Self::Disk(bed.disk()?, Reads::Hang),
            (Part::Disk, Manner::Blackholed) => Self::Disk(bed.disk()?, Reads::Gone),
            (_, Manner::Stopped) if part.is_machine() => Self::Cable(lab, host),
            (Part::Intermediate, Manner::Blackholed) => Self::Port(lab, host),
            _ if part.is_machine() => Self::Port(lab, host),
            (Part::Backend | Part::Holder, Manner::Blackholed) => Self::Tcp(host, SERVERS_PORT),
            (_, Manner::Blackholed) if part.is_agent() => Self::Tcp(host, AGENTS_PORT),
            _ => {
                let process = match part.is_agent() {
                    true => bed.service.agent_process(host)?,
                    false => bed.service.chain_mut().process(host.name()),
                };
                let process = process.with_context(|| format!("{} does not run", part.name()))?;
                let group = i32::try_from(process.pid()).ok().and_then(Pid::from_raw);
                Self::Group(group.context("a process has a number")?)
            }
        })
    }

    /// Makes the part silent, or ends the silence.
    pub(super) fn silence(&self, silent: bool) -> Result<()> {
        match self {
            Self::Group(group) => {
                let signal = if silent { Signal::STOP } else { Signal::CONT };
                kill_process_group(*group, signal).context("signalling a part")
            }
            Self::Cable(lab, host) if silent => lab.cut(host, PORT),
            Self::Cable(lab, host) => lab.join(host, PORT),
            Self::Port(lab, host) => lab.blackhole(host, PORT, silent),
            Self::Tcp(host, port) => ["sport", "dport"].into_iter().try_for_each(|end| {
                let mut ip = Command::new("ip");
                ip.args(["rule", if silent { "add" } else { "del" }, "pref", "10", "ipproto", "tcp", end]);
                ip.args([&port.to_string(), "blackhole"]);
                host.check(ip).map(drop)
            }),
            Self::Disk(disk, reads) => disk.set(if silent { *reads } else { Reads::Well }),
        }
    }

    /// Whether the part can be slow by itself, so that its silence need not be switched on and off.
    pub(super) fn is_slow(&self) -> bool {
        matches!(self, Self::Disk(..))
    }
}
