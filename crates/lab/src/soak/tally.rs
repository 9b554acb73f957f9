//! Counts of what the clients saw. A *shortcut* is a response whose body bypasses tiers.

use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::connection::Step;
use super::disturbances::Disturbance;
use super::response::Response;
use crate::answer::Ending;
use crate::service::OFFER_MIN_LENGTH;

/// Counts from the beginning of the soak up to one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    pub(super) connections: u64,
    pub(super) aborted: u64,
    pub(super) responses: u64,
    pub(super) whole: u64,
    pub(super) bytes: u64,
    /// Number of responses whose body is long enough for a shortcut, however they ended. Aborted ones are included.
    pub(super) long: u64,
    pub(super) wrong: u64,
    pub(super) hangs: u64,
    /// Every response that was not whole, and the time when it ended.
    pub(super) broken: Vec<(Response, Instant)>,
}

/// Counts that the load writes and other threads read.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Counts>);

impl Tally {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self) {
        self.counts().connections += 1;
    }

    pub(super) fn note(&self, step: &Step) {
        let mut counts = self.counts();
        counts.aborted += u64::from(step.aborted.is_some());
        counts.long += u64::from(step.aborted.is_some_and(|size| size >= OFFER_MIN_LENGTH));
        for response in &step.done {
            counts.responses += 1;
            counts.bytes += response.body_bytes;
            counts.long += u64::from(response.size >= OFFER_MIN_LENGTH);
            match response.ending {
                Ending::Whole => {
                    counts.whole += 1;
                    continue;
                }
                Ending::Wrong(_) => counts.wrong += 1,
                Ending::Hang(_) => counts.hangs += 1,
                _ => {}
            }
            counts.broken.push((*response, Instant::now()));
        }
    }

    pub(super) fn now(&self) -> Counts {
        self.counts().clone()
    }
}

impl Counts {
    /// Describes the broken responses that no disturbance explains.
    pub(super) fn unexplained(&self, disturbances: &[Disturbance], start: Instant) -> Vec<String> {
        let unexplained = self
            .broken
            .iter()
            .filter(|(response, ended)| !disturbances.iter().any(|one| one.explains(response, *ended)));
        let words = unexplained.map(|(response, ended)| {
            let at = |time: Instant| time.duration_since(start).as_secs_f64();
            let mut words = format!(
                "{} of {} bytes by {}, asked for at {:.1} s, ended at {:.1} s",
                response.ending,
                response.size,
                response.way.prefix(),
                at(response.asked),
                at(*ended)
            );
            if let Some((way, asked)) = response.before {
                let _ = write!(words, ", after one by {} asked for at {:.1} s", way.prefix(), at(asked));
            }
            if let Some(last) = disturbances.iter().rev().find(|one| one.begin <= *ended) {
                let _ =
                    write!(words, "; {} was from {:.1} s to {:.1} s", last.fault.name(), at(last.begin), at(last.end));
            }
            words
        });
        words.collect()
    }
}
