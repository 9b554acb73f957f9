//! A chain of servers through a lab's tiers, ready to be asked.

use std::net::SocketAddrV4;
use std::path::PathBuf;

use anyhow::Result;

use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::process::Process;
use crate::topology::SERVICE_NETWORK;

/// Every tier's port.
pub(crate) const PORT: u16 = 80;

/// What Shunt adds to the configuration of one tier's nginx; all else is the same in ours and in the baseline.
#[derive(Debug, Clone, Default)]
pub struct ShuntPart {
    /// The module's file.
    pub module: PathBuf,
    /// Directives for `http`, without semicolons.
    pub http: Vec<String>,
    /// Directives for `location /`, without semicolons.
    pub location: Vec<String>,
}

impl ShuntPart {
    /// The usual part of a tier: Shunt on, with the agent of [`Self::agent_socket`]; a backend offers.
    #[must_use]
    pub fn of(host: &Host, module: impl Into<PathBuf>) -> Self {
        let socket = Self::agent_socket(host);
        let trust = format!("shunt_trust {SERVICE_NETWORK}");
        let http = vec![format!("shunt_agent {}", socket.display()), "shunt on".into(), trust];
        let offers = host.role() == Role::Backend;
        let location = offers.then(|| "shunt_offer on".to_owned()).into_iter().collect();
        Self { module: module.into(), http, location }
    }

    /// Where the lab's agents listen for their host's servers.
    #[must_use]
    pub fn agent_socket(host: &Host) -> PathBuf {
        host.dir().join("agent.sock")
    }
}

/// Tells each tier's part; `None` leaves the tier plain.
pub type ShuntParts<'a> = Box<dyn Fn(&Host) -> Option<ShuntPart> + 'a>;

/// The running servers of a chain. They end with it.
#[derive(Debug)]
pub struct Chain {
    /// Backends first: in the order in which they started.
    processes: Vec<(String, Process)>,
    frontend: SocketAddrV4,
    backend: SocketAddrV4,
}

impl Chain {
    /// Starts a server on each tier, the last one first: `serve` is given the tier, the address that it is to
    /// listen at and the next tier's addresses (none for a backend).
    pub(crate) fn start(
        lab: &Lab,
        serve: impl Fn(&Host, SocketAddrV4, &[SocketAddrV4]) -> Result<Process>,
    ) -> Result<Self> {
        let address = |host: &Host| SocketAddrV4::new(host.address(), PORT);
        let start = |host: &Host, next: &[SocketAddrV4]| -> Result<(String, Process)> {
            Ok((host.name().to_owned(), serve(host, address(host), next)?))
        };
        let mut processes = Vec::new();
        let mut next = Vec::new();
        for host in lab.hosts_of(Role::Backend) {
            processes.push(start(host, &[])?);
            next.push(address(host));
        }
        for host in lab.intermediates().into_iter().rev().chain([lab.frontend()]) {
            processes.push(start(host, &next)?);
            next = vec![address(host)];
        }
        Ok(Self { processes, frontend: address(lab.frontend()), backend: address(lab.backend()) })
    }

    /// Where clients ask.
    #[must_use]
    pub fn server(&self) -> SocketAddrV4 {
        self.frontend
    }

    /// The first backend, which a client of the lab can also ask directly.
    #[must_use]
    pub fn backend(&self) -> SocketAddrV4 {
        self.backend
    }

    /// The URL of a path through all tiers.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.frontend)
    }

    /// The URL of a path straight from the backend.
    #[must_use]
    pub fn direct_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.backend)
    }

    /// The server of a tier.
    pub fn process(&mut self, host: &str) -> Option<&mut Process> {
        self.processes.iter_mut().find(|(name, _)| name == host).map(|(_, process)| process)
    }

    /// Fails with the end of a server's log if one has ended.
    ///
    /// # Errors
    /// When one has.
    pub fn check_running(&mut self) -> Result<()> {
        self.processes.iter_mut().try_for_each(|(_, process)| process.check_running())
    }

    /// Ends all servers, the frontend first.
    ///
    /// # Errors
    /// When one cannot be ended.
    pub fn stop(mut self) -> Result<()> {
        while let Some((_, process)) = self.processes.pop() {
            process.stop()?;
        }
        Ok(())
    }
}

/// The directives of a list, one a line.
pub(crate) fn directives(indent: &str, list: &[String]) -> String {
    list.iter().map(|directive| format!("{indent}{directive};\n")).collect()
}
