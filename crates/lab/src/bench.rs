//! `shunt-lab bench`: the lab's benchmarks, and its long tests of a service under load.
//!
//! The benchmarks `disc`, `tls` and `odb` compare Shunt with plain nginx. The baseline (nginx without Shunt) and Shunt
//! run side by side, each in its own lab on the same cores. They are loaded in turns, A B A B; a round is one turn of
//! each. The quoted figure is the median of the rounds' ratios of Shunt to the baseline. [`case`] names what `disc`
//! measures, [`bed`] has the labs, and [`runs`] measures. [`outcome`] has the results, which [`page`] and [`show`]
//! display.

mod bed;
mod beds;
mod case;
mod choice;
mod disc;
mod effort;
mod latency;
mod limit;
mod odb;
mod outcome;
mod page;
mod profile;
mod rounds;
mod runs;
mod show;
mod subject;
mod target;
mod tls;
mod wan;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};

use choice::{Choice, ensure_two_cores};
pub use disc::Disc;
pub use odb::Odb;
pub use tls::Tls;

use crate::attack::Attack;
use crate::failover::FailoverBench;
use crate::faults::Faults;
use crate::mistakes::Mistakes;
use crate::silence::Silence;
use crate::soak::Soak;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The shortcut: service CPU, bytes, throughput and latency of responses whose bodies bypass the tiers
    ///
    /// Cases: cpu/{0,1,2}is/{16k,64k,256k,1m}/{tso,mtu}: CPU microseconds of the whole service per response, with 0 to
    /// 2 intermediates; fe-cpu/*, is-cpu/*: the same for the frontend or an intermediate alone; is-bytes/1m: an
    /// intermediate's traffic; handoff/64k: cost of a shortcut above the physical limit; saturated/*: responses that
    /// one core of the frontend carries; p50/*, p99/*: latency at a fixed rate; idle/1k, idle-p999/1k: bodies too short
    /// for a shortcut; wan/50ms/*: goodput at an RTT of 50 ms, /loss1 with 1% of the frames lost. Wires: tso carries
    /// segments of 64 KiB whole, mtu one packet of 1,500 bytes at a time.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Disc(Disc),
    /// The shortcut on TLS 1.3: the frontend terminates TLS, the backend encrypts the body
    ///
    /// Cases: fe-cpu/1m/tso: CPU microseconds of the frontend per response; cpu/2is/*: the same for the whole service
    /// with 2 intermediates; be-encrypt/1m: CPU that a response adds to the backend, compared with the CPU that
    /// encryption costs plain nginx's frontend (TLS less plain HTTP); handshake/1k: new connections that one core of
    /// the frontend carries, each with a resumed session and one response.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Tls(Tls),
    /// On-demand buffers: unmodified nginx on every tier, under `shunt run`
    ///
    /// Cases: bypass/64k: part of a body's bytes that never pass an intermediate's ports, /unaligned with buffers that
    /// begin inside a page; is-cpu/*, fe-cpu/*, be-cpu/*: CPU microseconds of one tier per response; cpu/2is/*: the
    /// same for the whole service with 2 intermediates; small/3k: throughput of bodies too short for the store;
    /// touched/64k: throughput of bodies that the intermediate reads to the last byte (sub_filter); fe-cpu/*/tls:
    /// clients that speak TLS 1.3; handshake/1k: their new connections that one core of the frontend carries, each with
    /// one response.
    ///
    /// --paper reproduces tables of the paper on on-demand buffers, with PHP behind nginx and nginx.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Odb(Odb),
    /// The fault table: every fault at every step of a handoff, and what clients see of it
    ///
    /// A cell holds a response at a step, injects a fault, compares each byte that the client gets, and counts what the
    /// service holds before and after. docs/faults.md says what each step and fault is. Exit code 1 if a byte is
    /// wrong, a time limit is exceeded, something leaked, or an unrelated client noticed the fault.
    ///
    /// Needs root.
    Faults(Faults),
    /// The table of mistakes: wrong configurations and environments, their effects and their log lines
    ///
    /// A row makes a mistake in a new lab, compares each byte that clients get, and looks for the line that tells the
    /// operator. docs/mistakes.md says what each mistake is. Exit code 1 if a response is not whole, a shortcut is
    /// taken or missing against expectation, or no log line names the mistake.
    ///
    /// Needs root.
    Mistakes(Mistakes),
    /// Honest clients under attack: raw packets, hostile local users, a hostile peer, a greedy client
    ///
    /// Honest clients fetch bodies of mixed lengths over plain connections and TLS, and compare every byte. Meanwhile a
    /// stranger forges packets, a client acknowledges bytes that it has not received, other users write malformed
    /// messages to the agents' sockets, and a peer with a certificate floods the agents. Plain nginx under the same
    /// packets alternates with Shunt. Exit code 1 if a process ended, an honest client's body is not whole, the p99
    /// latency is more than 1.5 times plain nginx's, or the greedy client makes Shunt send more than 1.1 times as many
    /// bytes as plain nginx, per byte that reaches it.
    ///
    /// Needs root.
    Attack(Attack),
    /// The table of silence: each part stopped, cut off, or slow, and how long others wait
    ///
    /// In a row, one client is in mid-payload when the part falls silent, another sends its request during the silence,
    /// and bystanders download without that part. docs/silence.md says what each row is. Exit code 1 if a byte is
    /// wrong, a time limit is exceeded, or a bystander waits longer than 1 second.
    ///
    /// Needs root.
    Silence(Silence),
    /// A service under load and many disturbances for a long time, every byte compared
    ///
    /// Hundreds of connections over a lossy link, with sizes and lifetimes from a heavy-tailed mix: slow readers, long
    /// pauses, aborts at random moments; meanwhile servers are reloaded and killed, agents killed, stopped and cut off.
    /// Exit code 1 if a byte was wrong, something hung, a response broke without a disturbance that explains it,
    /// something leaked, or a process's memory or number of descriptors grew.
    ///
    /// Needs root.
    Soak(Soak),
    /// Downloads whose backend is lost at a random byte: whether they are whole, and what the loss costs
    ///
    /// A client reads 48 MiB, and at a random byte the backend that sends them is lost. Another backend continues.
    /// Every body is compared by SHA-256. Exit code 1 if one is not whole, or took 2 seconds longer than without a
    /// loss.
    ///
    /// Needs root.
    Failover(FailoverBench),
    /// Every benchmark, one report
    All(All),
}

