//! `shunt-lab`: the lab's command line. A thin main function; the commands do their work in the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use shunt_lab::bench::Bench;
use shunt_lab::cli::{LabCommand, WrongUse};
use shunt_lab::demo::Demo;
use shunt_lab::simulate::Simulate;

/// Shows, measures and tests Shunt in services on one machine, whose hosts are network namespaces.
///
/// Exit codes: 0 success; 1 a failure, or a fault that a check found; 2 wrong use, or not root.
/// Output has no colours with NO_COLOR=1, or if it is no terminal.
#[derive(Debug, Parser)]
#[command(name = "shunt-lab", version, arg_required_else_help = true, subcommand_required = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show real nginx tiers that serve files, without and with Shunt, and what Shunt saves
    ///
    /// Builds four hosts as network namespaces (client, frontend, intermediate, backend), starts Debian's nginx in
    /// them, and has curl fetch 1 KiB to 64 MiB over one keepalive connection and wrk load the service. Every body is
    /// compared with its file by SHA-256. Ends with a table of every tier's bytes and CPU, and writes a chart of it.
    ///
    /// Needs root. Takes less than a minute. Fails if a byte differs or if a body that should have taken the
    /// shortcut went through the tiers.
    Demo(Demo),
    /// Measure Shunt against plain nginx, HAProxy and the physical limit
    #[command(subcommand)]
    Bench(Bench),
    /// Run simulated services, one history after the other, and check what must hold after each step
    ///
    /// A history is a service of 2 to 20 machines with the agents' logic, and models of everything else: clients, a
    /// network that loses and reorders, machines that stop. A seed decides the whole history; the next history has the
    /// next seed. Ends with the histories per second, their coverage, and each violation with its seed. Exit code 1 if
    /// there is a violation.
    Simulate(Simulate),
    /// Build test hosts as network namespaces, and run commands in them
    #[command(subcommand)]
    Lab(LabCommand),
}

/// Ending of a command that could do its work. Other commands end with an error.
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
        eprintln!("shunt-lab: {what} needs root: it works with network namespaces and BPF programs. Try sudo.");
        return ExitCode::from(2);
    }
    match command.run() {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Faulty) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("shunt-lab: {error:#}");
            if error.is::<WrongUse>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

impl Outcome {
    fn of(is_good: bool) -> Self {
        if is_good { Self::Good } else { Self::Faulty }
    }
}

impl Command {
    fn needs_root(&self) -> Option<&'static str> {
        match self {
            Self::Demo(_) => Some("the demo"),
            Self::Bench(bench) => (!bench.only_lists()).then_some("the benchmark"),
            Self::Simulate(_) | Self::Lab(LabCommand::List) => None,
            Self::Lab(_) => Some("the lab"),
        }
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Demo(demo) => Ok(Outcome::of(demo.run()?.0.is_empty())),
            Self::Bench(bench) => Ok(Outcome::of(bench.run()?)),
            Self::Simulate(simulate) => Ok(Outcome::of(simulate.run()?)),
            Self::Lab(lab) => {
                lab.run()?;
                Ok(Outcome::Good)
            }
        }
    }
}
