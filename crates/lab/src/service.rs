//! A whole service in a lab: nginx on every tier and, if the options say so, an *agent* (Shunt's daemon) on the
//! frontend and on each backend. An agent's *peers* are the agents of other machines with which it has connections. A
//! *session* is the use of one of these connections. An *offer* is a body that a backend holds ready. Each tier's agent
//! has a *store* under `shunt run`, with the bodies that programs of its machine have written. *References* name these
//! bodies on the connections between tiers.

mod agent;
mod built;
mod release;
mod store;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
pub use shunt_stats::{Stats, agent_stats};

use crate::chain::{Chain, Families, ShuntPart};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::nginx::{Heap, NginxChain};
use crate::process::Process;
use crate::tls;

use agent::Agent;
pub use built::{module_file, shunt_program, shuntd_program};
use release::module_of;
pub use release::{OLDER, Release, Releases, ReleasesOf, install_module};
pub use store::OnDemand;

/// The module's default for `shunt_offer_min_length`, in bytes.
pub const OFFER_MIN_LENGTH: u64 = 32 << 10;
/// The module's default for `shunt_alone_length`, in bytes. A body of at least this length goes straight from the
/// backend to the client even if it is the only one on its connection.
pub const ALONE_LENGTH: u64 = 256 << 10;

/// Options of a service.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether the service has agents and nginx's module. Without them it is the plain baseline.
    pub shunt: bool,
    /// Shortest body that backends offer, in bytes, in place of the module's default. If it is set, frontends consent
    /// to shortcuts (bodies that bypass tiers) for bodies of every length.
    pub offer_min: Option<u64>,
    /// Options of `shunt run`. If they are set, every tier is an unmodified nginx under `shunt run`.
    pub on_demand: Option<OnDemand>,
    /// Whether agents take a peer for lost only after a silence of 12 s, in place of 1 s. A machine with much to do may
    /// give an agent no core for a second. For tests in which no peer is to be lost.
    pub steady: bool,
    /// Setting of nginx's allocator.
    pub heap: Heap,
    /// IP versions of the servers. Agents use the version of the tiers.
    pub families: Families,
    /// Function that returns the versions of each machine's parts. `None`: the version of this source everywhere.
    pub releases: Option<ReleasesOf>,
    /// Additions to the configurations.
    pub settings: Settings,
}

/// Additions to the usual configurations of a service.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// Lines of every agent's configuration, before the section of the agent's role.
    pub agent: &'static str,
    /// Whether agents log at debug level.
    pub agent_debug: bool,
    /// Lines of `[frontend]` in the configuration of the frontends' agents.
    pub agent_frontend: &'static str,
    /// Lines of `[backend]` in the configuration of the backends' agents.
    pub agent_backend: &'static str,
    /// Contents of the brackets of `speaks_for` in each `[[peer]]`: the source addresses that an agent may use when it
    /// sends bodies for this peer. `None`: the peer's own addresses.
    pub speaks_for: Option<&'static str>,
    /// Directives for every nginx's `http`, without semicolons.
    pub http: &'static [&'static str],
    /// Lines for the nginx server of each frontend, which then also listens for TLS.
    pub tls: Option<&'static str>,
    /// Function that returns more locations for a tier's nginx.
    pub locations: Option<fn(&Lab, &Host) -> String>,
    /// Function that rewrites each agent's configuration.
    pub agent_text: Option<Rewrite>,
    /// Function that rewrites each nginx's configuration.
    pub nginx_text: Option<Rewrite>,
    /// Whether agents may fail to start or to find each other. If so, the servers start when the agents have found each
    /// other, after [`APART_WAIT`] at the latest.
    pub apart: bool,
}

/// Function that changes a configuration of a host.
pub type Rewrite = fn(&Host, String) -> String;

/// Longest wait for agents to find each other, if they may fail to do so.
const APART_WAIT: Duration = Duration::from_secs(2);

impl Options {
    /// Plain nginx.
    #[must_use]
    pub fn plain() -> Self {
        Self::default()
    }

    /// Shunt with its default settings.
    #[must_use]
    pub fn shunt() -> Self {
        Self { shunt: true, ..Self::default() }
    }

    /// Shunt with agents that stay connected on a busy machine ([`Self::steady`](Self#structfield.steady)).
    #[must_use]
    pub fn steady() -> Self {
        Self { steady: true, ..Self::shunt() }
    }

    fn releases(&self, host: &Host) -> Releases {
        self.releases.map(|of| of(host)).unwrap_or_default()
    }
}

/// A running service. Dropping it ends nginx first, then the agents, and leaves nothing in the kernel.
#[derive(Debug)]
pub struct Service<'lab> {
    lab: &'lab Lab,
    /// `None` only while the service ends.
    chain: Option<Chain>,
    agents: Vec<Agent<'lab>>,
}

