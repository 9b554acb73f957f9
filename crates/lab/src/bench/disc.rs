//! `shunt-lab bench disc`: builds a *bed* for each *shape*, and measures the shape's cases in this bed. A shape is a
//! number of intermediates and a kind of links; a bed is the labs of all services that are compared.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use clap::Args;

use super::bed::{Plan, with_bed};
use super::case::{Case, Shape};
use super::choice::{Choice, once};
use super::limit::Limits;
use super::outcome::{CaseOutcome, Outcome};
use super::rounds::CONNECTIONS;
use super::runs::{self, Runner};
use super::subject::Subject;
use super::{profile, show, wan};
use crate::report::Progress;
use crate::service::Options;

/// `shunt-lab bench disc`
#[derive(Debug, Default, Args)]
pub struct Disc {
    #[command(flatten)]
    pub(super) choice: Choice,
    /// Least length of an offered body in bytes, instead of the module's default
    #[arg(long, value_name = "BYTES")]
    pub(super) offer_min: Option<u64>,
    /// Measure plain nginx against itself, to see the noise
    #[arg(long, conflicts_with = "offer_min")]
    pub(super) against_itself: bool,
}

impl Disc {
    pub(super) fn run(&self) -> Result<()> {
        self.choice.run(|case| self.profile(case), |cases| self.measure(cases))
    }

    fn ours(&self) -> Options {
        Options { shunt: !self.against_itself, offer_min: self.offer_min, ..Options::default() }
    }

    fn profile(&self, case: Case) -> Result<()> {
        let shape = case
            .shape()
            .context("a download over a long link spends its time on the link: choose another case to profile")?;
        profile::run(case, Plan::of(shape, self.ours()), |bed, side, time| {
            bed.place(&Runner::placement(bed, case)?)?;
            runs::load(bed, case, side, CONNECTIONS, time)
        })
    }

    /// Measures every case that the arguments choose.
    pub(super) fn measure_all(&self) -> Result<Outcome> {
        self.measure(&self.choice.cases()?)
    }

    fn measure(&self, cases: &[Case]) -> Result<Outcome> {
        let (effort, ours) = (self.choice.effort(), self.ours());
        let progress = Progress::to_stderr();
        let mut runner = Runner { effort, limits: Limits::default() };
        let mut measured: Vec<CaseOutcome> = Vec::new();
        let mut backgrounds = BTreeMap::new();
        for shape in shapes(cases) {
            let of_shape: Vec<Case> = cases.iter().copied().filter(|case| case.shape() == Some(shape)).collect();
            progress.step(&format!("building labs: {shape}"));
            let haproxy = of_shape.iter().any(|case| matches!(case, Case::Cpu { .. }) && effort.haproxy(*case));
            with_bed(Plan { haproxy, background: effort.background(), ..Plan::of(shape, ours) }, |bed| {
                backgrounds.insert(shape.to_string(), bed.background().0);
                for (at, case) in of_shape.iter().enumerate() {
                    let name = case.name();
                    if measured.iter().any(|outcome| outcome.name == name) {
                        continue;
                    }
                    progress.step(&format!("{name} ({} of {})", measured.len() + 1, cases.len()));
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
        let order = |outcome: &CaseOutcome| cases.iter().position(|case| case.name() == outcome.name);
        measured.sort_by_key(order);
        Ok(Outcome::new("disc", self.choice.quick, backgrounds, measured))
    }
}

/// Shapes of the cases, each once, in the order of the cases. Cases without a shape are left out.
fn shapes(cases: &[Case]) -> Vec<Shape> {
    once(cases.iter().filter_map(|case| case.shape()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shape_is_built_once() {
        assert_eq!(shapes(&Case::all()).len(), 6);
    }
}
