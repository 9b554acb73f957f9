//! Downloads at an RTT of 50 ms: a client's goodput with Shunt and with plain nginx. A *shortcut* is a response whose
//! body bypasses tiers.
//!
//! The two sides (Shunt and plain nginx) have links of the same kind. Before each download, the client's link gets a
//! seed for its losses, the same on both sides. So the nth frame of a connection is lost on both sides or on none. The
//! remaining difference is due to how the servers' machines send. With losses a download takes long, so several clients
//! download at the same time, each over its own link.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bed::Side;
use super::case::{Case, Download};
use super::effort::Effort;
use super::outcome::CaseOutcome;
use super::rounds::alternate;
use super::subject::Subject;
use crate::fetch::{Fetch, file_sha256};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::link::{Cable, Link};
use crate::placement::{Cores, Placement};
use crate::report::{Progress, Sample, number::size_name};
use crate::service::{Options, Service};
use crate::wire::Wire;

/// Delay in one direction; both directions make the 50 ms of the cases' names.
const DELAY: Duration = Duration::from_millis(25);
const LOSS: f64 = 0.01;
/// Number of clients that download at the same time if frames get lost.
const LOSSY_CLIENTS: u8 = 8;
/// Longest silence of a download. Lost retransmissions are found by timeouts, which double each time.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// Seed of the links until the first download; the lab prints it.
const SEED: u64 = 1;

/// How often a case is measured.
struct Repeat {
    rounds: usize,
    /// Number of downloads of each client in one round, one after another.
    downloads: usize,
}

impl Repeat {
    fn of(download: Download, effort: Effort) -> Self {
        let (rounds, downloads) = match (effort, download) {
            (Effort::Quick, Download::SecondResponse) => (3, 4),
            (Effort::Quick, Download::FourMib) => (2, 1),
            (Effort::Full, Download::SecondResponse) => (7, 8),
            (Effort::Full, Download::FourMib) => (7, 1),
        };
        Self { rounds, downloads }
    }
}

/// Service and clients of one side.
struct Way<'lab> {
    lab: &'lab Lab,
    service: Service<'lab>,
    files: PathBuf,
}

/// Measures the cases of kind [`Case::Wan`] among `cases`.
pub(super) fn measure(cases: &[Case], ours: Options, effort: Effort, progress: &Progress) -> Result<Vec<CaseOutcome>> {
    let mut outcomes = Vec::new();
    for lossy in [false, true] {
        let wanted = cases.iter().filter_map(|case| match case {
            Case::Wan { download, loss } if *loss == lossy => Some((*case, *download)),
            _ => None,
        });
        let wanted: Vec<_> = wanted.collect();
        if wanted.is_empty() {
            continue;
        }
        progress.step(if lossy { "building labs: RTT 50 ms, 1% loss" } else { "building labs: RTT 50 ms" });
        let labs = [lab(lossy)?, lab(lossy)?];
        let [mut baseline, mut ours] = [Way::start(&labs[0], Options::plain())?, Way::start(&labs[1], ours)?];
        for (case, download) in wanted {
            progress.step(&case.name());
            let (before, repeat) = (ours.shortcuts(), Repeat::of(download, effort));
            let (slow, fast) = rounds(&baseline, &ours, download, &repeat).with_context(|| case.name())?;
            let taken = ours.shortcuts() - before;
            let answers =
                ours.lab.hosts_of(Role::Client).count() * repeat.rounds * repeat.downloads * responses(download);
            let outcome = CaseOutcome::compared(case, slow, fast);
            outcomes.push(outcome.with("shortcuts_per_response", taken as f64 / answers as f64));
        }
        baseline.service.check_running()?;
        ours.service.check_running()?;
    }
    Ok(outcomes)
}

