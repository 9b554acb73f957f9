//! `shunt-lab bench`: Shunt against plain nginx, HAProxy and the physical limit, in one run.
//!
//! The baseline and Shunt run side by side, each in its own lab on the same cores, and are loaded in turns, A B A B.
//! The quoted figure is the ratio of their medians. [`case`] names what is measured, [`bed`] has the labs, and [`runs`]
//! measures. [`outcome`] has the results, which [`page`] and [`show`] display.

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
    /// Cases: cpu/{0,1,2}is/{16k,64k,256k,1m}/{tso,mtu} is microseconds of the whole service's core per response, with 0
    /// to 2 intermediates; fe-cpu/* and is-cpu/* the same of the frontend and of an intermediate alone; is-bytes/1m
    /// an intermediate's traffic; handoff/64k what a shortcut costs above the physical limit; saturated/* the responses
    /// that one core of the frontend carries; p50/* and p99/* latency at a fixed rate; idle/1k and idle-p999/1k bodies too
    /// short for a shortcut; wan/50ms/* what a client gets a second whose round trip takes 50 ms, /loss1 with 1% of the
    /// frames lost. The wires: tso carries segments of 64 KiB whole, mtu one packet of 1,500 bytes at a time.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Disc(Disc),
    /// The same on TLS 1.3: the frontend terminates it, the backend encrypts the body
    ///
    /// Cases: fe-cpu/1m/tso is microseconds of the frontend's core per response, cpu/2is/* of the whole service's with 2
    /// intermediates; be-encrypt/1m the CPU that a response adds to the backend, to the CPU that encrypting it cost plain
    /// nginx's frontend (that on TLS less that on plain HTTP); handshake/1k the new connections, each with a resumed
    /// session and one response, that one core of the frontend carries.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Tls(Tls),
    /// On-demand buffers: unmodified nginx on every tier, under `shunt run`
    ///
    /// Cases: bypass/64k is the part of a body's bytes that an intermediate's ports never see, /unaligned with buffers that
    /// begin elsewhere than at a page; is-cpu/*, fe-cpu/* and be-cpu/* are microseconds of one tier's core per response, cpu/2is/* of the whole
    /// service's with 2 intermediates; small/3k the throughput of bodies too short to be left in the store, touched/64k
    /// of bodies that the intermediate reads to the last byte (sub_filter). fe-cpu/*/tls has clients that speak TLS 1.3;
    /// handshake/1k is how many new connections of theirs, with a response each, one core of the frontend carries.
    ///
    /// --paper reproduces the tables of the paper that this is from, with PHP behind nginx and nginx.
    ///
    /// Needs root, two cores, and a machine that does nothing else.
    Odb(Odb),
    /// The fault table: every fault at every step of a handoff, and what the client and everyone else see of it
    ///
    /// A cell holds a response at a step, injects a fault, compares each byte that the client gets, and counts what the
    /// service holds before and after. docs/faults.md says what each step and fault is. Exit code 1 where a byte is
    /// wrong, a bound is passed, something leaked, or somebody noticed who is not concerned.
    ///
    /// Needs root.
    Faults(Faults),
    /// The table of mistakes: wrong configurations and environments, and what each costs and says
    ///
    /// A row makes a mistake in a lab of its own, compares each byte that clients get, and looks for the line that tells
    /// the operator. docs/mistakes.md says what each mistake is. Exit code 1 where a response is not whole, a shortcut is
    /// taken or missing, or nobody says anything.
    ///
    /// Needs root.
    Mistakes(Mistakes),
    /// Honest clients under attack: raw packets, hostile local users, a hostile peer, a greedy client
    ///
    /// Bodies of mixed lengths over plain connections and TLS, every byte compared, while a stranger makes up packets, a
    /// client acknowledges what it has not got, other users talk nonsense to the agents' sockets, and a peer with a
    /// certificate floods them. Plain nginx under the same packets takes turns with it. Exit code 1 where a process
    /// ended, an honest client's body is not whole, its p99 latency is more than 1.5 times plain nginx's, or more bytes
    /// are drawn per byte received.
    ///
    /// Needs root.
    Attack(Attack),
    /// The table of silence: each part stopped, cut off without a word, and slow, and how long others wait
    ///
    /// A row holds a client in mid-payload, has another ask after the silence has begun, and has bystanders download
    /// whom it does not concern. docs/silence.md says what each row is. Exit code 1 where a byte is wrong, a bound is
    /// passed, or a bystander waits longer than 1 second.
    ///
    /// Needs root.
    Silence(Silence),
    /// A service under everything at once for a long time, every byte compared
    ///
    /// Hundreds of connections over a lossy link, with sizes and lifetimes from a heavy-tailed mix: slow readers, long
    /// pauses, aborts at random moments; meanwhile servers are reloaded and killed, agents killed, stopped and cut off.
    /// Ends with exit code 1 where a byte was wrong, something hung, a response broke that no disturbance explains,
    /// something leaked, or the memory or the descriptors of a process were not flat.
    ///
    /// Needs root.
    Soak(Soak),
    /// Downloads whose backend is lost at a moment of chance: whether they are whole, and what the loss costs
    ///
    /// A client reads 48 MiB, and at some byte the backend that sends them is lost. Another goes on. Every body is
    /// compared by SHA-256. Exit code 1 where one is not whole, or took 2 seconds more than without a loss.
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
    /// Write the figures
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

    /// Runs the benchmark and prints its table. Returns `false` where a result is not as it must be.
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
