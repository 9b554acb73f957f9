//! `shuntd`: reads its configuration, and runs until a termination signal.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use shunt_agent::os::{privileges, seccomp};
use shunt_agent::telemetry::log::LOG;
use shunt_agent::{Daemon, SetLog, SteerError};
use shunt_config::Config;
use shunt_config::log::log_problem;
use shunt_odb::reference::Holder;
use shunt_sys::erase::ErasingAllocator;
use shunt_sys::say;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, fmt, reload};

/// Runs Shunt's agent: one process per machine, beside its servers.
///
/// The agent starts as root, or with the capabilities that docs/shuntd.md lists. After its start it keeps only
/// CAP_NET_ADMIN and CAP_BPF. Its BPF programs and maps stay in the kernel when it ends, so connections continue while
/// it restarts; --detach removes them. Log level: `log` in the configuration, or RUST_LOG=debug.
#[derive(Parser)]
#[command(name = "shuntd", version)]
struct Arguments {
    /// The agent's configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/shunt/shuntd.toml")]
    config: PathBuf,
    /// Check the configuration, print its faults, and end
    #[arg(long)]
    check: bool,
    /// Print a configuration file with every key that has a default, and end
    #[arg(long, conflicts_with_all = ["check", "detach"])]
    print_defaults: bool,
    /// Remove the steering programs and maps from the kernel, and end; breaks connections that have had a shortcut
    #[arg(long, conflicts_with = "check")]
    detach: bool,
    /// With --detach: first end the agent if it runs
    #[arg(long, requires = "detach")]
    force: bool,
}

/// Erases freed memory. Keys of clients' TLS connections pass through this program, and through libraries that do not
/// erase them.
#[global_allocator]
static ALLOCATOR: ErasingAllocator = ErasingAllocator;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (asked, fault) = asked_for();
    let is_fixed = asked.is_some();
    let (filter, level) = reload::Layer::new(asked.unwrap_or_else(|| EnvFilter::new("info")));
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines = fmt::layer().with_writer(|| &LOG).log_internal_errors(false).with_ansi(colours);
    tracing_subscriber::registry().with(filter).with(lines).init();
    if let Some(fault) = fault {
        tracing::warn!("{fault}; `log` of the configuration counts");
    }
    let set_log = move |text: &str| {
        // RUST_LOG takes precedence over the configuration.
        if is_fixed {
            return Ok(());
        }
        let filter = EnvFilter::try_new(text).map_err(|error| format!("log = {text:?}: {error}"))?;
        level.reload(filter).map_err(|error| error.to_string())
    };
    let outcome = run(&arguments, Box::new(set_log));
    if let Err(error) = &outcome {
        LOG.take(format!("shuntd: {error:#}\n").as_bytes());
    }
    LOG.finish();
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the filter in RUST_LOG, or a sentence that says why RUST_LOG cannot be used. Returns neither if RUST_LOG is
/// not set or is empty.
fn asked_for() -> (Option<EnvFilter>, Option<String>) {
    let text = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    match log_problem(&text) {
        _ if text.is_empty() => (None, None),
        Some(problem) => (None, Some(format!("RUST_LOG={text:?}: {problem}"))),
        None => (EnvFilter::try_new(&text).ok(), None),
    }
}

/// Checks a configuration. Prints the name of its store, if it has one, its control group, and that the
/// configuration is good.
///
/// # Errors
/// Returns the faults of the configuration, one sentence a line.
fn check(config: &Config, path: &Path) -> anyhow::Result<()> {
    if config.store.is_some() {
        say!("store    {:?}", Holder::named(&config.name))?;
    }
    let findings = shunt_doctor::check(config);
    let faults: Vec<String> = findings.iter().filter_map(shunt_doctor::Finding::fault_line).collect();
    anyhow::ensure!(faults.is_empty(), "{}: cannot be used\n{}", path.display(), faults.join("\n"));
    if let Some(group) = findings.iter().find(|finding| finding.area == "cgroup") {
        say!("{}: servers must be in this control group, or below it", group.about)?;
    }
    say!("{}: good", path.display())?;
    Ok(())
}

fn run(arguments: &Arguments, set_log: SetLog) -> anyhow::Result<()> {
    if arguments.print_defaults {
        return Ok(say!("{}", Config::defaults().trim_end())?);
    }
    let config = Config::read(&arguments.config)?;
    if arguments.check {
        return check(&config, &arguments.config);
    }
    privileges::are_enough()?;
    if arguments.detach {
        return shunt_agent::detach(&config, arguments.force).map_err(|error| match error {
            SteerError::Running { .. } => anyhow::anyhow!("{error}, or add --force, which ends that agent"),
            other => other.into(),
        });
    }
    let (user, restricted) = (config.user.clone(), config.seccomp);
    set_log(&config.log).map_err(anyhow::Error::msg)?;
    let mut agent = Daemon::start(config, &arguments.config, set_log)?;
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
