//! `shunt-lab bench silence`: its arguments and its report.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use globset::Glob;
use serde::Serialize;
use shunt_sys::output;

use super::part::{Manner, Part};
use super::row::{self, Outcome};
use super::stores;
use super::table::page;
use crate::cli::ensure_use;
use crate::faults::{Bed, build_lab};
use crate::pace::Pace;
use crate::report::{Align, Machine, Paint, Progress, Table};

/// `shunt-lab bench silence`
#[derive(Debug, Args)]
pub struct Silence {
    /// Only the rows that match, such as `disk/*` or `holder-store/stopped`; may be repeated
    #[arg(long, value_name = "GLOB")]
    row: Vec<String>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print the table, as in docs/silence.md, and end
    #[arg(long)]
    pub(crate) expected: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    bench: &'static str,
    machine: Machine,
    rows: &'a [Outcome],
}

impl Silence {
    /// Runs the rows and prints the table. Returns `false` if anything was wrong.
    ///
    /// # Errors
    /// When no row matches, or the lab cannot be built.
    pub fn run(&self) -> Result<bool> {
        if self.expected {
            output::write(&page())?;
            return Ok(true);
        }
        let outcomes = run_rows(&choose(&self.row)?, Pace::Alone, &Progress::to_stderr())?;
        if let Some(file) = &self.json {
            let report = Report { bench: "silence", machine: Machine::this(), rows: &outcomes };
            let text = serde_json::to_string_pretty(&report)? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&show(&outcomes, Paint::of(&std::io::stdout())))?;
        Ok(outcomes.iter().all(Outcome::is_good))
    }
}

/// Runs rows one after another. Each begins on a service that works.
///
/// # Errors
/// When the lab cannot be built.
pub fn run_rows(rows: &[(Part, Manner)], pace: Pace, progress: &Progress) -> Result<Vec<Outcome>> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    while outcomes.len() < rows.len() {
        let lab = build_lab()?;
        let on_demand = rows[outcomes.len()].0.is_on_demand();
        let mut bed = if on_demand { stores::start(&lab)? } else { Bed::start(&lab)? };
        for (part, manner) in rows[outcomes.len()..].iter().take_while(|row| row.0.is_on_demand() == on_demand) {
            let outcome = row::run(&mut bed, *part, *manner, pace);
            let outcome =
                outcome.unwrap_or_else(|error| Outcome::broken(*part, *manner, &error, &bed.service.explain()));
            progress.done(&line(&outcome));
            let good = outcome.is_good();
            outcomes.push(outcome);
            if !good {
                // The next row gets a new lab, because this row may have left something behind.
                break;
            }
        }
    }
    Ok(outcomes)
}

fn line(outcome: &Outcome) -> String {
    let found = outcome.found.iter().map(|found| format!("\n         {found}")).collect::<String>();
    let Outcome { part, manner, under_way, asks, bystander_seconds, .. } = outcome;
    format!(
        "{part}/{manner}: in mid-payload {} after {:.1} s, asked then {} after {:.1} s, bystanders waited {:.2} s{found}",
        under_way.0, under_way.1, asks.0, asks.1, bystander_seconds
    )
}

fn show(outcomes: &[Outcome], paint: Paint) -> String {
    let heads = ["silent", "in mid-payload", "asked then", "bystanders' worst wait", "responses"];
    let mut table = Table::new(&heads.map(|head| (head, Align::Left)));
    for outcome in outcomes {
        let name = format!("{}/{}", outcome.part, outcome.manner);
        let end = |(ending, seconds): &(String, f64)| format!("{ending}, {seconds:.1} s");
        table.row([
            if outcome.is_good() { paint.good(&name) } else { paint.bad(&format!("{name} !")) },
            end(&outcome.under_way),
            end(&outcome.asks),
            format!("{:.2} s", outcome.bystander_seconds),
            outcome.bystander_responses.to_string(),
        ]);
    }
    let good = outcomes.iter().filter(|outcome| outcome.is_good()).count();
    format!("{}\n{good} of {} rows are as expected.\n", table.show(paint), outcomes.len())
}

/// Rows whose names match one of the globs; all rows if there is no glob.
fn choose(globs: &[String]) -> Result<Vec<(Part, Manner)>> {
    let all: Vec<_> = Part::ALL.into_iter().flat_map(|part| Manner::ALL.map(move |manner| (part, manner))).collect();
    if globs.is_empty() {
        return Ok(all);
    }
    let matchers =
        globs.iter().map(|glob| Ok(Glob::new(glob).with_context(|| format!("--row {glob}"))?.compile_matcher()));
    let matchers: Vec<_> = matchers.collect::<Result<_>>()?;
    let name = |(part, manner): &(Part, Manner)| format!("{}/{}", part.name(), manner.name());
    let chosen: Vec<_> =
        all.into_iter().filter(|row| matchers.iter().any(|matcher| matcher.is_match(name(row)))).collect();
    ensure_use(!chosen.is_empty(), || "no row matches; `shunt-lab bench silence --expected` shows them".to_owned())?;
    Ok(chosen)
}
