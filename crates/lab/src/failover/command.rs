//! `shunt-lab bench failover`: its arguments and its report.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde_json::json;
use shunt_sys::output;

use super::rounds::{BOUND, Rounds, Whole};
use super::{Failover, How};
use crate::lab::Lab;
use crate::pace::Pace;
use crate::report::{Paint, Progress};
use crate::wire::Wire;

/// Number of backends: one to lose, and one that continues.
const BACKENDS: u8 = 2;

/// `shunt-lab bench failover`
#[derive(Debug, Args)]
pub struct FailoverBench {
    /// Number of downloads
    #[arg(long, default_value_t = 100)]
    downloads: u64,
    /// How the backend is lost: `kill` kills its server and agent, `cut-off` disconnects its machine, `both` alternates
    #[arg(long, value_enum, default_value_t)]
    how: Hows,
    /// Intermediate hosts between the frontend and the backends
    #[arg(long, default_value_t = 0)]
    intermediates: u8,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Hows {
    #[default]
    Kill,
    CutOff,
    Both,
}

impl FailoverBench {
    /// Runs the downloads and prints the results. Returns `false` if one was not whole or took too long.
    ///
    /// # Errors
    /// When something cannot be started.
    pub fn run(&self) -> Result<bool> {
        let progress = Progress::to_stderr();
        let seed = Rounds::seed();
        let lab = Lab::builder().backends(BACKENDS).intermediates(self.intermediates).wire(Wire::Mtu).build()?;
        let mut failover = Failover::start(&lab)?;
        let hows: &[How] = match self.how {
            Hows::Kill => &[How::Kill],
            Hows::CutOff => &[How::CutOff],
            Hows::Both => &[How::Kill, How::CutOff],
        };
        let rounds = Rounds::run(&mut failover, self.downloads, hows, seed, &progress)?;
        progress.clear();
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&json(&rounds))?;
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&show(&rounds, Paint::of(&std::io::stdout())))?;
        Ok(rounds.faults(Pace::Alone).is_empty())
    }
}

/// Median and maximum of one time (`of`) over the downloads that are whole, in seconds.
fn spread(rounds: &Rounds, of: fn(&Whole) -> Duration) -> (f64, f64) {
    let mut all: Vec<f64> = rounds.whole().map(|whole| of(&whole).as_secs_f64()).collect();
    all.sort_by(f64::total_cmp);
    (all.get(all.len() / 2).copied().unwrap_or_default(), all.last().copied().unwrap_or_default())
}

fn show(rounds: &Rounds, paint: Paint) -> String {
    let (count, faults) = (rounds.rounds.len(), rounds.faults(Pace::Alone));
    let moved = rounds.whole().filter(|whole| whole.failovers > 0).count();
    let ((time, most_time), (pause, most_pause)) =
        (spread(rounds, |whole| whole.elapsed), spread(rounds, |whole| whole.longest_pause));
    let mut text = format!(
        "{} of {count} downloads are whole; another backend continued {moved} of them\ntime      median {time:.2} s, \
         at most {most_time:.2} s; without a loss {:.2} s\npause     median {pause:.2} s, at most {most_pause:.2} s\n",
        rounds.whole().count(),
        rounds.undisturbed.as_secs_f64(),
    );
    for fault in &faults {
        text.push_str(&format!("{}\n", paint.bad(fault)));
    }
    let bound = BOUND.as_secs();
    let verdict = match faults.len() {
        0 => paint.good(&format!("All are whole, and none took {bound} s longer than without a loss.")),
        wrong => paint.bad(&format!("{wrong} are not whole, or took {bound} s longer than without a loss.")),
    };
    text + &verdict + "\n"
}

fn json(rounds: &Rounds) -> serde_json::Value {
    let whole = rounds.whole().count();
    let (_, most_time) = spread(rounds, |whole| whole.elapsed);
    let (pause, most_pause) = spread(rounds, |whole| whole.longest_pause);
    let case = |name: &str, unit: &str, ours: f64, baseline: f64| {
        json!({"name": name, "unit": unit, "ours": ours, "baseline": baseline,
               "ratio": if baseline > 0.0 { ours / baseline } else { ours }, "runs": rounds.rounds.len()})
    };
    json!({
        "bench": "failover",
        "seed": rounds.seed,
        "cases": [
            case("failover/whole", "downloads", whole as f64, rounds.rounds.len() as f64),
            case("failover/longest", "s", most_time, rounds.undisturbed.as_secs_f64()),
            case("failover/pause-median", "s", pause, 0.0),
            case("failover/pause-longest", "s", most_pause, 0.0),
        ],
        "faults": rounds.faults(Pace::Alone),
    })
}
