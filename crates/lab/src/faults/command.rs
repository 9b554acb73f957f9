//! `shunt-lab bench faults`: its arguments and its report.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use globset::Glob;
use serde::Serialize;
use shunt_sys::output;

use super::bed::{Bed, build_lab};
use super::cell::{self, Outcome};
use super::fault::Fault;
use super::step::Step;
use super::table;
use crate::cli::ensure_use;
use crate::pace::Pace;
use crate::report::{Align, Machine, Paint, Progress, Table};

/// `shunt-lab bench faults`
#[derive(Debug, Default, Args)]
pub struct Faults {
    /// Only the cells that match, such as `queued/*` or `*/backend-*`; may be repeated
    #[arg(long, value_name = "GLOB")]
    cell: Vec<String>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print the names of the cells, and end
    #[arg(long)]
    pub(crate) list: bool,
    /// Print the expected ends of the responses, as in docs/faults.md, and end
    #[arg(long)]
    pub(crate) expected: bool,
}

impl Faults {
    /// Runs the cells and prints the table. Returns `false` if anything was wrong.
    ///
    /// # Errors
    /// When no cell matches, or the lab cannot be built.
    pub fn run(&self) -> Result<bool> {
        let cells = choose(&self.cell)?;
        if self.list {
            let names = cells.iter().map(|(step, fault)| format!("{}/{}\n", step.name(), fault.name()));
            output::write(&names.collect::<String>())?;
            return Ok(true);
        }
        if self.expected {
            output::write(&table::page())?;
            return Ok(true);
        }
        let outcomes = run_cells(&cells, Pace::Alone, &Progress::to_stderr())?;
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&Report::of(&outcomes))? + "\n";
            std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        output::write(&show(&outcomes, Paint::of(&std::io::stdout())))?;
        Ok(outcomes.iter().all(Outcome::is_good))
    }
}

/// Contents of the `--json` file, in the form that every benchmark has.
#[derive(Serialize)]
struct Report<'a> {
    bench: &'static str,
    machine: Machine,
    cases: Vec<ReportedCell<'a>>,
}

#[derive(Serialize)]
struct ReportedCell<'a> {
    name: String,
    unit: &'static str,
    /// Seconds from the fault to the response's end.
    ours: f64,
    ratio: f64,
    runs: BTreeMap<&'static str, [f64; 1]>,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

impl<'a> Report<'a> {
    fn of(outcomes: &'a [Outcome]) -> Self {
        let cell = |outcome: &'a Outcome| {
            let (name, ours) = (format!("{}/{}", outcome.step, outcome.fault), outcome.seconds);
            ReportedCell { name, unit: "s", ours, ratio: ours, runs: BTreeMap::from([("ours", [ours])]), outcome }
        };
        Self { bench: "faults", machine: Machine::this(), cases: outcomes.iter().map(cell).collect() }
    }
}

/// Runs cells one after another. Each begins on a service that works.
///
/// # Errors
/// When the lab cannot be built.
pub fn run_cells(cells: &[(Step, Fault)], pace: Pace, progress: &Progress) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    while outcomes.len() < cells.len() {
        let lab = build_lab()?;
        let mut bed = Bed::start(&lab)?;
        for (step, fault) in &cells[outcomes.len()..] {
            let outcome = cell::run(&mut bed, *step, *fault, pace);
            let usable = outcome.is_ok();
            let outcome =
                outcome.unwrap_or_else(|error| Outcome::broken(*step, *fault, &error, &bed.service.explain()));
            progress.done(&line(&outcome));
            let good = outcome.is_good();
            outcomes.push(outcome);
            if !usable || !good {
                // The next cell gets a new lab, because this cell may have left something behind.
                break;
            }
        }
    }
    Ok(outcomes)
}

fn line(outcome: &Outcome) -> String {
    let found = outcome.faults_found.iter().map(|found| format!("\n         {found}")).collect::<String>();
    format!("{}/{}: {} after {:.1} s{found}", outcome.step, outcome.fault, outcome.ending, outcome.seconds)
}

/// Formats the table: a row per fault, a column per step.
fn show(outcomes: &[Outcome], paint: Paint) -> String {
    let heads: Vec<(&str, Align)> =
        [("fault", Align::Left)].into_iter().chain(Step::ALL.map(|step| (step.name(), Align::Left))).collect();
    let mut table = Table::new(&heads);
    for fault in Fault::ALL {
        let cell = |step: Step| {
            let outcome = outcomes.iter().find(|one| one.step == step.name() && one.fault == fault.name())?;
            let text = format!("{} {:.1} s", outcome.short_ending(), outcome.seconds);
            Some(if outcome.is_good() { paint.good(&text) } else { paint.bad(&format!("{text} !")) })
        };
        let cells: Vec<Option<String>> = Step::ALL.into_iter().map(cell).collect();
        if cells.iter().any(Option::is_some) {
            table.row([fault.name().to_owned()].into_iter().chain(cells.into_iter().map(Option::unwrap_or_default)));
        }
    }
    let good = outcomes.iter().filter(|outcome| outcome.is_good()).count();
    format!("{}\n{good} of {} cells are as expected.\n", table.show(paint), outcomes.len())
}

/// Cells whose names match one of the globs; all cells if there is no glob.
fn choose(globs: &[String]) -> Result<Vec<(Step, Fault)>> {
    let all: Vec<(Step, Fault)> =
        Fault::ALL.into_iter().flat_map(|fault| Step::ALL.map(move |step| (step, fault))).collect();
    if globs.is_empty() {
        return Ok(all);
    }
    let name = |(step, fault): &(Step, Fault)| format!("{}/{}", step.name(), fault.name());
    let mut chosen = Vec::new();
    for glob in globs {
        let matcher = Glob::new(glob).with_context(|| format!("--cell {glob}"))?.compile_matcher();
        let before = chosen.len();
        chosen.extend(all.iter().filter(|cell| matcher.is_match(name(cell))).copied());
        ensure_use(chosen.len() > before, || {
            format!("no cell matches {glob:?}; `shunt-lab bench faults --list` shows them")
        })?;
    }
    Ok(chosen)
}
