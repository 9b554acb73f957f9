//! Many downloads, during each of which a backend is lost at a random byte.

use std::time::Duration;

use anyhow::Result;

use super::{BODY_BYTES, Failover, How, Loss};
use crate::pace::Pace;
use crate::random::{self, Random};
use crate::report::Progress;

/// Longest delay that a loss may cause for a client, in total (the project's target).
pub const BOUND: Duration = Duration::from_secs(2);

/// Number of downloads that give the time without a loss.
const UNDISTURBED: u32 = 3;
/// On average, one in this many downloads loses its backend at byte 0, as soon as the download begins.
const BEFORE_HEADER: u64 = 10;

/// One download, during which a backend is lost.
#[derive(Debug)]
pub struct Round {
    pub loss: Loss,
    /// `Err`: why the download is not whole.
    pub outcome: Result<Whole, String>,
}

/// A download that is whole.
#[derive(Debug, Clone, Copy)]
pub struct Whole {
    pub elapsed: Duration,
    pub longest_pause: Duration,
    /// Number of times that another backend continued. It is 0 if the lost backend's kernel already had the rest of the
    /// body and sent it. It is also 0 if the lost backend had not begun to send the body.
    pub failovers: u64,
}

/// Results of all downloads.
#[derive(Debug)]
pub struct Rounds {
    pub seed: u64,
    /// Longest of the downloads without a loss.
    pub undisturbed: Duration,
    pub rounds: Vec<Round>,
}

impl Rounds {
    /// Runs `count` downloads, during each of which a backend is lost. The kinds of loss in `hows` take turns. Brings
    /// the lost backend back after each download.
    ///
    /// # Errors
    /// When the service cannot be brought back. A download that is not whole is no error.
    pub fn run(failover: &mut Failover<'_>, count: u64, hows: &[How], seed: u64, progress: &Progress) -> Result<Self> {
        let undisturbed = failover.undisturbed(UNDISTURBED)?;
        let mut rounds = Vec::new();
        for (number, how) in (0..count).zip(hows.iter().cycle()) {
            let mut random = Random::new(seed, number);
            let early = random.next().is_multiple_of(BEFORE_HEADER);
            let at = if early { 0 } else { (random.part() * BODY_BYTES as f64) as u64 };
            let loss = Loss { at, how: *how };
            progress.step(&format!("download {} of {count}: {how} at byte {at}", number + 1));
            let (outcome, lost) = failover.try_download(&[loss]);
            let outcome = outcome.map_err(|error| format!("{error:#}")).map(|download| Whole {
                elapsed: download.fetched.elapsed,
                longest_pause: download.fetched.longest_pause,
                failovers: download.failovers,
            });
            rounds.push(Round { loss, outcome });
            failover.bring_back(&lost, *how)?;
        }
        Ok(Self { seed, undisturbed, rounds })
    }

    /// Seed for [`Self::run`]: the environment's `SHUNT_SEED`, or a new one. Prints it.
    #[must_use]
    pub fn seed() -> u64 {
        let seed = random::seed_or_random(None);
        eprintln!("SHUNT_SEED={seed}");
        seed
    }

    /// Downloads that are whole.
    pub fn whole(&self) -> impl Iterator<Item = Whole> {
        self.rounds.iter().filter_map(|round| round.outcome.as_ref().ok().copied())
    }

    /// Faults of all downloads, one sentence each.
    #[must_use]
    pub fn faults(&self, pace: Pace) -> Vec<String> {
        let slow = |whole: &Whole| whole.elapsed > pace.bound(self.undisturbed + BOUND);
        let fault = |(number, round): (usize, &Round)| {
            let Loss { at, how } = round.loss;
            let what = match &round.outcome {
                Err(error) => format!("is not whole: {error}"),
                Ok(whole) if slow(whole) => format!("took {:.2} s", whole.elapsed.as_secs_f64()),
                Ok(_) => return None,
            };
            let (number, seed) = (number + 1, self.seed);
            Some(format!("download {number}, whose backend was {how} at byte {at} (SHUNT_SEED={seed}), {what}"))
        };
        self.rounds.iter().enumerate().filter_map(fault).collect()
    }
}
