//! Runs a number of histories (simulated runs), one seed after the other, and prints how fast they were and what
//! happened in them. With this program, scripts/coverage-of-logic measures which lines of crates/logic are reached. A
//! profiler can run it, too.
//!
//! Usage: histories [NUMBER [FIRST SEED]]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use shunt_simulator::{History, run};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Takes every line of the log and drops it, so that the code that builds the line runs.
struct Sink;

impl Subscriber for Sink {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).map_while(|argument| argument.parse::<u64>().ok());
    let (number, first) = (arguments.next().unwrap_or(1000), arguments.next().unwrap_or(1));
    if std::env::var_os("SHUNT_LOG_LINES").is_some() {
        let _ = tracing::subscriber::set_global_default(Sink);
    }
    let mut covered = BTreeMap::<&str, u64>::new();
    let (mut events, mut failed) = (0, 0);
    let begin = Instant::now();
    for seed in first..first + number {
        let outcome = run(History { seed });
        events += outcome.events;
        failed += u64::from(!outcome.violations.is_empty());
        outcome.violations.iter().for_each(|violation| println!("seed {seed}: {violation}"));
        outcome.covered.into_iter().for_each(|(what, times)| *covered.entry(what).or_default() += times);
    }
    let seconds = begin.elapsed().as_secs_f64();
    covered.iter().for_each(|(what, times)| println!("{times:>10} {what}"));
    println!("{number} histories in {seconds:.2} s, {:.0} a second; {events} events", number as f64 / seconds);
    println!("{failed} with a violation");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
