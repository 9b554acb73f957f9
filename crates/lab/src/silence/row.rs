//! One row: two clients that need the part of the service that falls silent, *bystanders* (clients that do not need
//! it), and the silence. A *payload* is the body of a response.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;

use super::bystander::{Seen, stand_by};
use super::part::{Manner, Part, Switch};
use super::table::{BYSTANDER_BOUND, expected};
use crate::answer::Ending;
use crate::faults::{Bed, Client, LONG_FILE, QUEUED_FILE};
use crate::pace::Pace;

/// Duration of the silence. It is longer than the table's bound for each client that must not wait for the silence's
/// end.
pub(super) const SILENCE: Duration = Duration::from_secs(8);
/// Times for which a slow part is silent and then works, again and again.
const TURNS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(20));
/// Time from the beginning of the silence to the request of the second client.
const ASKS_AFTER: Duration = Duration::from_millis(300);
/// Number of further clients that send requests during the silence, if a part of a service under `shunt run` is slow. A
/// program that waited for each of them would serve nobody else.
const CROWD: usize = 8;
/// Longest wait for the end of a response.
const PATIENCE: Duration = Duration::from_secs(40);
/// Receive buffer of the client in mid-payload, in bytes. It is small, so that most of the payload is not sent when the
/// silence begins.
const RECEIVE_BUFFER: usize = 32 << 10;
const READ_BYTES: u64 = 256 << 10;

/// Results of a row.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    pub part: &'static str,
    pub manner: &'static str,
    /// Ending of the response that was in mid-payload, and the seconds from the beginning of the silence to this
    /// ending.
    pub under_way: (String, f64),
    /// Ending of the response that was asked for during the silence, and the seconds from its request to this ending.
    pub asks: (String, f64),
    /// Longest wait of a bystander, for a connection or for its next byte, in seconds.
    pub bystander_seconds: f64,
    /// Number of responses that the bystanders got.
    pub bystander_responses: u64,
    /// Everything that is not as expected, in words.
    pub found: Vec<String>,
}

impl Outcome {
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.found.is_empty()
    }

    pub(super) fn broken(part: Part, manner: Manner, error: &anyhow::Error, explained: &str) -> Self {
        Self {
            part: part.name(),
            manner: manner.name(),
            under_way: (String::new(), 0.0),
            asks: (String::new(), 0.0),
            bystander_seconds: 0.0,
            bystander_responses: 0,
            found: vec![format!("{error:#}{explained}")],
        }
    }
}

/// Runs a row on a service that works. Afterwards, waits until the service works again.
pub(super) fn run(bed: &mut Bed<'_>, part: Part, manner: Manner, pace: Pace) -> Result<Outcome> {
    let (client, server, prefix) = (bed.lab().client(), bed.server(), part.prefix());
    if part == Part::Disk {
        bed.disk()?;
    }
    bed.warm()?;
    let switch = Switch::of(part, manner, bed)?;
    let mut under_way = Client::connect(client, server, Some(RECEIVE_BUFFER))?;
    under_way.ask(&format!("{prefix}{}", LONG_FILE.0), LONG_FILE.0, LONG_FILE.1);
    under_way.read_until(READ_BYTES, PATIENCE)?;
    let over = AtomicBool::new(false);
    let (ends, bystanders) = std::thread::scope(|scope| {
        let over = &over;
        let by = |way: &'static str| scope.spawn(move || stand_by(client, server, way, over));
        let bystanders: Vec<_> = part.bystanders(manner).iter().map(|way| by(way)).collect();
        let crowd = if part.is_on_demand() && manner == Manner::Slow { CROWD } else { 0 };
        let ends = concerned(&switch, manner, under_way, crowd, || {
            let asks = Client::connect(client, server, None)?;
            Ok((asks, format!("{prefix}{}", QUEUED_FILE.0)))
        });
        over.store(true, Ordering::Relaxed);
        (ends, bystanders.into_iter().map(|one| one.join()).collect::<Vec<_>>())
    });
    let (under_way, asks) = ends?;
    let mut found = Vec::new();
    let expected = expected(part, manner);
    found.extend(expected.under_way.objection("in mid-payload", under_way.0, under_way.1, pace));
    found.extend(expected.asks.objection("asked then", asks.0, asks.1, pace));
    let mut all = Seen::default();
    for (way, seen) in part.bystanders(manner).iter().zip(bystanders) {
        match seen {
            Ok(Ok(seen)) => {
                all.responses += seen.responses;
                all.worst = all.worst.max(seen.worst);
                if seen.worst > pace.bound(BYSTANDER_BOUND) {
                    found.push(format!("a bystander ({way}) waited {:.2?}", seen.worst));
                }
            }
            Ok(Err(error)) => found.push(format!("a bystander ({way}): {error:#}")),
            Err(_) => bail!("a bystander panicked"),
        }
    }
    bed.recover().context("after the silence")?;
    let named = |(ending, seconds): (Ending, f64)| (ending.to_string(), seconds);
    Ok(Outcome {
        part: part.name(),
        manner: manner.name(),
        under_way: named(under_way),
        asks: named(asks),
        bystander_seconds: all.worst.as_secs_f64(),
        bystander_responses: all.responses,
        found,
    })
}

