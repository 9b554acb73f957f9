//! The agent (`shuntd`, Shunt's daemon) of one host. Its *peers* are the agents of other hosts, and a *session* is the
//! use of a connection with one of them.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shunt_ca::{Authority, CaError, Request};
use shunt_stats::{Stats, agent_stats_within};

use super::{Options, store};
use crate::chain::ShuntPart;
use crate::host::{Family, Host, Role};
use crate::process::Process;
use shunt_testbed::LabId;

/// Port at which agents listen for other agents.
const PORT: u16 = 7440;

/// Longest wait for sessions. Of two agents, one connects to the other, and tries again later if the other does not
/// listen yet.
const PEERS_LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for an agent's answer, on a machine that also does other work.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Agent<'lab> {
    host: &'lab Host,
    program: PathBuf,
    config: PathBuf,
    /// `None` after the agent was killed, and while it is being ended.
    process: Option<Process>,
    debug: bool,
}

impl<'lab> Agent<'lab> {
    pub(super) fn start(
        lab: &LabId,
        host: &'lab Host,
        peers: &[&Host],
        options: &Options,
        program: &Path,
    ) -> Result<Self> {
        shunt_testbed::mount_bpffs().context("mounting a BPF file system")?;
        let config = host.dir().join("shuntd.toml");
        let mut text = configuration(lab, host, peers, options)? + &credentials(lab, host.name())?;
        if let Some(rewrite) = options.settings.agent_text {
            text = rewrite(host, text);
        }
        std::fs::write(&config, text).with_context(|| format!("writing {}", config.display()))?;
        let mut agent =
            Self { host, program: program.to_owned(), config, process: None, debug: options.settings.agent_debug };
        agent.process = Some(host.spawn(agent.command())?);
        Ok(agent)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--config").arg(&self.config).env("NO_COLOR", "1");
        if self.debug {
            command.env("RUST_LOG", "debug");
        }
        command
    }

    pub(super) fn host(&self) -> &Host {
        self.host
    }

    pub(super) fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    pub(super) fn stats(&self) -> Result<Stats> {
        agent_stats_within(&ShuntPart::agent_socket(self.host), PATIENCE)
    }

    pub(super) fn process_mut(&mut self) -> Option<&mut Process> {
        self.process.as_mut()
    }

    pub(super) fn kill(&mut self) {
        self.process = None; // dropping a process kills it (SIGKILL)
    }

    /// Sets the program that is run when the agent is started next.
    pub(super) fn set_program(&mut self, program: PathBuf) {
        self.program = program;
    }

    pub(super) fn restart(&mut self) -> Result<()> {
        self.process = Some(self.host.spawn(self.command())?);
        Ok(())
    }

    /// The last lines of the agent's log.
    pub(super) fn log_end(&self) -> String {
        self.process.as_ref().map(Process::log_end).unwrap_or_default()
    }

    pub(super) fn check_running(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Process::check_running)
    }

    /// Whether the agent answers and is connected to every peer.
    pub(super) fn has_peers(&self) -> bool {
        self.stats().is_ok_and(|stats| stats.all_peers_up())
    }

    /// Waits until the agent answers and is connected to every peer.
    pub(super) fn wait_for_peers(&mut self) -> Result<()> {
        let deadline = Instant::now() + PEERS_LIMIT;
        loop {
            self.check_running()?;
            match self.stats() {
                Ok(stats) if stats.all_peers_up() => return Ok(()),
                Ok(_) if Instant::now() > deadline => {
                    let (host, log) = (self.host.name(), self.log_end());
                    bail!("shuntd on {host} found no peer within {PEERS_LIMIT:?}; its log ends:\n{log}");
                }
                Err(error) if Instant::now() > deadline => return Err(error),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            let _ = process.stop();
        }
        // The agent's BPF programs and maps stay when the agent ends, so that connections continue. `shuntd --detach`
        // removes them. If that fails, the lab's watchdog removes the pins.
        let mut detach = self.command();
        detach.arg("--detach");
        let _ = self.host.output(detach);
    }
}

fn configuration(lab: &LabId, host: &Host, peers: &[&Host], options: &Options) -> Result<String> {
    let family = options.families.tiers;
    let settings = &options.settings;
    let address = |host: &Host| -> Result<SocketAddr> { Ok(SocketAddr::new(host.service_address_of(family)?, PORT)) };
    let store = if options.on_demand.is_some() { store::section(host) } else { String::new() };
    let role = match host.role() {
        Role::Intermediate => String::new(),
        Role::Frontend => format!("[frontend]\ninterfaces = [\"client0\"]\n{}", settings.agent_frontend),
        _ => format!("[backend]\ninterfaces = [\"service0\"]\n{}", settings.agent_backend),
    };
    let mut text = format!(
        "name = \"{}\"\nsocket = \"{}\"\nlisten = \"{}\"\npins = \"{}{}\"\ncgroup = \"{}\"\n{}\n{role}\n{store}\n",
        host.name(),
        ShuntPart::agent_socket(host).display(),
        address(host)?,
        lab.pins_prefix(),
        host.name(),
        host.cgroup().display(),
        settings.agent,
    );
    if !settings.agent.contains("drain") {
        text.insert_str(0, "drain = \"0s\"\n"); // when a lab ends, nothing under way has to complete
    }
    if options.steady {
        text.insert_str(0, "heartbeat = \"3s\"\n"); // four of them pass before a peer is lost
    }
    for peer in peers {
        let speaks_for =
            peer.ports().iter().flat_map(|port| [port.address_of(Family::V4), port.address_of(Family::V6)]);
        let speaks_for: Vec<String> = speaks_for.flatten().map(|address| format!("\"{address}\"")).collect();
        let speaks_for = settings.speaks_for.map_or_else(|| speaks_for.join(", "), str::to_owned);
        let (name, address) = (peer.name(), address(peer)?);
        write!(text, "\n[[peer]]\nname = \"{name}\"\naddress = \"{address}\"\nspeaks_for = [{speaks_for}]\n")?;
    }
    Ok(text)
}

/// Issues a certificate of the lab's authority, unless there is one of this name. Returns the `[tls]` section of the
/// configuration, with the paths of the certificate's files.
fn credentials(lab: &LabId, name: &str) -> Result<String> {
    let directory = lab.dir().join("ca");
    let authority = match Authority::create(&directory) {
        Err(CaError::Exists(_)) => Authority::open(&directory),
        made => made.context("making the lab's certificate authority")?,
    };
    let request = Request { name: name.to_owned(), addresses: Vec::new(), days: 1 };
    let files = match authority.issue(&request) {
        Err(CaError::Exists(_)) => authority.files_of(name),
        issued => issued.with_context(|| format!("issuing a certificate for {name}"))?,
    };
    let path = |path: &Path| format!("\"{}\"", path.display());
    let (certificate, key) = (path(&files.certificate), path(&files.key));
    let (ca, crl) = (path(&authority.certificate()), path(&authority.list()));
    Ok(format!("\n[tls]\ncertificate = {certificate}\nkey = {key}\nca = {ca}\ncrl = {crl}\n"))
}
