//! Measures cases one after another. The cases of one kind are measured in the same bed (labs with all services).

use std::collections::BTreeMap;
use std::fmt::Display;

use anyhow::{Context, Result};

use super::bed::{Bed, Plan, with_bed};
use super::choice::{Choice, once};
use super::outcome::{CaseOutcome, Outcome};
use super::show;
use super::subject::Subject;
use crate::report::Progress;

/// Measures the cases of a benchmark. Cases of one `kind` share a bed. The `plan` of the first of these cases describes
/// the bed.
pub(super) fn measure<C: Subject, K: PartialEq + Copy + Display>(
    bench: &'static str,
    choice: &Choice,
    cases: &[C],
    kind: impl Fn(C) -> K,
    plan: impl Fn(C) -> Plan,
    measure: impl Fn(&Bed<'_>, C) -> Result<CaseOutcome>,
) -> Result<Outcome> {
    let progress = Progress::to_stderr();
    let (mut measured, mut backgrounds) = (Vec::new(), BTreeMap::new());
    for this in once(cases.iter().map(|case| kind(*case))) {
        let of_kind: Vec<C> = cases.iter().copied().filter(|case| kind(*case) == this).collect();
        progress.step(&format!("building labs: {this}"));
        with_bed(Plan { background: choice.effort().background(), ..plan(of_kind[0]) }, |bed| {
            backgrounds.insert(this.to_string(), bed.background().0);
            for case in of_kind {
                progress.step(&format!("{} ({} of {})", case.name(), measured.len() + 1, cases.len()));
                let outcome = measure(bed, case).with_context(|| case.name())?;
                progress.done(&show::line(&outcome));
                measured.push(outcome);
            }
            bed.check_running()
        })
        .with_context(|| this.to_string())?;
    }
    progress.clear();
    measured.sort_by_key(|outcome: &CaseOutcome| cases.iter().position(|case| case.name() == outcome.name));
    Ok(Outcome::new(bench, choice.quick, backgrounds, measured))
}
