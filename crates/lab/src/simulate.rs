//! `shunt-lab simulate`: runs *histories* until the time is over, on all processors. A history is a run of a whole
//! service on a virtual clock (crates/simulator), and its seed decides everything that happens. The next history has
//! the next seed.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::num::NonZero;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use shunt_simulator::{History, Outcome};
use shunt_sys::output;

use crate::cli::ensure_use;
use crate::random::seed_or_random;
use crate::report::{Align, Machine, Paint, Progress, Table, number};
use crate::soak::Case;

/// Interval between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Largest number of violations that are printed. The JSON file has all of them.
const VIOLATIONS_SHOWN: usize = 20;

/// `shunt-lab simulate`
#[derive(Debug, Args)]
pub struct Simulate {
    /// Seconds to run
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Seed of the first history; the next history has the next seed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Simulate {
    /// Runs histories until the time is over, and prints the results. Returns `false` if there was a violation.
    ///
    /// # Errors
    /// When the number of seconds is 0, or the file cannot be written.
    pub fn run(&self) -> Result<bool> {
        ensure_use(self.seconds > 0, || "--seconds 0: write a number above 0".to_owned())?;
        let seed = seed_or_random(self.seed);
        eprintln!("seed {seed}: --seed {seed} begins with the same history");
        let report = simulate(seed, Duration::from_secs(self.seconds), &Progress::to_stderr());
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&report)? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&report.show(Paint::of(&std::io::stdout())))?;
        Ok(report.violations.is_empty())
    }
}

/// Runs histories on all processors until `time` is over, and at least one. The first one has the seed `seed`.
fn simulate(seed: u64, time: Duration, progress: &Progress) -> Report {
    let run = Run { seed, time, begin: Instant::now(), begun: AtomicU64::new(0), counts: Mutex::default() };
    std::thread::scope(|scope| {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        for _ in 1..processors {
            scope.spawn(|| run.histories(|_| {}));
        }
        let mut next_line = PROGRESS_INTERVAL;
        run.histories(|elapsed| {
            if elapsed >= next_line {
                progress.step(&run.line());
                next_line = elapsed + PROGRESS_INTERVAL;
            }
        });
    });
    progress.clear();
    let seconds = run.begin.elapsed().as_secs_f64();
    Report::of(seed, seconds, run.counts.into_inner().expect("no thread panics while it counts"))
}

/// State of a simulation, which several threads share.
struct Run {
    seed: u64,
    time: Duration,
    begin: Instant,
    /// Number of the next history, counted from 0. A thread takes this number, and raises it by 1.
    begun: AtomicU64,
    counts: Mutex<Counts>,
}

impl Run {
    /// Runs histories, one after the other, until the time is over. After each one, calls `look` with the time since
    /// the beginning of the simulation.
    fn histories(&self, mut look: impl FnMut(Duration)) {
        loop {
            let number = self.begun.fetch_add(1, Ordering::Relaxed);
            if number > 0 && self.begin.elapsed() >= self.time {
                break;
            }
            let seed = self.seed.wrapping_add(number);
            let outcome = catch_unwind(|| shunt_simulator::run(History { seed }));
            self.counts().add(seed, outcome);
            look(self.begin.elapsed());
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("no thread panics while it counts")
    }

    fn line(&self) -> String {
        let counts = self.counts();
        format!("{} histories, {} violations", number::count(counts.histories), counts.violations.len())
    }
}

/// Something that must not happen, and the seed of the history in which it happened.
#[derive(Debug, Clone, Serialize)]
struct Violation {
    seed: u64,
    what: String,
}

/// Sums over the histories so far.
#[derive(Debug, Default)]
struct Counts {
    histories: u64,
    /// Number of responses that clients got.
    responses: u64,
    events: u64,
    /// Names of things that happened in the histories, and how often each happened.
    covered: BTreeMap<&'static str, u64>,
    violations: Vec<Violation>,
}

impl Counts {
    /// Adds the outcome of the history with this seed. A panic in the history counts as a violation.
    fn add(&mut self, seed: u64, outcome: std::thread::Result<Outcome>) {
        self.histories += 1;
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(panic) => return self.violate(seed, format!("panicked: {}", panic_message(&*panic))),
        };
        self.responses += outcome.served;
        self.events += outcome.events;
        for (name, count) in outcome.covered {
            *self.covered.entry(name).or_default() += count;
        }
        outcome.violations.into_iter().for_each(|what| self.violate(seed, what));
    }