type End = (Ending, f64);

/// Makes the part silent while one client (`under_way`) is in mid-payload. A second client sends its request during the
/// silence, and so do `crowd` others. Returns how the first two responses ended. The others' responses may end in any
/// way, but not with a wrong byte, and they may not hang.
fn concerned(
    switch: &Switch<'_>,
    manner: Manner,
    mut under_way: Client,
    crowd: usize,
    ask: impl Fn() -> Result<(Client, String)> + Sync,
) -> Result<(End, End)> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let silent = scope.spawn(move || keep_silent(switch, manner));
        let first =
            scope.spawn(move || Ok::<_, anyhow::Error>((under_way.finish(PATIENCE)?, begin.elapsed().as_secs_f64())));
        std::thread::sleep(ASKS_AFTER);
        let asks = || {
            let begin = Instant::now();
            let (mut client, path) = ask()?;
            client.ask(&path, QUEUED_FILE.0, QUEUED_FILE.1);
            Ok::<_, anyhow::Error>((client.finish(PATIENCE)?, begin.elapsed().as_secs_f64()))
        };
        let second = scope.spawn(asks);
        let others: Vec<_> = (0..crowd).map(|_| scope.spawn(asks)).collect();
        for other in others {
            let (ending, seconds) =
                other.join().map_err(|_| anyhow!("a client panicked"))?.context("another client")?;
            ensure!(
                !matches!(ending, Ending::Wrong(_) | Ending::Hang(_)),
                "another client: {ending} after {seconds:.1} s"
            );
        }
        match (first.join(), second.join(), silent.join()) {
            (Ok(first), Ok(second), Ok(silent)) => {
                silent.context("making it silent")?;
                Ok((first?, second?))
            }
            _ => bail!("a client panicked"),
        }
    })
}

/// Makes the part silent for [`SILENCE`]. Ends the silence in any case.
fn keep_silent(switch: &Switch<'_>, manner: Manner) -> Result<()> {
    let end = Instant::now() + SILENCE;
    let quiet = || -> Result<()> {
        if manner != Manner::Slow || switch.is_slow() {
            switch.silence(true)?;
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            return Ok(());
        }
        while Instant::now() < end {
            switch.silence(true)?;
            std::thread::sleep(TURNS.0);
            switch.silence(false)?;
            std::thread::sleep(TURNS.1);
        }
        // The part is made silent once more, because the last statement of this function ends the silence. Ending a
        // silence may fail if there is none.
        switch.silence(true)
    };
    let quiet = quiet();
    switch.silence(false).and(quiet)
}
