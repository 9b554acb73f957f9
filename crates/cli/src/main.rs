//! `shunt`: the command line. A thin main function; the commands do their work in the other crates.
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

/// Large response bodies go straight from the backend to the client, past every tier that only forwards them.
///
/// Exit codes: 0 all is well; 1 something failed or a check found a fault; 2 wrong use, or not root.
/// Colours are off with NO_COLOR=1 and where the output is no terminal.
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
    /// Asks the agent (shuntd) of this machine what it, its servers and its steering programs counted since it
    /// started. Counters that are zero are left out, except with --all.
    Stats(StatsCommand),
    /// Look at everything that Shunt needs of this machine and its peers, and say what to do
    ///
    /// Reads the agent's configuration and tests it against the machine, nginx's configuration, the
    /// running agent and every peer: certificates and clocks, ports, routes both ways, filters,
    /// MTU, interfaces, the BPF file system, control groups, the kernel, and whether each backend
    /// sends in the name of the addresses that nginx listens at. Nothing is changed.
    ///
    /// Each line is `ok`, or a sentence that says what to do. Run it as root on each machine, at
    /// first where clients connect:
    ///
    ///     shunt doctor
    ///     shunt doctor --config /etc/shunt/shuntd.toml --nginx /usr/sbin/nginx
    ///     shunt doctor --nginx-conf <(docker exec web nginx -T)
    ///
    /// Exit codes: 0 all is well; 1 there are faults.
    #[command(verbatim_doc_comment)]
    Doctor(DoctorCommand),
    /// Make a small certificate authority for trials, and certificates for agents
    ///
    /// Agents (shuntd) speak TLS with each other and know each other by certificates. This makes what a trial needs:
    ///
    ///     shunt ca init trial
    ///     shunt ca issue trial fe1
    ///
    /// Nothing is overwritten, keys are readable by their owner only. For a service in earnest use the authority that
    /// you have; docs/shuntd.md says what a certificate needs.
    #[command(subcommand, verbatim_doc_comment)]
    Ca(CaCommand),
    /// Run a program that nobody changed, with on-demand buffers
    ///
    /// Between two programs that both run like this, large bodies stay where they were produced
    /// until somebody looks at them. All other connections carry what they always did. Needs an
    /// agent with a [store] on this machine (docs/odb.md).
    ///
    ///     shunt run -- nginx -g 'daemon off;'
    #[command(verbatim_doc_comment)]
    Run(RunCommand),
}

/// Ending of a command that could do its work.
enum Outcome {
    Good,
    /// The command has printed what it found wrong.
    Faulty,
}

/// Commands of earlier versions that `shunt-lab` has now.
const MOVED: [&str; 3] = ["demo", "bench", "lab"];

/// Parses the arguments, of which the first is the program's name.
///
/// # Errors
/// Where clap refuses them. A command that has moved is named with its new program.
fn parse(arguments: &[OsString]) -> Result<Arguments, clap::Error> {
    let command = arguments.get(1).and_then(|word| word.to_str());
    match command.filter(|name| MOVED.contains(name)) {
        Some(name) => {
            let moved = format!("`shunt {name}` is `shunt-lab {name}` now");
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
            assert!(error.to_string().contains(&format!("`shunt {name}` is `shunt-lab {name}` now")), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        let error = parse(&["shunt", "ca", "demo"].map(OsString::from)).unwrap_err();
        assert!(!error.to_string().contains("shunt-lab"), "{error}");
    }
}
