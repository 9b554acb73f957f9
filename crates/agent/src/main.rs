//! `shuntd`: reads its configuration and works until it is told to stop.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use shunt_agent::config::Config;
use shunt_agent::doctor;
use shunt_agent::log::LOG;
use shunt_agent::{Agent, SteerError};
use shunt_agent::{privileges, seccomp};
use shunt_odb::reference::Holder;
use shunt_sys::erase::ErasingAllocator;
use shunt_sys::say;
use tracing_subscriber::EnvFilter;

/// Shunt's agent: one per machine, beside its servers.
///
/// It needs CAP_NET_ADMIN and CAP_BPF. What it loads into the kernel outlives it, so that connections go on while it
/// restarts; --detach takes all of it out again. Log level: RUST_LOG=debug.
#[derive(Parser)]
#[command(name = "shuntd", version)]
struct Arguments {
    /// Configuration of this machine
    #[arg(long, value_name = "FILE", default_value = "/etc/shunt/shuntd.toml")]
    config: PathBuf,
    /// Only say whether the configuration is good
    #[arg(long)]
    check: bool,
    /// Take the steering programs and maps out of the kernel, and end: connections that had a shortcut break
    #[arg(long, conflicts_with = "check")]
    detach: bool,
    /// With --detach: end an agent that runs first
    #[arg(long, requires = "detach")]
    force: bool,
}

/// Keys of clients' TLS connections go through this program, and through libraries that free them as they are.
#[global_allocator]
static ALLOCATOR: ErasingAllocator = ErasingAllocator;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colours = std::env::var_os("NO_COLOR").is_none() && std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| &LOG)
        .log_internal_errors(false)
        .with_ansi(colours)
        .init();
    let outcome = run(&arguments);
    if let Err(error) = &outcome {
        LOG.take(format!("shuntd: {error:#}\n").as_bytes());
    }
    LOG.finish();
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Says what is wrong with a configuration, one sentence a line.
fn check(config: &Config, path: &Path) -> anyhow::Result<()> {
    if config.store.is_some() {
        say!("{:?} is this agent's", Holder::named(&config.name))?;
    }
    let findings = doctor::check(config);
    let faults: Vec<String> = findings.iter().filter_map(doctor::Finding::fault_line).collect();
    anyhow::ensure!(faults.is_empty(), "{}: not good\n{}", path.display(), faults.join("\n"));
    if let Some(group) = findings.iter().find(|finding| finding.area == "cgroup") {
        say!("{}: servers are to be in it, or below it", group.about)?;
    }
    say!("{}: good", path.display())?;
    Ok(())
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let config = Config::read(&arguments.config)?;
    if arguments.check {
        return check(&config, &arguments.config);
    }
    if arguments.detach {
        return shunt_agent::detach(&config, arguments.force).map_err(|error| match error {
            SteerError::Running { .. } => anyhow::anyhow!("{error}, or add --force, which ends it"),
            other => other.into(),
        });
    }
    let (user, restricted) = (config.user.clone(), config.seccomp);
    let mut agent = Agent::start(config)?;
    privileges::give_up(user.as_ref())?;
    LOG.start(std::io::stderr())?;
    agent.serve_metrics()?;
    agent.start_store()?;
    agent.start_routes()?;
    agent.start_ports()?;
    agent.start_digests()?;
    agent.start_reads()?;
    agent.start_census()?;
    if restricted {
        seccomp::restrict()?;
    }
    Ok(agent.run()?)
}