impl<'lab> Service<'lab> {
    /// Starts the service; its backends serve the files of a directory.
    ///
    /// # Errors
    /// When a program or the module that the service needs is not built, or a part does not start.
    pub fn start(lab: &'lab Lab, files: &Path, options: Options) -> Result<Self> {
        let mut service = Self { lab, chain: None, agents: Vec::new() };
        let mut chain = NginxChain::new(files).families(options.families).heap(options.heap);
        for directive in options.settings.http {
            chain = chain.http(*directive);
        }
        let listeners = tls_listeners(lab, &options.settings)?;
        chain = chain.locations(move |host| {
            let more = options.settings.locations.map(|locations| locations(lab, host)).unwrap_or_default();
            listeners.get(host.name()).cloned().unwrap_or_default() + &more
        });
        if let Some(rewrite) = options.settings.nginx_text {
            chain = chain.rewrite(rewrite);
        }
        if options.shunt {
            install_modules(lab, &options)?;
            service.start_agents(&options)?;
            let plain = !lab.intermediates().is_empty();
            chain = chain.shunt(move |host| shunt_part(host, options.offer_min, plain));
        }
        if let Some(on_demand) = options.on_demand {
            let programs = launchers(lab, &options)?;
            service.start_stores(&options)?;
            chain = chain.launcher(move |host| Some(on_demand.launcher(host, programs.get(host.name())?)));
        }
        service.chain = Some(chain.start(lab)?);
        Ok(service)
    }

    /// Starts an agent with a store on every tier. Each agent has all others as peers, because a reference passes all
    /// tiers.
    fn start_stores(&mut self, options: &Options) -> Result<()> {
        let tiers: Vec<&Host> = self.lab.tiers().collect();
        for host in &tiers {
            let others: Vec<&Host> = tiers.iter().copied().filter(|other| other.name() != host.name()).collect();
            self.agents.push(Agent::start(
                self.lab.id(),
                host,
                &others,
                options,
                &options.releases(host).agent.shuntd()?,
            )?);
        }
        self.wait_for_first_sessions(options)
    }

    fn start_agents(&mut self, options: &Options) -> Result<()> {
        let frontends: Vec<&Host> = self.lab.hosts_of(Role::Frontend).collect();
        let backends: Vec<&Host> = self.lab.hosts_of(Role::Backend).collect();
        for host in &frontends {
            self.agents.push(Agent::start(
                self.lab.id(),
                host,
                &backends,
                options,
                &options.releases(host).agent.shuntd()?,
            )?);
        }
        for host in &backends {
            self.agents.push(Agent::start(
                self.lab.id(),
                host,
                &frontends,
                options,
                &options.releases(host).agent.shuntd()?,
            )?);
        }
        self.wait_for_first_sessions(options)
    }

    fn wait_for_first_sessions(&mut self, options: &Options) -> Result<()> {
        if !options.settings.apart {
            return self.agents.iter_mut().try_for_each(Agent::wait_for_peers);
        }
        let deadline = Instant::now() + APART_WAIT;
        while Instant::now() < deadline && !self.agents.iter().all(Agent::has_peers) {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    #[must_use]
    pub fn lab(&self) -> &'lab Lab {
        self.lab
    }

    /// The servers of the service.
    ///
    /// # Panics
    /// Never: a started service has them.
    #[must_use]
    pub fn chain(&self) -> &Chain {
        self.chain.as_ref().expect("a started service has servers")
    }

    /// The servers of the service, for changes.
    ///
    /// # Panics
    /// Never: a started service has them.
    pub fn chain_mut(&mut self) -> &mut Chain {
        self.chain.as_mut().expect("a started service has servers")
    }

    /// Kills a host's agent with SIGKILL, as a crash would. What the agent has loaded into the kernel stays.
    ///
    /// # Errors
    /// When the host has no agent.
    pub fn kill_agent(&mut self, host: &Host) -> Result<()> {
        self.agent_mut(host)?.kill();
        Ok(())
    }

    /// Starts a killed agent again and waits for its sessions.
    ///
    /// # Errors
    /// When the host has no agent, or it does not start.
    pub fn restart_agent(&mut self, host: &Host) -> Result<()> {
        self.start_agent(host)?;
        self.agent_mut(host)?.wait_for_peers()
    }

    /// Starts a killed agent again, without waiting for its sessions.
    ///
    /// # Errors
    /// When the host has no agent, or it does not start.
    pub fn start_agent(&mut self, host: &Host) -> Result<()> {
        self.agent_mut(host)?.restart()
    }

    /// Sets the version that a host's agent has when it is started next.
    ///
    /// # Errors
    /// When the host has no agent, or that version is not built.
    pub fn set_agent_release(&mut self, host: &Host, release: Release) -> Result<()> {
        let program = release.shuntd()?;
        self.agent_mut(host)?.set_program(program);
        Ok(())
    }

    /// Waits until every agent has a session with each of its peers.
    ///
    /// # Errors
    /// When an agent does not get a session, or has ended.
    pub fn wait_for_agents(&mut self) -> Result<()> {
        self.agents.iter_mut().try_for_each(Agent::wait_for_peers)
    }

    /// The process of a host's agent; `None` if it was killed.
    ///
    /// # Errors
    /// When the host has no agent.
    pub fn agent_process(&mut self, host: &Host) -> Result<Option<&mut Process>> {
        Ok(self.agent_mut(host)?.process_mut())
    }

    fn agent_mut(&mut self, host: &Host) -> Result<&mut Agent<'lab>> {
        let agent = self.agents.iter_mut().find(|agent| agent.host().name() == host.name());
        agent.with_context(|| format!("{} has no agent", host.name()))
    }

