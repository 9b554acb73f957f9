//! `shunt-lab bench attack`: attacks two services in turns, nginx with Shunt and plain nginx, and gives the verdict. A
//! *shortcut* is a response whose body bypasses tiers.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use shunt_sys::output;

use super::outcome::Outcome;
use super::side::{Side, Turn, build_lab};
use crate::cli::ensure_use;
use crate::random::seed_or_random;
use crate::report::{Paint, Progress};

/// Time that one service is under attack before the other has its turn.
const TURN: Duration = Duration::from_secs(10);

/// `shunt-lab bench attack`
#[derive(Debug, Args)]
pub struct Attack {
    /// Minutes of both services together
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Seed of everything random; without one, a random seed, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Attack {
    /// Attacks both services and prints the results. Returns `false` if anything was wrong.
    ///
    /// # Errors
    /// When a service cannot be started, or the file cannot be written.
    pub fn run(&self) -> Result<bool> {
        let seed = seed_or_random(self.seed);
        eprintln!("seed {seed}: --seed {seed} draws the same packets, frames and requests");
        let outcome = attack(self.minutes, seed, &Progress::to_stderr())?;
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&outcome)? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&outcome.show(Paint::of(&std::io::stdout())))?;
        Ok(outcome.wrong.is_empty())
    }
}

/// Attacks both services in turns, for `minutes` in total.
fn attack(minutes: f64, seed: u64, progress: &Progress) -> Result<Outcome> {
    ensure_use(minutes > 0.0, || format!("--minutes {minutes}: write a number above 0"))?;
    let labs = (build_lab(seed)?, build_lab(seed)?);
    let (ours, plain) = (Side::start(&labs.0, true)?, Side::start(&labs.1, false)?);
    let pairs = ((minutes * 60.0 / (2.0 * TURN.as_secs_f64())).round() as u64).max(1);
    let (shortcuts, mut turns) = (ours.shortcuts()?, Vec::new());
    for pair in 0..pairs {
        // Both services get the same seed. Random choices differ only where they depend on a service's answers.
        let seed = seed.wrapping_add(pair);
        let pair_of = (ours.turn(TURN, seed)?, plain.turn(TURN, seed)?);
        progress.step(&line(pair + 1, pairs, &pair_of));
        turns.push(pair_of);
    }
    progress.clear();
    let ended = [ours.ended()?, plain.ended()?];
    // If the frontend's agent (Shunt's daemon) has ended, its counters are lost. The number of shortcuts is then 0.
    let shortcuts = ours.shortcuts().unwrap_or(shortcuts).saturating_sub(shortcuts);
    let mut outcome = Outcome::of(seed, minutes, &turns, &ended, shortcuts);
    if !outcome.wrong.is_empty() {
        outcome.explained = ours.service.explain();
    }
    Ok(outcome)
}

fn line(number: u64, of: u64, (ours, plain): &(Turn, Turn)) -> String {
    let p99 = |turn: &Turn| turn.seen.latency_ns.value_at_quantile(0.99) as f64 / 1e6;
    format!(
        "{number} of {of}: p99 {:.1} ms, plain {:.1} ms; {} responses, {} wrong, plain {}, {}; \
         drawn per byte received {:.3}, plain {:.3}",
        p99(ours),
        p99(plain),
        ours.seen.responses,
        ours.seen.wrong.len(),
        plain.seen.responses,
        plain.seen.wrong.len(),
        ours.drawn_per_received(),
        plain.drawn_per_received(),
    )
}
