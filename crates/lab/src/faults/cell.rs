//! One cell of the table: takes a response to a step (a state in its course), injects the fault, and checks everything
//! that may or may not follow. A *shortcut* is a response whose body bypasses tiers. A *bystander* is a client that
//! must not notice the fault.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::bed::{Bed, LONG_FILE, Way};
use super::client::Client;
use super::fault::Fault;
use super::ledger::Ledger;
use super::step::{Held, Step};
use super::table;
use crate::answer::Ending;
use crate::pace::Pace;

/// Longest wait for a response, longer than any bound of the table: a response that has not ended by then hangs.
const PATIENCE: Duration = Duration::from_secs(40);
/// Longest time from the repair (or from the bystander's last byte, if this is later) until new connections have
/// shortcuts again. nginx's workers and the agents (Shunt's daemons) wait 5 seconds at most before they try again
/// (docs/nginx.md, `shunt_agent`). The other 3 seconds are for a machine that does other work.
const AGAIN_BOUND: Duration = Duration::from_secs(8);
/// A bystander that gets no byte for this time has noticed the fault.
const BYSTANDER_PATIENCE: Duration = Duration::from_secs(3);
/// Pause of a bystander after each read of at most 16 KiB. So a body of 24 MiB takes at least 15 seconds.
const BYSTANDER_PAUSE: Duration = Duration::from_millis(10);

/// Result of a cell.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    pub step: &'static str,
    pub fault: &'static str,
    pub expected: String,
    /// Ending of the response, in words.
    pub ending: String,
    /// Time from the fault to the response's end, in seconds.
    pub seconds: f64,
    /// Time until new responses on each path are shortcuts again, in seconds. The time counts from the repair, or from
    /// the bystander's last byte if this is later.
    pub again_seconds: f64,
    /// Things that the service held after the repair and not before the fault, with the number of each.
    pub leaks: BTreeMap<String, u64>,
    /// Everything that was wrong; empty if nothing was.
    pub faults_found: Vec<String>,
}

impl Outcome {
    /// Result of a cell that could not be run.
    pub(super) fn broken(step: Step, fault: Fault, error: &anyhow::Error, explanation: &str) -> Self {
        Self {
            step: step.name(),
            fault: fault.name(),
            expected: table::expected(step, fault).name(),
            ending: "not known".to_owned(),
            seconds: 0.0,
            again_seconds: 0.0,
            leaks: BTreeMap::new(),
            faults_found: vec![format!("{error:#}{explanation}")],
        }
    }

    /// Ending without the number of bytes, for a narrow column.
    pub(super) fn short_ending(&self) -> &str {
        self.ending.split(" after").next().unwrap_or_default()
    }

    #[must_use]
    pub fn is_good(&self) -> bool {
        self.faults_found.is_empty()
    }
}

/// Runs one cell. After an error the bed cannot be used any more.
///
/// # Errors
/// When the step cannot be reached, the fault cannot be injected, or the service cannot be repaired.
pub fn run(bed: &mut Bed<'_>, step: Step, fault: Fault, pace: Pace) -> Result<Outcome> {
    fault.prepare(bed).with_context(|| format!("preparing {}", fault.name()))?;
    bed.warm()?;
    let before = Ledger::settled(&bed.service)?;
    let expected = table::expected(step, fault);
    let way = if step.stops_frontend_agent() { fault.bystander().max(Way::Plain) } else { fault.bystander() };
    let (server, path) = bed.bystander(way, LONG_FILE.0);
    let mut bystander = Client::connect(bed.lab.client(), server, Some(64 << 10))?;
    let over = AtomicBool::new(false);
    let (seen, noticed) = std::thread::scope(|scope| {
        let over = &over;
        let reader = scope.spawn(move || stand_by(&mut bystander, &path, over, pace.bound(BYSTANDER_PATIENCE)));
        let seen = response(bed, step, fault);
        over.store(true, Ordering::Relaxed);
        (seen, reader.join())
    });
    let (ending, seconds) = seen?;
    let Ok(noticed) = noticed else { bail!("the bystander panicked") };
    // The repair comes after the bystander's last byte, because it may take away what the bystander uses. A fault that
    // lasts for a fixed time was repaired before.
    if fault.lasts().is_none() {
        fault.repair(bed).with_context(|| format!("repairing {}", fault.name()))?;
    }
    let mut found = Vec::new();
    found.extend(expected.objection(ending, seconds, pace));
    found.extend(noticed.err().map(|error| format!("a bystander ({way:?}) noticed: {error:#}")));
    let again_seconds = bed.recover()?.as_secs_f64();
    let again_bound = pace.bound(AGAIN_BOUND);
    if again_seconds > again_bound.as_secs_f64() {
        found.push(format!("no shortcut until {again_seconds:.1} s after the repair, more than {again_bound:?}"));
    }
    let leaks = Ledger::leaks(&before, &bed.service)?;
    found.extend(leaks.iter().map(|(what, count)| format!("leaked: {count} {what}")));
    let ending = ending.to_string();
    let (step, fault, expected) = (step.name(), fault.name(), expected.name());
    Ok(Outcome { step, fault, expected, ending, seconds, again_seconds, leaks, faults_found: found })
}

/// Takes a response to the step, and injects the fault. Returns how the response ended, and how many seconds after the
/// fault.
fn response(bed: &mut Bed<'_>, step: Step, fault: Fault) -> Result<(Ending, f64)> {
    let Held { mut client, stopped } = step.reach(bed, fault.prefix())?;
    fault.inject(bed).with_context(|| format!("injecting {}", fault.name()))?;
    let begin = Instant::now();
    let (ending, seconds) = std::thread::scope(|scope| -> Result<_> {
        let reader = scope.spawn(move || {
            if step == Step::Parked {
                let (file, size) = step.file();
                client.ask(&format!("{}{file}", fault.prefix()), file, size);
            }
            Ok::<_, anyhow::Error>((client.finish(PATIENCE)?, begin.elapsed().as_secs_f64()))
        });
        let mended = stopped.release(bed).and_then(|()| {
            fault.lasts().map_or(Ok(()), |time| {
                std::thread::sleep(time);
                fault.repair(bed)
            })
        });
        let Ok(read) = reader.join() else { bail!("the reader panicked") };
        mended.with_context(|| format!("repairing {}", fault.name()))?;
        read
    })?;
    Ok((ending, seconds))
}

/// Downloads slowly until the cell is over, then reads the rest of the response at once. Each response must be whole.
fn stand_by(client: &mut Client, path: &str, over: &AtomicBool, patience: Duration) -> Result<()> {
    let (file, size) = LONG_FILE;
    let over = || over.load(Ordering::Relaxed);
    loop {
        client.ask(path, file, size);
        let early = client.read_slowly(BYSTANDER_PAUSE, patience, over)?;
        let ending = early.map_or_else(|| client.finish(patience), Ok)?;
        ensure!(ending == Ending::Whole, "its download ended otherwise: {ending}");
        if over() {
            return Ok(());
        }
    }
}
