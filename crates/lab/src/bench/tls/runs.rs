//! Measurement of each case of `shunt-lab bench tls`. A *bed* is the labs of all services that are compared, and a
//! *side* is one of these services.

use std::time::Duration;

use anyhow::Result;

use super::super::bed::{Bed, Side};
use super::super::effort::Effort;
use super::super::outcome::CaseOutcome;
use super::super::rounds::CONNECTIONS;
use super::super::runs::Costs;
use super::case::Case;
use crate::load::Cost;
use crate::placement::Placement;
use crate::report::{Sample, number::size_name};
use crate::wrk::Wrk;

/// Measures one case.
pub(super) fn measure(bed: &Bed, case: Case, effort: Effort) -> Result<CaseOutcome> {
    if case == Case::Encryption {
        return encryption(bed, effort);
    }
    bed.place(&placement(case))?;
    let background = bed.background();
    let costs = Costs::measure(bed, effort.judged_rounds(), |side| load(bed, case, side, effort.load()))?;
    let microseconds = |cost: &Cost| cost.microseconds(&background);
    if case == Case::Handshake {
        return Ok(costs.compared(case, |cost| cost.responses_per_core_second(&background)));
    }
    let kept_heap = load(bed, case, Side::KeptHeap, effort.load())?;
    Ok(costs.compared(case, microseconds).with("kept_heap", microseconds(&kept_heap)))
}

/// Puts the hosts on the cores that a case needs, and loads one side of the bed.
pub(super) fn load_placed(bed: &Bed, case: Case, side: Side, time: Duration) -> Result<Cost> {
    bed.place(&placement(case))?;
    load(bed, case, side, time)
}

/// The host, or the whole service, that runs on the measured core in a case. For encryption this is the backend,
/// because Shunt encrypts on that host.
fn placement(case: Case) -> Placement {
    match case {
        Case::Service { .. } => Placement::WholeService,
        Case::Frontend | Case::Handshake => Placement::Tier("frontend".to_owned()),
        Case::Encryption => Placement::Tier("backend".to_owned()),
    }
}

fn load(bed: &Bed, case: Case, side: Side, time: Duration) -> Result<Cost> {
    let (_, chain) = bed.target(side)?;
    let load = wrk(chain.tls_url(&path(case)), time);
    bed.load_with(side, if case == Case::Handshake { load.new_connections() } else { load })
}

/// Loads one side with the requests of a case, without TLS.
fn load_plain(bed: &Bed, case: Case, side: Side, time: Duration) -> Result<Cost> {
    let (_, chain) = bed.target(side)?;
    bed.load_with(side, wrk(chain.url(&path(case)), time))
}

fn path(case: Case) -> String {
    format!("/{}", size_name(case.size()))
}

fn wrk(url: String, time: Duration) -> Wrk {
    Wrk::new(url).connections(CONNECTIONS).duration(time)
}

/// Measures [`Case::Encryption`]. A round has five loads: three with the backend on the measured core, two with the
/// frontend.
fn encryption(bed: &Bed, effort: Effort) -> Result<CaseOutcome> {
    let (case, background, time) = (Case::Encryption, bed.background(), effort.load());
    let microseconds = |cost: Cost| cost.microseconds(&background);
    let (mut added, mut spared) = (Sample::default(), Sample::default());
    let (mut backend, mut backend_plain) = (Sample::default(), Sample::default());
    for _ in 0..effort.judged_rounds() {
        bed.place(&Placement::Tier("backend".to_owned()))?;
        let before = microseconds(load(bed, case, Side::Baseline, time)?);
        let ours = microseconds(load(bed, case, Side::Ours, time)?);
        backend_plain.push(microseconds(load_plain(bed, case, Side::Ours, time)?));
        backend.push(ours);
        added.push(ours - before);
        bed.place(&Placement::Tier("frontend".to_owned()))?;
        let plain = microseconds(load_plain(bed, case, Side::Baseline, time)?);
        spared.push(microseconds(load(bed, case, Side::Baseline, time)?) - plain);
    }
    Ok(CaseOutcome::compared(case, spared, added)
        .with("backend_us", backend.median())
        .with("backend_us_plain_http", backend_plain.median()))
}