/// `shunt-lab bench all`
#[derive(Debug, Args)]
pub struct All {
    /// Fewer and shorter runs: every case within 3 minutes
    #[arg(long)]
    quick: bool,
    /// Write a page with tables and plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the figures to this JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Bench {
    /// Returns whether the command only prints a list and measures nothing.
    #[must_use]
    pub fn only_lists(&self) -> bool {
        match self {
            Self::Disc(disc) => disc.choice.list,
            Self::Tls(tls) => tls.choice.list,
            Self::Odb(odb) => odb.choice.list,
            Self::Faults(faults) => faults.list || faults.expected,
            Self::Mistakes(mistakes) => mistakes.expected,
            Self::Silence(silence) => silence.expected,
            Self::Attack(_) | Self::All(_) | Self::Soak(_) | Self::Failover(_) => false,
        }
    }

    /// Runs the benchmark and prints its table. Returns `false` if a result is not as it must be. Missed targets of
    /// `disc`, `tls` and `odb` do not count.
    ///
    /// # Errors
    /// When something cannot be started, an answer was wrong, or a file cannot be written.
    pub fn run(self) -> Result<bool> {
        match self {
            Self::Disc(disc) => disc.run()?,
            Self::Tls(tls) => tls.run()?,
            Self::Odb(odb) => odb.run()?,
            Self::All(all) => all.run()?,
            Self::Faults(faults) => return faults.run(),
            Self::Mistakes(mistakes) => return mistakes.run(),
            Self::Silence(silence) => return silence.run(),
            Self::Attack(attack) => return attack.run(),
            Self::Soak(soak) => return soak.run(),
            Self::Failover(failover) => return failover.run(),
        }
        Ok(true)
    }
}

impl All {
    fn run(self) -> Result<()> {
        let Self { quick, html, json } = self;
        let choice = || Choice { quick, ..Choice::default() };
        let files = Choice { html, json, ..choice() };
        ensure_two_cores()?;
        files.check_files()?;
        let disc = Disc { choice: choice(), ..Disc::default() };
        let (tls, odb) = (Tls { choice: choice() }, Odb { choice: choice(), paper: false });
        files.write(&[disc.measure_all()?, tls.measure_all()?, odb.measure_all()?])
    }
}
