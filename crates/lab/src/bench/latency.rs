//! Latency at a constant rate of requests, with the whole service on one core. The rate is the same for both sides: the
//! baseline (nginx without Shunt), and ours (nginx with Shunt).

use anyhow::{Context, Result};

use super::bed::{Bed, Side};
use super::case::{Case, Quantile};
use super::effort::Effort;
use super::outcome::CaseOutcome;
use super::rounds::alternate;
use crate::rate::{Rate, RateReport};
use crate::report::number::size_name;

/// Requests per second for bodies of `size` bytes: about half of what the baseline's core can serve.
fn rate(size: u64) -> f64 {
    match size {
        size if size <= 4 << 10 => 8000.0,
        size if size <= 64 << 10 => 3000.0,
        _ => 180.0,
    }
}

/// Measures cases that ask for bodies of the same size. The same runs measure all of these cases, because the cases
/// differ only in the quantile.
pub(super) fn measure(bed: &Bed, cases: &[Case], effort: Effort) -> Result<Vec<CaseOutcome>> {
    let Some(&first) = cases.first() else { return Ok(Vec::new()) };
    let (mut baseline, mut ours) = (Vec::new(), Vec::new());
    let rounds = cases.iter().map(|case| effort.rounds(*case)).max().unwrap_or(1);
    alternate(rounds, |side| {
        let report = run(bed, side, first, effort)?;
        if side == Side::Ours {
            ours.push(report)
        } else {
            baseline.push(report)
        }
        Ok(())
    })?;
    let outcome = |case: &Case| {
        let of = |reports: &[RateReport]| {
            reports.iter().map(|report| report.latency(quantile(*case)).as_secs_f64() * 1e6).collect()
        };
        let lateness = |reports: &[RateReport]| {
            reports.iter().map(|report| report.lateness(quantile(*case)).as_secs_f64() * 1e6).fold(0.0, f64::max)
        };
        CaseOutcome::compared(*case, of(&baseline), of(&ours))
            .with("requests_per_second", rate(first.size()))
            .with("client_lateness_us", lateness(&ours).max(lateness(&baseline)))
    };
    Ok(cases.iter().map(outcome).collect())
}

fn quantile(case: Case) -> f64 {
    match case {
        Case::Latency { quantile: Quantile::P50, .. } => 0.5,
        Case::IdleTail => 0.999,
        _ => 0.99,
    }
}

fn run(bed: &Bed, side: Side, case: Case, effort: Effort) -> Result<RateReport> {
    let (lab, chain) = bed.target(side)?;
    let path = format!("/{}", size_name(case.size()));
    let report = Rate::new(chain.server(), path, rate(case.size())).duration(effort.rate(case)).run(lab.client())?;
    report.check().with_context(|| format!("{side:?}"))?;
    Ok(report)
}
