//! A running chain of servers, one on each tier (frontend, intermediate, backend) of a lab. An *agent* is Shunt's
//! daemon on a machine.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::host::{Family, Host, Role};
use crate::lab::Lab;
use crate::process::Process;
use crate::tls;
use crate::topology::SERVICE_NETWORKS;

/// Port of every tier's server.
pub(crate) const PORT: u16 = 80;

/// IP versions that a chain uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Families {
    /// IP version between clients and the frontend.
    pub clients: Family,
    /// IP version between tiers.
    pub tiers: Family,
    /// Whether the frontend has an IPv6 socket that accepts both versions (`ipv6only=off`), whatever the clients use.
    pub dual_stack: bool,
}

impl Families {
    /// Uses one version everywhere.
    #[must_use]
    pub fn all(family: Family) -> Self {
        Self { clients: family, tiers: family, dual_stack: false }
    }

    /// Address at which other hosts reach a tier's server.
    fn address(self, host: &Host) -> Result<SocketAddr> {
        let family = if host.role() == Role::Frontend { self.clients } else { self.tiers };
        Ok(SocketAddr::new(host.address_of(family)?, PORT))
    }

    /// Address at which a tier's server listens.
    fn listen(self, host: &Host) -> Result<SocketAddr> {
        match host.role() {
            Role::Frontend if self.dual_stack => Ok(SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT))),
            _ => self.address(host),
        }
    }
}

/// Shunt's part of the configuration of one tier's nginx. The rest of the configuration is the same with Shunt and
/// without it.
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
    /// Shunt's usual part of a tier's configuration: Shunt is on, with the agent at [`Self::agent_socket`]. A backend
    /// also offers its bodies to clients, past the other tiers.
    #[must_use]
    pub fn of(host: &Host, module: impl Into<PathBuf>) -> Self {
        let socket = Self::agent_socket(host);
        let trust = format!("shunt_trust {}", SERVICE_NETWORKS.join(" "));
        let http = vec![format!("shunt_agent {}", socket.display()), "shunt on".into(), trust];
        let offers = host.role() == Role::Backend;
        let location = offers.then(|| "shunt_offer on".to_owned()).into_iter().collect();
        Self { module: module.into(), http, location }
    }

    /// Adds `plain` to `shunt_trust`: the tier that sends requests to this one does not know Shunt, and bodies may
    /// bypass that tier.
    pub fn trust_plain(&mut self) {
        let trust = self.http.iter_mut().filter(|directive| directive.starts_with("shunt_trust "));
        trust.for_each(|directive| directive.push_str(" plain"));
    }

    /// Socket at which a host's agent listens for the host's servers.
    #[must_use]
    pub fn agent_socket(host: &Host) -> PathBuf {
        host.dir().join("agent.sock")
    }
}

/// Function that returns Shunt's part of each tier's configuration. For a tier with `None`, nginx runs without Shunt.
pub type ShuntParts<'a> = Box<dyn Fn(&Host) -> Option<ShuntPart> + 'a>;

/// The running servers of a chain. Dropping it ends them.
#[derive(Debug)]
pub struct Chain {
    /// Servers in the order in which they started, backends first.
    tiers: Vec<Tier>,
    frontend: SocketAddr,
    backend: SocketAddr,
}

/// The server of one tier.
#[derive(Debug)]
struct Tier {
    host: String,
    listen: SocketAddr,
    process: Process,
}

impl Chain {
    /// Starts a server on each tier, the backends' first. `serve` starts one: it gets the tier, the address to listen
    /// at, and the addresses of the next tier (none for a backend).
    pub(crate) fn start(
        lab: &Lab,
        families: Families,
        serve: impl Fn(&Host, SocketAddr, &[SocketAddr]) -> Result<Process>,
    ) -> Result<Self> {
        let start = |host: &Host, next: &[SocketAddr]| -> Result<Tier> {
            let listen = families.listen(host)?;
            Ok(Tier { host: host.name().to_owned(), listen, process: serve(host, listen, next)? })
        };
        let mut tiers = Vec::new();
        let mut next = Vec::new();
        for host in lab.hosts_of(Role::Backend) {
            tiers.push(start(host, &[])?);
            next.push(families.address(host)?);
        }
        let backend = next[0];
        for host in lab.intermediates().into_iter().rev().chain([lab.frontend()]) {
            tiers.push(start(host, &next)?);
            next = vec![families.address(host)?];
        }
        Ok(Self { tiers, frontend: next[0], backend })
    }

    /// Address that clients send their requests to.
    #[must_use]
    pub fn server(&self) -> SocketAddr {
        self.frontend
    }

    /// Address of the first backend, which a client of the lab can also ask directly.
    #[must_use]
    pub fn backend(&self) -> SocketAddr {
        self.backend
    }

    /// URL of `path` at the frontend, so that the request passes all tiers.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.frontend)
    }

    /// URL of `path` at the frontend's TLS port. The frontend listens for TLS only with [`crate::Settings::tls`].
    #[must_use]
    pub fn tls_url(&self, path: &str) -> String {
        format!("https://{}{path}", SocketAddr::new(self.frontend.ip(), tls::PORT))
    }

    /// URL of `path` at the first backend, without the other tiers.
    #[must_use]
    pub fn direct_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.backend)
    }

    /// The server of the tier on the host of this name.
    pub fn process(&mut self, host: &str) -> Option<&mut Process> {
        self.tier(host).map(|tier| &mut tier.process)
    }

    /// Kills a tier's server if it still runs, and starts it again.
    ///
    /// # Errors
    /// When the tier has no server, or the server does not start.
    pub fn restart(&mut self, host: &Host) -> Result<()> {
        let tier = self.tier(host.name()).with_context(|| format!("{} has no server", host.name()))?;
        host.serve_again(&mut tier.process, tier.listen)
    }

    fn tier(&mut self, host: &str) -> Option<&mut Tier> {
        self.tiers.iter_mut().find(|tier| tier.host == host)
    }

    /// Fails if a server has ended. The error has the end of the server's log.
    ///
    /// # Errors
    /// When a server has ended.
    pub fn check_running(&mut self) -> Result<()> {
        self.tiers.iter_mut().try_for_each(|tier| tier.process.check_running())
    }

    /// End of each server's log.
    pub(crate) fn explain(&self) -> String {
        let explain = |tier: &Tier| format!("\n{}\n{}", tier.process.name(), tier.process.log_end());
        self.tiers.iter().map(explain).collect()
    }

    /// Ends all servers, the frontend first.
    ///
    /// # Errors
    /// When one cannot be ended.
    pub fn stop(mut self) -> Result<()> {
        while let Some(tier) = self.tiers.pop() {
            tier.process.stop()?;
        }
        Ok(())
    }
}

/// Formats directives, one per line.
pub(crate) fn directives(indent: &str, list: &[String]) -> String {
    list.iter().map(|directive| format!("{indent}{directive};\n")).collect()
}
