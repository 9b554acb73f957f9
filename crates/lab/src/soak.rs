//! `shunt-lab bench soak`: a service under a mix of loads and disturbances for a long time, with every byte compared.
//!
//! Hundreds of connections at the same time use a lossy link, each with its own lifetime, sizes and pauses ([`mix`]).
//! Meanwhile servers are reloaded, and agents (Shunt's daemons) are killed ([`disturbances`]). Between the parts of the
//! run the load stops, and what the service holds is counted:
//! - at the start;
//! - after a warm-up;
//! - after a part in which everything is disturbed;
//! - in the middle and at the end of a part in which the frontend and the second backend are left alone.
//!
//! At the end, the frontend and the second backend must hold no more than in the middle, except for a little memory
//! ([`health`]). The whole service must hold no more than after the warm-up ([`Ledger`]). On the path to the second
//! backend, no response of this last part may break.

mod connection;
mod disturbances;
mod health;
mod load;
mod mix;
mod outcome;
mod response;
mod tally;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::faults::{Bed, Ledger};
use crate::lab::Lab;
use crate::link::Link;
use crate::nginx::Heap;
use crate::random::{Random, seed_or_random};
use crate::report::{Machine, Paint, Progress, number};
use crate::service::{Options, Settings};
use disturbances::{Disturbance, Reach};
use health::Health;
use load::Load;
pub(crate) use outcome::Case;
use outcome::Outcome;
use shunt_sys::output;
use tally::{Counts, Tally};

/// Names of the moments at which the memory and descriptors of processes are recorded.
const TIMES: [&str; 5] = ["start", "warm", "disturbed", "middle", "end"];
/// Parts of the run: for each, its fraction of the run's time, and what is disturbed.
const PARTS: [(f64, Reach); 4] = [(0.1, Reach::None), (0.3, Reach::All), (0.3, Reach::First), (0.3, Reach::First)];
/// Shortest pause between two disturbances; the longest is twice that.
const CALM: Duration = Duration::from_secs(5);

/// `shunt-lab bench soak`
#[derive(Debug, Args)]
pub struct Soak {
    /// Minutes of load
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Run for 3 minutes
    #[arg(long, conflicts_with = "minutes")]
    quick: bool,
    /// Number of concurrent connections
    #[arg(long, default_value_t = 300)]
    connections: usize,
    /// Seed of everything random; without one, a random seed, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Soak {
    /// Runs the soak and prints the results. Returns `false` if anything was wrong.
    ///
    /// # Errors
    /// When the service cannot be started or repaired, or the file cannot be written.
    pub fn run(&self) -> Result<bool> {
        let seed = seed_or_random(self.seed);
        let minutes = if self.quick { 3.0 } else { self.minutes };
        eprintln!("seed {seed}: --seed {seed} draws the same connections and disturbances");
        let lab = Lab::builder().intermediates(1).backends(2).client_link(link(seed)).build()?;
        let files: Vec<(String, u64)> = mix::files().into_iter().map(|file| (file.name, file.size)).collect();
        let mut bed = Bed::start_with(&lab, files, options())?;
        let whole = Duration::from_secs_f64(minutes * 60.0);
        let run = Run::new(seed, self.connections, whole);
        let outcome = run.run(&mut bed, self.quick)?;
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&outcome)? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&outcome.show(Paint::of(&std::io::stdout())))?;
        Ok(outcome.wrong.is_empty())
    }
}

/// Link with the losses, jitter and reordering of a bad path on the Internet.
fn link(seed: u64) -> Link {
    let ms = Duration::from_millis;
    Link::wan(ms(5)).jitter(ms(2)).loss(0.003).burst_loss(0.002, 4.0).reorder(0.002, ms(4)).duplicate(0.001).seed(seed)
}

/// Timeouts of the service. A client's reset may be lost, and nobody repeats it. `keepalive_timeout` then ends the
/// connection before the service's sockets are counted (within 15 s). It is longer than the 10 s that a slow reader may
/// need for a body that is all in its receive buffer. Otherwise its next request could meet the end of its connection.
const TIMEOUTS: &[&str] = &[
    "keepalive_timeout 13s",
    "send_timeout 15s",
    "proxy_read_timeout 15s",
    "proxy_send_timeout 15s",
    "proxy_connect_timeout 5s",
];

fn options() -> Options {
    let settings = Settings {
        agent_frontend: "flow_quiet = \"2s\"\n",
        agent_backend: "park = \"5s\"\nprogress = \"15s\"\noffer_lifetime = \"10s\"\n",
        http: TIMEOUTS,
        locations: Some(Bed::locations),
        ..Settings::default()
    };
    // A relayed body has buffers of up to 2 MiB. What the heap keeps of them later would look like a leak.
    Options { settings, heap: Heap::Returned, ..Options::shunt() }
}

struct Run {
    seed: u64,
    at_once: usize,
    whole: Duration,
    start: Instant,
    tally: Tally,
    progress: Progress,
    files: Vec<mix::File>,
}

impl Run {
    fn new(seed: u64, at_once: usize, whole: Duration) -> Self {
        let (start, tally, progress, files) = (Instant::now(), Tally::default(), Progress::to_stderr(), mix::files());
        Self { seed, at_once, whole, start, tally, progress, files }
    }

