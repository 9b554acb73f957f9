//! `shunt`: the command line. This crate parses arguments and prints results; other crates do the work.
#![forbid(unsafe_code)]

mod ca;
mod doctor;
mod stats;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use shunt_run::launch::RunCommand;

use ca::CaCommand;
use doctor::DoctorCommand;
use stats::StatsCommand;

/// Sends large response bodies straight from the backend to the client, past every tier that only forwards them.
///
/// Exit codes: 0 success; 1 a failure, or a fault that a check found; 2 wrong use, or not root.
/// Output has no colours with NO_COLOR=1, or if it is no terminal.
#[derive(Debug, Parser)]
#[command(name = "shunt", version, arg_required_else_help = true, subcommand_required = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the counters of a running agent
    ///
    /// Shows the counters of this machine's agent (shuntd), its servers and its steering programs since the agent's
    /// start. Counters that are zero are left out, except with --all.
    Stats(StatsCommand),
    /// Check what Shunt needs on this machine and its peers, and say what to do about each fault
    ///
    /// Reads the agent's configuration and tests it against the machine, nginx's configuration, the
    /// running agent and every peer: certificates and clocks, ports, routes in both directions, filters,
    /// MTU, interfaces, the BPF file system, control groups, the kernel, and whether each backend
    /// sends in the name of the addresses that nginx listens at. Nothing is changed.
    ///
    /// Each line is `ok`, or a sentence that says what to do. Run this as root on each machine, first
    /// on the one that clients connect to:
    ///
    ///     shunt doctor
    ///     shunt doctor --config /etc/shunt/shuntd.toml --nginx /usr/sbin/nginx
    ///     shunt doctor --nginx-conf <(docker exec web nginx -T)
    ///
    /// Exit codes: 0 no faults; 1 faults.
    #[command(verbatim_doc_comment)]
    Doctor(DoctorCommand),
    /// Make a small certificate authority for trials, and certificates for agents
    ///
    /// Agents (shuntd) speak TLS with each other and identify each other by certificates. These commands make the
    /// certificates that a trial needs:
    ///
    ///     shunt ca init trial
    ///     shunt ca issue trial fe1
    ///
    /// No file is overwritten, and only the owner can read keys. For a production service use your own authority;
    /// docs/shuntd.md says what a certificate needs.
    #[command(subcommand, verbatim_doc_comment)]
    Ca(CaCommand),
    /// Run an unmodified program with on-demand buffers
    ///
    /// Between two programs that both run this way, a large body stays on the machine that produced
    /// it until a program reads it. All other connections carry the same bytes as before. Needs an
    /// agent with a [store] on this machine (docs/odb.md).
    ///
    ///     shunt run -- nginx -g 'daemon off;'
    #[command(verbatim_doc_comment)]
    Run(RunCommand),
}

/// Result of a command that could do its work.
enum Outcome {
    Good,
    /// The command has found and printed faults.
    Faulty,
}

/// Commands that were part of `shunt` in earlier versions, and are now part of `shunt-lab`.
const MOVED: [&str; 3] = ["demo", "bench", "lab"];

/// Parses the arguments, of which the first is the program's name.
///
/// # Errors
/// When clap refuses the arguments, or they name a command that is now one of `shunt-lab`. The error then says so.
fn parse(arguments: &[OsString]) -> Result<Arguments, clap::Error> {
    let command = arguments.get(1).and_then(|word| word.to_str());
    match command.filter(|name| MOVED.contains(name)) {
        Some(name) => {
            let moved = format!("`shunt {name}` is now `shunt-lab {name}`");
            Err(Arguments::command().error(ErrorKind::InvalidSubcommand, moved))
        }
        None => Arguments::try_parse_from(arguments),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let command = parse(&arguments).unwrap_or_else(|error| error.exit()).command;
    if let Some(what) = command.needs_root()
        && !rustix::process::geteuid().is_root()
    {
        eprintln!("shunt: {what} needs root: it works with network namespaces and BPF programs. Try sudo.");
        return ExitCode::from(2);
    }
    match command.run() {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Faulty) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("shunt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl Command {
    fn needs_root(&self) -> Option<&'static str> {
        match self {
            Self::Doctor(_) => Some("the doctor"),
            Self::Run(_) | Self::Stats(_) | Self::Ca(_) => None,
        }
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Doctor(doctor) => return Ok(if doctor.run()? { Outcome::Good } else { Outcome::Faulty }),
            Self::Stats(stats) => stats.run()?,
            Self::Ca(ca) => ca.run()?,
            Self::Run(run) => run.run()?,
        }
        Ok(Outcome::Good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_has_moved_is_named_with_its_new_program() {
        for name in MOVED {
            let error = parse(&["shunt", name, "--json", "file"].map(OsString::from)).unwrap_err();
            assert!(error.to_string().contains(&format!("`shunt {name}` is now `shunt-lab {name}`")), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        let error = parse(&["shunt", "ca", "demo"].map(OsString::from)).unwrap_err();
        assert!(!error.to_string().contains("shunt-lab"), "{error}");
    }
}
