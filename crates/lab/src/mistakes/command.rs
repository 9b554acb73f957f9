//! `shunt-lab bench mistakes`: its arguments and its report.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use clap::Args;
use globset::Glob;
use serde::Serialize;
use shunt_sys::output;

use super::run::{Outcome, run};
use super::{KNOWN, Mistake, all, page};
use crate::cli::ensure_use;
use crate::report::{Align, Machine, Paint, Progress, Table};

/// Number of labs that run at the same time. A lab with a mistake mostly waits, so it needs little of the machine.
const AT_ONCE: usize = 4;

/// `shunt-lab bench mistakes`
#[derive(Debug, Args)]
pub struct Mistakes {
    /// Only the rows that match, such as `certificate-*`; may be repeated
    #[arg(long, value_name = "GLOB")]
    row: Vec<String>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print the table, as in docs/mistakes.md, and end
    #[arg(long)]
    pub(crate) expected: bool,
}

impl Mistakes {
    /// Makes the mistakes and prints the effect of each. Returns `false` if one was not as expected.
    ///
    /// # Errors
    /// When no row matches, or the file cannot be written.
    pub fn run(&self) -> Result<bool> {
        if self.expected {
            output::write(&format!("{}\n{}", page(), super::page::not_yet()))?;
            return Ok(true);
        }
        let outcomes = run_all(&choose(&self.row)?, &Progress::to_stderr());
        if let Some(file) = &self.json {
            let report = Report { bench: "mistakes", machine: Machine::this(), rows: &outcomes };
            let text = serde_json::to_string_pretty(&report)? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&show(&outcomes, Paint::of(&std::io::stdout())))?;
        Ok(outcomes.iter().all(Outcome::is_good))
    }
}

#[derive(Serialize)]
struct Report<'a> {
    bench: &'static str,
    machine: Machine,
    rows: &'a [Outcome],
}

/// Makes mistakes, [`AT_ONCE`] at the same time, each in a separate lab. The outcomes are in the order of the rows.
#[must_use]
pub fn run_all(rows: &[Mistake], progress: &Progress) -> Vec<Outcome> {
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(rows.len()) {
            scope.spawn(|| {
                while let Some((at, row)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, rows.get(at)?)))
                {
                    let outcome = run(row);
                    progress.done(&line(&outcome));
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((at, outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|(at, _)| *at);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn line(outcome: &Outcome) -> String {
    let found = outcome.found.iter().map(|found| format!("\n         {found}")).collect::<String>();
    let message = outcome.message.as_ref().map(|message| format!("\n         {message}")).unwrap_or_default();
    let Outcome { name, responses, whole, shortcuts, seconds, .. } = outcome;
    format!("{name}: {whole} of {responses} whole, {shortcuts} shortcuts, {seconds:.1} s at most{message}{found}")
}

fn show(outcomes: &[Outcome], paint: Paint) -> String {
    let heads = [
        ("mistake", Align::Left),
        ("whole", Align::Right),
        ("shortcuts", Align::Right),
        ("slowest", Align::Right),
        ("message or what is wrong", Align::Left),
    ];
    let mut table = Table::new(&heads);
    for outcome in outcomes {
        let words = match outcome.found.first() {
            Some(found) => paint.bad(found),
            None => outcome.message.clone().unwrap_or_default(),
        };
        let known = if KNOWN.iter().any(|known| known.name == outcome.name) { " (known)" } else { "" };
        table.row([
            format!("{}{known}", outcome.name),
            format!("{}/{}", outcome.whole, outcome.responses),
            outcome.shortcuts.to_string(),
            format!("{:.1} s", outcome.seconds),
            words,
        ]);
    }
    let good = outcomes.iter().filter(|outcome| outcome.is_good()).count();
    format!("{}\n{good} of {} rows are as expected.\n", table.show(paint), outcomes.len())
}

fn choose(globs: &[String]) -> Result<Vec<Mistake>> {
    if globs.is_empty() {
        return Ok(all());
    }
    let matchers =
        globs.iter().map(|glob| Ok(Glob::new(glob).with_context(|| format!("--row {glob}"))?.compile_matcher()));
    let matchers: Vec<_> = matchers.collect::<Result<_>>()?;
    let rows: Vec<Mistake> =
        all().into_iter().filter(|row| matchers.iter().any(|matcher| matcher.is_match(row.name))).collect();
    ensure_use(!rows.is_empty(), || "no row matches; `shunt-lab bench mistakes --expected` shows them".to_owned())?;
    Ok(rows)
}