    fn violate(&mut self, seed: u64, what: String) {
        self.violations.push(Violation { seed, what });
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// Results of a simulation.
#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    /// Seed of the first history.
    seed: u64,
    seconds: f64,
    cases: Vec<Case>,
    /// Names of things that happened in the histories, and how often each happened.
    covered: BTreeMap<&'static str, u64>,
    violations: Vec<Violation>,
    #[serde(skip)]
    figures: Figures,
}

/// Name, unit and value of each figure.
type Figures = [(&'static str, &'static str, f64); 5];

impl Report {
    fn of(seed: u64, seconds: f64, counts: Counts) -> Self {
        let Counts { histories, responses, events, covered, mut violations } = counts;
        violations.sort_by_key(|violation| violation.seed);
        let figures = [
            ("histories", "histories", histories as f64),
            ("rate", "histories/s", histories as f64 / seconds),
            ("responses", "responses", responses as f64),
            ("events", "events", events as f64),
            ("violations", "violations", violations.len() as f64),
        ];
        let cases = figures.into_iter().map(|(name, unit, value)| Case::of(name, unit, value)).collect();
        Self { bench: "simulate", machine: Machine::this(), seed, seconds, cases, covered, violations, figures }
    }

    fn show(&self, paint: Paint) -> String {
        let mut figures = Table::new(&[("what", Align::Left), ("value", Align::Right), ("unit", Align::Left)]);
        for (name, unit, value) in self.figures {
            figures.row([name.to_owned(), number::plain(value), unit.to_owned()]);
        }
        let mut covered = Table::new(&[("covered", Align::Left), ("times", Align::Right)]);
        for (name, count) in &self.covered {
            covered.row([(*name).to_owned(), number::count(*count)]);
        }
        let mut text = format!("{}\n{}\n", figures.show(paint), covered.show(paint));
        for Violation { seed, what } in self.violations.iter().take(VIOLATIONS_SHOWN) {
            let _ = writeln!(text, "{} seed {seed}: {what}", paint.bad("VIOLATION"));
        }
        if self.violations.len() > VIOLATIONS_SHOWN {
            let _ = writeln!(text, "and {} more", self.violations.len() - VIOLATIONS_SHOWN);
        }
        let end = match self.violations.first() {
            None => paint.good("No faults found."),
            Some(first) => format!("`shunt-lab simulate --seed {} --seconds 1` runs the first one again.", first.seed),
        };
        text + &end + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_violation_is_shown_with_its_seed() {
        let mut counts = Counts { histories: 30, ..Counts::default() };
        counts.covered.insert("agent restarted", 1234);
        assert!(Report::of(7, 2.0, Counts::default()).show(Paint::never()).contains("No faults found."));
        for seed in 7..7 + 1 + VIOLATIONS_SHOWN as u64 {
            counts.violate(seed, "a client waits".to_owned());
        }
        let report = Report::of(7, 2.0, counts);
        let text = report.show(Paint::never());
        assert!(text.contains("VIOLATION seed 8: a client waits\n") && text.contains("and 1 more\n"), "{text}");
        assert!(text.contains("15.0") && text.contains("1,234") && text.contains("--seed 7 --seconds 1"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((json["violations"][1]["seed"].as_u64(), json["cases"][0]["ours"].as_f64()), (Some(8), Some(30.0)));
    }

    #[test]
    fn a_short_time_is_enough_for_one_history() {
        let report = simulate(1, Duration::from_nanos(1), &Progress::to_stderr());
        assert_eq!((report.seed, report.figures[0].2), (1, 1.0));
    }

    #[test]
    fn a_panic_is_said_in_its_words() {
        let of = |panic: Box<dyn Any + Send>| panic_message(&*panic).to_owned();
        assert_eq!(of(Box::new("a")), "a");
        assert_eq!(of(Box::new("b".to_owned())), "b");
        assert_eq!(of(Box::new(1)), "without a message");
    }
}
