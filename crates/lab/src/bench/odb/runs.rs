//! Measurement of each case of `shunt-lab bench odb`. Each service that is compared runs in a separate lab (a network
//! of namespaces) and is a *side*. All these labs together are a *bed*.

use std::time::Duration;

use anyhow::{Context, Result};

use super::super::bed::{Bed, Side};
use super::super::effort::Effort;
use super::super::outcome::CaseOutcome;
use super::super::rounds::CONNECTIONS;
use super::super::runs::Costs;
use super::TOUCHING;
use super::case::{Case, INTERMEDIATE};
use crate::load::Cost;
use crate::report::{Sample, number::size_name};
use crate::wrk::Wrk;

/// Measures one case.
pub(super) fn measure(bed: &Bed<'_>, case: Case, effort: Effort) -> Result<CaseOutcome> {
    bed.place(&case.placement())?;
    if let Case::Bypass { .. } = case {
        return bypass(bed, case, effort);
    }
    let background = bed.background();
    let microseconds = |cost: &Cost| cost.microseconds(&background);
    let costs = Costs::measure(bed, effort.judged_rounds(), |side| load(bed, case, side, effort.load()))?;
    if case == Case::Handshake {
        return Ok(costs.compared(case, |cost| cost.responses_per_core_second(&background)));
    }
    if matches!(case, Case::Small | Case::Touched) {
        return Ok(costs.compared(case, |cost| cost.report.requests_per_second));
    }
    let kept_heap = load(bed, case, Side::KeptHeap, effort.load())?;
    Ok(costs.compared(case, microseconds).with("kept_heap", microseconds(&kept_heap)))
}

/// Loads one side of the bed with the requests of a case. The hosts must already be on the cores that the case needs.
pub(super) fn load(bed: &Bed<'_>, case: Case, side: Side, time: Duration) -> Result<Cost> {
    let directory = if case == Case::Touched { TOUCHING } else { "" };
    let path = format!("{directory}/{}", size_name(case.size()));
    let (_, chain) = bed.target(side)?;
    match case {
        Case::FrontendTls => bed.load_with(side, wrk(chain.tls_url(&path), time)),
        Case::Handshake => bed.load_with(side, wrk(chain.tls_url(&path), time).new_connections()),
        _ => bed.load_with(side, wrk(chain.url(&path), time)),
    }
}

fn wrk(url: String, time: Duration) -> Wrk {
    Wrk::new(url).connections(CONNECTIONS).duration(time)
}

/// Measures the fraction of a body that bypasses the intermediate. All bytes that reach the intermediate count as not
/// bypassed: real bytes and references in connections, acknowledgements, and bytes that the intermediate fetches from a
/// store. The bytes that the intermediate receives for an empty body are subtracted.
fn bypass(bed: &Bed<'_>, case: Case, effort: Effort) -> Result<CaseOutcome> {
    let received = |path: &str| -> Result<f64> {
        let (_, chain) = bed.target(Side::Ours)?;
        let cost = bed.load_with(Side::Ours, wrk(chain.url(path), effort.load()))?;
        let bytes = cost.bytes.get(INTERMEDIATE).context("no intermediate in this bed")?;
        Ok(bytes.rx_bytes as f64 / cost.report.requests as f64)
    };
    let path = format!("/{}", size_name(case.size()));
    let mut skipped = Sample::default();
    for _ in 0..effort.judged_rounds() {
        let body = received(&path)? - received("/0")?;
        skipped.push(1.0 - body / case.size() as f64);
    }
    Ok(CaseOutcome::alone(case, skipped))
}
