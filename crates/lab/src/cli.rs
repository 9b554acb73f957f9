//! `shunt-lab lab`: builds a lab (test hosts as network namespaces), enters its hosts, and removes what is left of labs
//! whose process has ended.

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use shunt_sys::netns::Netns;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::description::Description;
use crate::lab::Lab;
use crate::placement::Placement;
use crate::wire::Wire;
use shunt_sys::{output, say};
use shunt_testbed::{LabId, labs, remove_leftovers};

/// Error for arguments of a command that make no sense. Its text says which arguments would make sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUse(pub String);

/// Fails if the arguments of a command make no sense.
///
/// # Errors
/// [`WrongUse`] with the text `words` if `makes_sense` is false.
pub(crate) fn ensure_use(makes_sense: bool, words: impl FnOnce() -> String) -> Result<()> {
    if makes_sense { Ok(()) } else { Err(WrongUse(words()).into()) }
}

/// The commands of `shunt-lab lab`.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Build test hosts and keep them until Ctrl-C
    Up(Up),
    /// Run a command on a host of a running lab
    Exec(Exec),
    /// List the labs on this machine and their hosts
    List,
    /// Remove what labs of dead processes left behind
    Clean,
}

/// `shunt-lab lab up`
#[derive(Debug, Args)]
pub struct Up {
    /// Intermediate hosts between the frontend and the backend
    #[arg(long, visible_alias = "intermediates", default_value_t = 0)]
    tiers: u8,
    /// Backend hosts
    #[arg(long, default_value_t = 1)]
    backends: u8,
    /// Client hosts
    #[arg(long, default_value_t = 1)]
    clients: u8,
    /// Kind of the links between hosts
    #[arg(long, value_enum, default_value_t)]
    wire: Wire,
    /// Which host gets the measured core: `service` for all of the service, or a host's name
    #[arg(long, value_name = "service|HOST")]
    place: Option<String>,
}

/// `shunt-lab lab exec`
#[derive(Debug, Args)]
pub struct Exec {
    /// The lab's name in `shunt-lab lab list`; needed only if several run
    #[arg(long)]
    lab: Option<String>,
    /// A host's name: client, frontend, intermediate1, backend, switch
    host: String,
    /// The command and its arguments; a shell if none is given
    #[arg(last = true)]
    command: Vec<String>,
}

impl LabCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// Without root, or when a part of the command fails.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Up(up) => up.run(),
            Self::Exec(exec) => exec.run(),
            Self::List => list(),
            Self::Clean => clean(),
        }
    }
}

impl Up {
    fn run(self) -> Result<()> {
        // Both signals are caught from here on, so that neither can end this process while the lab is being built.
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("catching signals")?;
        let placement = match self.place.as_deref() {
            None => Placement::None,
            Some("service") => Placement::WholeService,
            Some(host) => Placement::Tier(host.to_owned()),
        };
        let lab = Lab::builder()
            .clients(self.clients)
            .intermediates(self.tiers)
            .backends(self.backends)
            .wire(self.wire)
            .placement(placement)
            .build()?;
        output::write(&describe(&Description::of(lab.id())?))?;
        say!("\nenter one:  shunt-lab lab exec HOST -- COMMAND")?;
        say!("       or:  nsenter --net=/run/netns/NAMESPACE COMMAND")?;
        say!("files:      {}\nCtrl-C ends it.", lab.dir().display())?;
        signals.forever().next();
        Ok(())
    }
}

impl Exec {
    fn run(mut self) -> Result<()> {
        let lab = description(self.lab.as_deref())?;
        let host = lab.hosts.iter().find(|host| host.name == self.host);
        let Some(host) = host else {
            let names: Vec<&str> = lab.hosts.iter().map(|host| host.name.as_str()).collect();
            bail!("lab {} has no host {:?}; it has {}", lab.id, self.host, names.join(", "));
        };
        if self.command.is_empty() {
            ensure!(std::io::stdin().is_terminal(), "no command given");
            self.command.push(std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".into()));
        }
        Netns::named(&host.namespace)?.enter().with_context(|| format!("entering {}", host.name))?;
        let error = Command::new(&self.command[0]).args(&self.command[1..]).exec();
        Err(error).with_context(|| format!("running {}", self.command[0]))
    }
}

fn description(wanted: Option<&str>) -> Result<Description> {
    if let Some(wanted) = wanted {
        return Description::of(
            &LabId::parse(wanted)
                .with_context(|| format!("{wanted:?} is not the name of a lab; `shunt-lab lab list` shows them"))?,
        );
    }
    let running: Vec<LabId> = labs().context("listing labs")?.into_iter().filter(LabId::owner_lives).collect();
    match running.as_slice() {
        [] => bail!("no lab runs; `shunt-lab lab up` builds one"),
        [lab] => Description::of(lab),
        several => {
            let names: Vec<&str> = several.iter().map(LabId::as_str).collect();
            bail!("several labs run, choose one with --lab: {}", names.join(", "))
        }
    }
}

fn describe(lab: &Description) -> String {
    let mut text = format!("lab {} ({} wire)\n", lab.id, lab.wire);
    for host in &lab.hosts {
        let ports = host.ports.iter().filter_map(|port| {
            let ipv6 = port.ipv6.map(|address| format!(" {address}")).unwrap_or_default();
            Some(format!("{} {}{ipv6}", port.device, port.address?))
        });
        let ports = ports.collect::<Vec<_>>().join(", ");
        text += &format!("  {:14} {:20} {ports}\n", host.name, host.namespace);
    }
    text
}

fn list() -> Result<()> {
    for lab in labs().context("listing labs")? {
        match Description::of(&lab) {
            _ if !lab.owner_lives() => say!("lab {lab}: its process is dead; `shunt-lab lab clean` removes it")?,
            Ok(description) => output::write(&describe(&description))?,
            Err(_) => say!("lab {lab}: being built or removed")?,
        }
    }
    Ok(())
}

fn clean() -> Result<()> {
    let removed = remove_leftovers().context("removing labs")?;
    for lab in &removed {
        say!("removed lab {lab}")?;
    }
    if removed.is_empty() {
        say!("nothing to remove")?;
    }
    Ok(())
}
