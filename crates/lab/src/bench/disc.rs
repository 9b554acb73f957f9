//! `shunt bench disc`: chooses the cases, builds a bed for each shape, and writes what was found.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use globset::Glob;

use super::bed::{Plan, with_bed};
use super::case::{Case, Shape};
use super::effort::Effort;
use super::limit::Limits;
use super::outcome::{CaseOutcome, Machine, Outcome, targets};
use super::runs::Runner;
use super::{page, profile, show, wan};
use crate::report::{Paint, Progress};
use crate::service::Options;

/// `shunt bench disc`
#[derive(Debug, Default, Args)]
pub struct Disc {
    /// Fewer and shorter runs: every case within 3 minutes
    #[arg(long)]
    pub(super) quick: bool,
    /// Only the cases whose names match, such as `cpu/2is/*` or `p99/*`; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(super) case: Vec<String>,
    /// Write the figures
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write a page with tables and plots
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Print the names of the cases and their targets, and end
    #[arg(long)]
    pub(super) list: bool,
    /// Load ours for one case under perf, and print where the measured core's time goes
    #[arg(long, value_name = "CASE", conflicts_with_all = ["case", "json", "html", "quick"])]
    pub(super) profile: Option<String>,
    /// Offer bodies from this many bytes on, instead of the module's default
    #[arg(long, value_name = "BYTES")]
    pub(super) offer_min: Option<u64>,
    /// Measure plain nginx against itself: what differs then is noise
    #[arg(long, conflicts_with = "offer_min")]
    pub(super) against_itself: bool,
}

impl Disc {
    pub(super) fn run(&self) -> Result<()> {
        let cases = choose(&self.case)?;
        if self.list {
            print!("{}", show::list(&cases, Paint::of(&std::io::stdout())));
            return Ok(());
        }
        ensure!(
            std::thread::available_parallelism()?.get() > 1,
            "the benchmark needs two cores: one for the service, one for its clients"
        );
        let ours = Options { shunt: !self.against_itself, offer_min: self.offer_min, ..Options::default() };
        if let Some(name) = &self.profile {
            let case = Case::parse(name).with_context(|| format!("no case {name:?}; --list shows them"))?;
            return profile::run(case, ours);
        }
        // Before minutes of measuring, not after.
        for file in [&self.json, &self.html].into_iter().flatten() {
            write(file, "")?;
        }
        let outcome = self.measure(&cases, ours)?;
        print!("{}", show::table(&outcome, Paint::of(&std::io::stdout())));
        if let Some(file) = &self.json {
            write(file, &(serde_json::to_string_pretty(&outcome)? + "\n"))?;
        }
        if let Some(file) = &self.html {
            write(file, &page::page(&outcome).html())?;
        }
        for file in [&self.json, &self.html].into_iter().flatten() {
            println!("Written: {}", file.display());
        }
        Ok(())
    }

    fn measure(&self, cases: &[Case], ours: Options) -> Result<Outcome> {
        let effort = if self.quick { Effort::Quick } else { Effort::Full };
        let progress = Progress::to_stderr();
        let mut runner = Runner { effort, limits: Limits::default() };
        let mut measured: Vec<CaseOutcome> = Vec::new();
        let mut backgrounds = BTreeMap::new();
        for shape in shapes(cases) {
            let of_shape: Vec<Case> = cases.iter().copied().filter(|case| case.shape() == Some(shape)).collect();
            progress.step(&format!("building labs: {shape}"));
            let haproxy = of_shape.iter().any(|case| matches!(case, Case::Cpu { .. }) && effort.haproxy(*case));
            with_bed(Plan { shape, ours, haproxy, background: effort.background() }, |bed| {
                backgrounds.insert(shape.to_string(), bed.background().0);
                for (at, case) in of_shape.iter().enumerate() {
                    if measured.iter().any(|outcome| outcome.case == *case) {
                        continue;
                    }
                    progress.step(&format!("{} ({} of {})", case.name(), measured.len() + 1, cases.len()));
                    let outcomes = runner.measure(bed, &of_shape[at..])?;
                    outcomes.iter().for_each(|outcome| progress.done(&show::line(outcome)));
                    measured.extend(outcomes);
                }
                bed.check_running()
            })
            .with_context(|| shape.to_string())?;
        }
        for outcome in wan::measure(cases, ours, effort, &progress)? {
            progress.done(&show::line(&outcome));
            measured.push(outcome);
        }
        progress.clear();
        let order = |outcome: &CaseOutcome| cases.iter().position(|case| *case == outcome.case);
        measured.sort_by_key(order);
        let targets = targets(&measured);
        let machine = Machine::this();
        Ok(Outcome { bench: "disc", machine, quick: self.quick, background: backgrounds, cases: measured, targets })
    }
}

/// The cases that match one of the globs; all where there is none.
fn choose(globs: &[String]) -> Result<Vec<Case>> {
    let matchers = globs.iter().map(|glob| {
        let matcher = Glob::new(glob).with_context(|| format!("--case {glob}"))?.compile_matcher();
        ensure!(
            Case::all().into_iter().any(|case| matcher.is_match(case.name())),
            "no case matches {glob:?}; `shunt bench disc --list` shows them"
        );
        Ok(matcher)
    });
    let matchers = matchers.collect::<Result<Vec<_>>>()?;
    let wanted = |case: &Case| matchers.is_empty() || matchers.iter().any(|matcher| matcher.is_match(case.name()));
    Ok(Case::all().into_iter().filter(wanted).collect())
}

/// Each shape once, in the order of the cases.
fn shapes(cases: &[Case]) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for shape in cases.iter().filter_map(|case| case.shape()) {
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

fn write(file: &Path, text: &str) -> Result<()> {
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(globs: &[&str]) -> Vec<String> {
        let globs: Vec<String> = globs.iter().map(|glob| (*glob).to_owned()).collect();
        choose(&globs).unwrap().into_iter().map(Case::name).collect()
    }

    #[test]
    fn globs_choose_cases_across_slashes() {
        assert_eq!(chosen(&[]).len(), Case::all().len());
        assert_eq!(chosen(&["cpu/*"]).len(), 24);
        assert_eq!(chosen(&["cpu/{0,2}is/64k/*"]).len(), 4);
        assert_eq!(chosen(&["idle*", "p99/64k"]), ["p99/64k", "idle/1k", "idle-p999/1k"]);
    }

    #[test]
    fn a_glob_that_matches_nothing_is_a_mistake() {
        assert!(choose(&["cpu/9is/*".to_owned()]).unwrap_err().to_string().contains("--list"));
        assert!(choose(&["[".to_owned()]).is_err());
    }

    #[test]
    fn each_shape_is_built_once() {
        assert_eq!(shapes(&Case::all()).len(), 6);
    }
}
