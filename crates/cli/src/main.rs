//! `shunt`: the command line. A thin main function; the commands do their work in the other crates.
#![forbid(unsafe_code)]

mod ca;
mod doctor;
mod stats;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use shunt_lab::bench::Bench;
use shunt_lab::cli::{LabCommand, WrongUse};
use shunt_lab::demo::Demo;
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
    /// Watch real nginx tiers serve real files, without Shunt and with it, and see what that saves
    ///
    /// Builds four hosts as network namespaces (client, frontend, intermediate, backend), starts Debian's nginx in
    /// them, and has curl fetch 1 KiB to 64 MiB over one keepalive connection and wrk load the service. Every body is
    /// compared with its file by SHA-256. Ends with a table of every tier's bytes and CPU, and writes a picture of it.
    ///
    /// Needs root. Takes less than a minute. Fails if a byte differs or if a body that should have taken the
    /// shortcut went through the tiers.
    Demo(Demo),
    /// Measure Shunt against plain nginx, HAProxy and the physical limit
    #[command(subcommand)]
    Bench(Bench),
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
    /// Build test hosts as network namespaces, and run commands in them
    #[command(subcommand)]
    Lab(LabCommand),
}

/// Ending of a command that could do its work.
enum Outcome {
    Good,
    /// The command has printed what it found wrong.
    Faulty,
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
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
            if error.is::<WrongUse>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

impl Command {
    fn needs_root(&self) -> Option<&'static str> {
        match self {
            Self::Demo(_) => Some("the demo"),
            Self::Bench(bench) => (!bench.only_lists()).then_some("the benchmark"),
            Self::Doctor(_) => Some("the doctor"),
            Self::Run(_) | Self::Stats(_) | Self::Ca(_) | Self::Lab(LabCommand::List) => None,
            Self::Lab(_) => Some("the lab"),
        }
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Demo(demo) => {
                let faults = demo.run()?;
                return Ok(if faults.0.is_empty() { Outcome::Good } else { Outcome::Faulty });
            }
            Self::Bench(bench) => return Ok(if bench.run()? { Outcome::Good } else { Outcome::Faulty }),
            Self::Doctor(doctor) => return Ok(if doctor.run()? { Outcome::Good } else { Outcome::Faulty }),
            Self::Stats(stats) => stats.run()?,
            Self::Ca(ca) => ca.run()?,
            Self::Run(run) => run.run()?,
            Self::Lab(lab) => lab.run()?,
        }
        Ok(Outcome::Good)
    }
}