    /// The process of a host's agent.
    ///
    /// # Errors
    /// When the host has no agent, or its agent was killed.
    pub fn agent(&self, host: &Host) -> Result<&Process> {
        let agent = self.agents.iter().find(|agent| agent.host().name() == host.name());
        agent.and_then(Agent::process).with_context(|| format!("no agent runs on {}", host.name()))
    }

    /// Counters of a host's agent.
    ///
    /// # Errors
    /// When the host has no agent, or the agent does not answer.
    pub fn stats(&self, host: &Host) -> Result<Stats> {
        let agent = self.agents.iter().find(|agent| agent.host().name() == host.name());
        agent.with_context(|| format!("{} has no agent", host.name()))?.stats()
    }

    /// Sum of the counters of all agents.
    ///
    /// # Errors
    /// When an agent does not answer.
    pub fn all_stats(&self) -> Result<Stats> {
        self.agents.iter().try_fold(Stats::default(), |sum, agent| Ok(sum.plus(&agent.stats()?)))
    }

    /// Last lines of the servers' logs, and each agent's counters and last log lines. Callers append them to an error
    /// of a load.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = self.chain.as_ref().map(Chain::explain).unwrap_or_default();
        for agent in &self.agents {
            let counters = agent.stats().map(|stats| stats.under("")).unwrap_or_default();
            text.push_str(&format!("\nshuntd on {}: {counters}\n{}", agent.host().name(), agent.log_end()));
        }
        text
    }

    /// Fails with the end of a log if a server or an agent has ended.
    ///
    /// # Errors
    /// When a server or an agent has ended.
    pub fn check_running(&mut self) -> Result<()> {
        if let Some(chain) = &mut self.chain {
            chain.check_running()?;
        }
        self.agents.iter_mut().try_for_each(Agent::check_running)
    }
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            let _ = chain.stop();
        }
        self.agents.clear();
    }
}

/// TLS lines for the nginx configuration of each frontend, by the host's name.
fn tls_listeners<'lab>(lab: &'lab Lab, settings: &Settings) -> Result<BTreeMap<&'lab str, String>> {
    let Some(lines) = settings.tls else { return Ok(BTreeMap::new()) };
    let of = |host: &'lab Host| Ok((host.name(), tls::listener(host)? + lines));
    lab.hosts_of(Role::Frontend).map(of).collect()
}

fn install_modules(lab: &Lab, options: &Options) -> Result<()> {
    lab.tiers().try_for_each(|host| install_module(host, options.releases(host).server))
}

/// Path of the program `shunt` for each tier, by the host's name.
fn launchers<'lab>(lab: &'lab Lab, options: &Options) -> Result<BTreeMap<&'lab str, PathBuf>> {
    lab.tiers().map(|host| Ok((host.name(), options.releases(host).server.shunt()?))).collect()
}

/// Shunt's part of a tier's nginx configuration. Intermediates stay plain nginx, which passes on header fields that it
/// does not know. With `plain`, backends are told that the previous tier does not know Shunt, and that bodies may
/// bypass that tier.
fn shunt_part(host: &Host, offer_min: Option<u64>, plain: bool) -> Option<ShuntPart> {
    if host.role() == Role::Intermediate {
        return None;
    }
    let mut part = ShuntPart::of(host, module_of(host));
    if plain && host.role() == Role::Backend {
        part.trust_plain();
    }
    match (host.role(), offer_min) {
        (Role::Backend, Some(bytes)) => part.location.push(format!("shunt_offer_min_length {bytes}")),
        (Role::Frontend, Some(_)) => {
            part.location.extend(["shunt_mean_length 0".to_owned(), "shunt_alone_length 0".to_owned()]);
        }
        _ => {}
    }
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_lengths_are_the_modules() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../nginx/ngx_http_shunt_module.c");
        let source = std::fs::read_to_string(source).unwrap();
        for (name, length) in [("offer_min_length", OFFER_MIN_LENGTH), ("alone_length", ALONE_LENGTH)] {
            let line = source.lines().find(|line| line.contains(&format!("merge_size_value(conf->{name},")));
            assert!(line.unwrap().contains(&format!(", {} * 1024)", length / 1024)), "{line:?}");
        }
    }
}