    fn run(&self, bed: &mut Bed<'_>, quick: bool) -> Result<Outcome> {
        let mut health = BTreeMap::from([(TIMES[0], Health::now(bed.lab())?)]);
        let (mut disturbances, mut shares, mut warm) = (Vec::new(), Vec::new(), None);
        for (number, (part, reach)) in PARTS.into_iter().enumerate() {
            let before = (bed.shortcuts()?, self.tally.now().long);
            disturbances.extend(self.part(bed, number as u64, self.whole.mul_f64(part), reach)?);
            if reach != Reach::All {
                // In these parts the frontend's agent (Shunt's daemon) is not restarted, so its counter of shortcuts
                // continues.
                shares.push((bed.shortcuts()?.saturating_sub(before.0), self.tally.now().long - before.1));
            }
            bed.recover().with_context(|| format!("after part {}", number + 1))?;
            let ledger = Ledger::settled(bed.service())?;
            health.insert(TIMES[number + 1], Health::now(bed.lab())?);
            warm.get_or_insert(ledger);
        }
        let warm = warm.context("a soak has a warm-up")?;
        let leaks = Ledger::leaks(&warm, bed.service())?;
        let held = Ledger::of(bed.service())?;
        let counts = self.tally.now();
        let mut wrong = counts.unexplained(&disturbances, self.start);
        wrong.extend(leaks.iter().map(|(what, count)| format!("leaked: {count} {what}")));
        let (middle, end) = (&health[TIMES[3]], &health[TIMES[4]]);
        wrong.extend(end.growth_since(middle));
        // The frontend and the second backend have three processes each: an agent, and two of nginx.
        if end.survivors(middle) < 6 {
            wrong.push("processes ended that no disturbance had touched in the last part".to_owned());
        }
        let share = shares.iter().map(|share| share.0).sum::<u64>() as f64
            / shares.iter().map(|share| share.1).sum::<u64>().max(1) as f64;
        self.progress.clear();
        Ok(Outcome {
            bench: "soak",
            machine: Machine::this(),
            quick,
            seed: self.seed,
            minutes: self.start.elapsed().as_secs_f64() / 60.0,
            cases: cases(&counts, share, wrong.len(), leaks.len()),
            endings: endings(&counts),
            disturbances: named(&disturbances),
            health,
            held: held.counts(),
            wrong,
        })
    }

    /// Loads the service for `time`, disturbs it meanwhile, and then lets all connections end.
    fn part(&self, bed: &mut Bed<'_>, number: u64, time: Duration, reach: Reach) -> Result<Vec<Disturbance>> {
        let until = Instant::now() + time;
        let (server, client) = (bed.server(), bed.lab().client());
        let over = AtomicBool::new(false);
        let (made, loaded) = std::thread::scope(|scope| {
            let loader = scope.spawn(|| {
                let random = Random::new(self.seed, 100 + number);
                let loaded = client.run(|| {
                    Load::new(server, &self.files, random)?.run(self.at_once, until, &self.tally, |open| self.say(open))
                });
                over.store(true, Ordering::Relaxed);
                loaded?
            });
            let mut random = Random::new(self.seed, 200 + number);
            let made = self.disturb(bed, reach, until, &mut random, &over);
            (made, loader.join())
        });
        match loaded {
            Ok(loaded) => loaded.context("loading the service")?,
            Err(_) => bail!("the load panicked"),
        }
        made
    }

    fn disturb(
        &self,
        bed: &mut Bed<'_>,
        reach: Reach,
        until: Instant,
        random: &mut Random,
        over: &AtomicBool,
    ) -> Result<Vec<Disturbance>> {
        let mut made = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let next = Instant::now() + CALM + CALM.mul_f64(random.part());
            let Some(fault) = Disturbance::choose(reach, random).filter(|_| next < until) else { return Ok(made) };
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            self.progress.step(fault.name());
            made.push(Disturbance::make(fault, Duration::from_secs(1), bed)?);
        }
        Ok(made)
    }

    /// Prints the progress about every 10 seconds. The load calls this function every second.
    fn say(&self, open: usize) {
        let seconds = self.progress.seconds();
        if !(seconds as u64).is_multiple_of(10) {
            return;
        }
        let counts = self.tally.now();
        self.progress.step(&format!(
            "{:.0}%: {} responses, {} MB, {} connections open, {} broken, {} wrong bytes, {} hang",
            100.0 * seconds / self.whole.as_secs_f64(),
            number::count(counts.responses),
            number::count(counts.bytes >> 20),
            open,
            counts.broken.len(),
            counts.wrong,
            counts.hangs,
        ));
    }
}

fn cases(counts: &Counts, share: f64, wrong: usize, leaks: usize) -> Vec<Case> {
    vec![
        Case::of("connections", "connections", counts.connections as f64),
        Case::of("aborted", "connections", counts.aborted as f64),
        Case::of("responses", "responses", counts.responses as f64),
        Case::of("bytes", "bytes", counts.bytes as f64),
        Case::of("wrong-bytes", "responses", counts.wrong as f64),
        Case::of("hangs", "responses", counts.hangs as f64),
        Case::of("broken", "responses", counts.broken.len() as f64),
        Case::of("shortcut-share", "of bodies of 32 KiB and more", share),
        Case::of("leaks", "kinds", leaks as f64),
        Case::of("wrong", "things", wrong as f64),
    ]
}

fn endings(counts: &Counts) -> BTreeMap<String, u64> {
    let mut endings = BTreeMap::new();
    for (response, _) in &counts.broken {
        *endings.entry(response.ending.kind().to_owned()).or_default() += 1;
    }
    endings
}

fn named(disturbances: &[Disturbance]) -> BTreeMap<&'static str, u64> {
    let mut named = BTreeMap::new();
    for disturbance in disturbances {
        *named.entry(disturbance.fault.name()).or_default() += 1;
    }
    named
}