/// Builds a lab whose hosts all run on one core. Between cores a veth pair reorders packets, and TCP retransmits
/// packets that were only late.
fn lab(lossy: bool) -> Result<Lab> {
    let link = Link::wan(DELAY).seed(SEED);
    let (link, clients) = if lossy { (link.loss(LOSS), LOSSY_CLIENTS) } else { (link, 1) };
    let builder = Lab::builder().clients(clients).client_link(link).wire(Wire::Mtu);
    builder.placement(Placement::WholeService).cores(Cores::ONE).build()
}

/// Goodput of both sides in KiB/s, the baseline's first, round by round.
fn rounds(baseline: &Way, ours: &Way, download: Download, repeat: &Repeat) -> Result<(Sample, Sample)> {
    let (mut slow, mut fast) = (Sample::default(), Sample::default());
    let mut turns = 0;
    alternate(repeat.rounds, |side| {
        let round = turns / 2;
        turns += 1;
        let (way, sample) = match side {
            Side::Ours => (ours, &mut fast),
            _ => (baseline, &mut slow),
        };
        let speed = way.round(download, round * repeat.downloads, repeat.downloads);
        sample.push(speed.with_context(|| format!("{side:?}"))?);
        Ok(())
    })?;
    Ok((slow, fast))
}

impl<'lab> Way<'lab> {
    fn start(lab: &'lab Lab, options: Options) -> Result<Self> {
        let sizes = [Download::SecondResponse, Download::FourMib].map(size_of);
        let files = lab.files(&sizes.map(|size| (size_name(size), size)))?;
        Ok(Self { lab, service: Service::start(lab, &files, options)?, files })
    }

    /// Number of shortcuts so far; 0 with plain nginx, or if an agent (Shunt's daemon) does not answer.
    fn shortcuts(&self) -> u64 {
        self.service.all_stats().map_or(0, |stats| stats.count("servers.shortcuts"))
    }

    /// Lets every client download `count` times, with the seeds `first`, `first + 1` and so on. Returns the mean
    /// goodput of a download in KiB/s.
    fn round(&self, download: Download, first: usize, count: usize) -> Result<f64> {
        let server = self.service.chain().server();
        let expected = file_sha256(self.files.join(size_name(size_of(download))))?;
        let clients: Vec<(&Host, &Cable)> = self.lab.hosts_of(Role::Client).zip(self.lab.cables()).collect();
        let times = std::thread::scope(|scope| {
            let threads = clients.into_iter().map(|(host, cable)| {
                let expected = expected.as_str();
                scope.spawn(move || {
                    let seeds = (first..first + count).map(|seed| seed as u64);
                    seeds.map(|seed| one(host, cable, seed, server, download, expected)).sum::<Result<Duration>>()
                })
            });
            let threads: Vec<_> = threads.collect();
            let join =
                |thread: std::thread::ScopedJoinHandle<Result<Duration>>| thread.join().expect("a client's thread");
            threads.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        let bytes = size_of(download) * (times.len() * count) as u64;
        Ok(bytes as f64 / 1024.0 / times.iter().sum::<Duration>().as_secs_f64())
    }
}

fn size_of(download: Download) -> u64 {
    Case::Wan { download, loss: false }.size()
}

/// Number of responses in a download; only the last one is timed.
fn responses(download: Download) -> usize {
    match download {
        Download::SecondResponse => 2,
        Download::FourMib => 1,
    }
}

/// Makes one download over a new connection. Returns the time of its last response, from the request to the last byte.
fn one(
    host: &Host,
    cable: &Cable,
    seed: u64,
    server: SocketAddr,
    download: Download,
    sha256: &str,
) -> Result<Duration> {
    cable.reseed(seed);
    let mut fetch = Fetch::new(server);
    fetch.timeout = SILENCE_LIMIT;
    let path = format!("/{}", size_name(size_of(download)));
    let fetched = fetch.run(host, &vec![path; responses(download)])?;
    for one in &fetched {
        ensure!(one.status == 200 && one.sha256 == sha256, "{}: status {}, or other bytes", one.path, one.status);
    }
    fetched.last().map(|one| one.elapsed).context("no response")
}
