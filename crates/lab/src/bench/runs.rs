//! Measurement of each case of `shunt-lab bench disc`. A *shortcut* is a response whose body bypasses tiers. The
//! *physical limit* is what a response would cost if Shunt's own work cost nothing (limit.rs). A *side* is one of the
//! services that are compared.

use std::time::Duration;

use anyhow::{Context, Result};

use super::bed::{Bed, Side};
use super::case::{Case, Tier};
use super::effort::Effort;
use super::latency;
use super::limit::{Limits, chain_cost, direct_cost};
use super::outcome::CaseOutcome;
use super::rounds::{CONNECTIONS, alternate};
use super::subject::Subject;
use crate::load::Cost;
use crate::placement::Placement;
use crate::report::Sample;
use crate::report::number::size_name;
use crate::wrk::Wrk;

/// Number of connections that keeps the frontend's core busy all the time.
const SATURATING_CONNECTIONS: u32 = 64;

/// Size of the short body, in bytes. The target of a case about one tier bounds the growth of the tier's CPU per
/// response from this body to the case's longer one.
const GROWTH_FROM: u64 = 64 << 10;
/// Rate of requests when growth is measured at a constant rate, per second.
const GROWTH_RATE: f64 = 500.0;

/// State that a run keeps from one [`Bed`] to the next. A bed is the labs of all services, for one number of
/// intermediates and one kind of links.
pub(super) struct Runner {
    pub(super) effort: Effort,
    pub(super) limits: Limits,
}

/// Costs of the runs of the baseline (nginx without Shunt) and of the service with Shunt ("ours").
pub(super) struct Costs {
    baseline: Vec<Cost>,
    ours: Vec<Cost>,
    /// Shortcuts per response of the service with Shunt; 0 if an agent (Shunt's daemon) did not tell its counters.
    shortcuts: f64,
}

impl Costs {
    /// Loads the baseline and the service with Shunt in turns.
    pub(super) fn measure(bed: &Bed, rounds: usize, load: impl Fn(Side) -> Result<Cost>) -> Result<Self> {
        let before = bed.stats();
        let mut costs = Self { baseline: Vec::new(), ours: Vec::new(), shortcuts: 0.0 };
        alternate(rounds, |side| {
            let cost = load(side)?;
            if side == Side::Ours {
                costs.ours.push(cost)
            } else {
                costs.baseline.push(cost)
            }
            Ok(())
        })?;
        if let (Some(before), Some(after)) = (before, bed.stats()) {
            let taken = after.count("servers.shortcuts") - before.count("servers.shortcuts");
            let answers: u64 = costs.ours.iter().map(|cost| cost.report.requests).sum();
            costs.shortcuts = taken as f64 / answers as f64;
        }
        Ok(costs)
    }

    pub(super) fn compared(&self, case: impl Subject, of: impl Fn(&Cost) -> f64) -> CaseOutcome {
        let sample = |costs: &[Cost]| costs.iter().map(&of).collect::<Sample>();
        CaseOutcome::compared(case, sample(&self.baseline), sample(&self.ours))
            .with("shortcuts_per_response", self.shortcuts)
    }
}

fn median(costs: &[Cost], of: impl Fn(&Cost) -> f64) -> f64 {
    costs.iter().map(of).collect::<Sample>().median()
}

impl Runner {
    /// The host, or the whole service, that runs on the measured core in a case.
    pub(super) fn placement(bed: &Bed, case: Case) -> Result<Placement> {
        Ok(match case {
            Case::TierCpu { tier: Tier::Frontend, .. } | Case::Saturated { .. } => {
                Placement::Tier("frontend".to_owned())
            }
            Case::TierCpu { tier: Tier::Intermediate, .. } | Case::IntermediateBytes => {
                Placement::Tier(first_intermediate(bed)?)
            }
            _ => Placement::WholeService,
        })
    }

    /// Measures the first of `cases`, and with it each other case that uses the same requests. Returns their outcomes.
    pub(super) fn measure(&mut self, bed: &Bed, cases: &[Case]) -> Result<Vec<CaseOutcome>> {
        let Some(&first) = cases.first() else { return Ok(Vec::new()) };
        bed.place(&Self::placement(bed, first)?)?;
        let together: Vec<Case> = cases.iter().copied().filter(|case| comes_with(*case, first)).collect();
        match first {
            Case::Cpu { .. } => Ok(vec![self.whole_service(bed, first)?]),
            Case::Alone { .. } => Ok(vec![self.alone(bed, first)?]),
            Case::Handoff => Ok(vec![self.handoff(bed)?]),
            Case::TierCpu { .. } => Ok(vec![self.tier(bed, first)?]),
            Case::IntermediateBytes => Ok(vec![self.intermediate_bytes(bed)?]),
            Case::Saturated { .. } => Ok(vec![self.saturated(bed, first)?]),
            Case::Idle => Ok(vec![self.idle(bed)?]),
            Case::Latency { .. } | Case::IdleTail => latency::measure(bed, &together, self.effort),
            Case::Wan { .. } => Ok(Vec::new()), // measured in wan.rs, without a bed
        }
        .with_context(|| first.name())
    }

    fn costs(&self, bed: &Bed, case: Case, connections: u32) -> Result<Costs> {
        let load = |side| load(bed, case, side, connections, self.effort.load());
        Costs::measure(bed, self.effort.rounds(case), load)
    }

    fn whole_service(&mut self, bed: &Bed, case: Case) -> Result<CaseOutcome> {
        let background = bed.background();
        let microseconds = |cost: &Cost| cost.microseconds(&background);
        let mut outcome = self.costs(bed, case, CONNECTIONS)?.compared(case, microseconds);
        if self.effort.kept_heap(case) {
            let cost = bed.load(Side::KeptHeap, case.size(), CONNECTIONS, self.effort.load())?;
            outcome = outcome.with("kept_heap", microseconds(&cost));
        }
        if bed.has_haproxy() && self.effort.haproxy(case) {
            let cost = bed.load(Side::Haproxy, case.size(), CONNECTIONS, self.effort.load())?;
            outcome = outcome.with("haproxy", microseconds(&cost));
        }
        let limit = self.limits.of(bed, case.size(), self.effort)?;
        let above = outcome.ours - limit;
        Ok(outcome.with("limit", limit).with("above_limit", above))
    }

    fn alone(&self, bed: &Bed, case: Case) -> Result<CaseOutcome> {
        let background = bed.background();
        Ok(self.costs(bed, case, CONNECTIONS)?.compared(case, |cost| cost.microseconds(&background)))
    }

    /// Measures how much more a response with Shunt costs than the physical limit. Each round measures the parts of the
    /// limit anew, next to Shunt, because the result is a small difference of large numbers.
    fn handoff(&self, bed: &Bed) -> Result<CaseOutcome> {
        let (effort, background) = (self.effort, bed.background());
        let (mut above, mut limits) = (Sample::default(), Sample::default());
        for _ in 0..effort.rounds(Case::Handoff) {
            let limit = chain_cost(bed, effort)? + direct_cost(bed, Case::Handoff.size(), effort)?
                - direct_cost(bed, 0, effort)?;
            let ours = bed.load(Side::Ours, Case::Handoff.size(), CONNECTIONS, effort.load())?;
            above.push(ours.microseconds(&background) - limit);
            limits.push(limit);
        }
        Ok(CaseOutcome::alone(Case::Handoff, above).with("limit", limits.median()))
    }

    fn tier(&self, bed: &Bed, case: Case) -> Result<CaseOutcome> {
        let background = bed.background();
        let costs = self.costs(bed, case, CONNECTIONS)?;
        let outcome = costs.compared(case, |cost| cost.microseconds(&background));
        if case.size() == GROWTH_FROM { Ok(outcome) } else { self.growth(bed, case, outcome) }
    }

    /// Measures the tier's CPU per response with Shunt, at the same constant rate for the short body and for the case's
    /// body. Adds both to the outcome as further figures. The outcome itself is from a closed loop. A closed loop asks
    /// for fewer long bodies per second than short ones, so the core is idle more often. A core that is idle more often
    /// spends more CPU on waking up, whatever the core serves.
    fn growth(&self, bed: &Bed, case: Case, outcome: CaseOutcome) -> Result<CaseOutcome> {
        let (mut short, mut long) = (Sample::default(), Sample::default());
        for _ in 0..self.effort.rounds(case) {
            short.push(bed.load_at_rate(Side::Ours, GROWTH_FROM, GROWTH_RATE, self.effort.load())?);
            long.push(bed.load_at_rate(Side::Ours, case.size(), GROWTH_RATE, self.effort.load())?);
        }
        Ok(outcome
            .with("growth_at_rate", long.ratios_to(&short).median())
            .with("at_rate_us", long.median())
            .with("at_rate_us_64k", short.median()))
    }

    fn intermediate_bytes(&self, bed: &Bed) -> Result<CaseOutcome> {
        let tier = first_intermediate(bed)?;
        let costs = self.costs(bed, Case::IntermediateBytes, CONNECTIONS)?;
        Ok(costs.compared(Case::IntermediateBytes, |cost| cost.tier_bytes(&tier)))
    }

    /// Measures how many responses per second the frontend's core would carry if it were busy all the time. The clients
    /// and the backend share the other core, and that core may become fully busy first. So the number of responses that
    /// really came, per second, is reported as well.
    fn saturated(&self, bed: &Bed, case: Case) -> Result<CaseOutcome> {
        let background = bed.background();
        let costs = self.costs(bed, case, SATURATING_CONNECTIONS)?;
        let fact = |costs: &[Cost]| median(costs, |cost| cost.report.requests as f64 / cost.cpu.wall.as_secs_f64());
        let busy = |costs: &[Cost]| median(costs, |cost| cost.cpu.fraction());
        let p99 = |costs: &[Cost]| median(costs, |cost| cost.report.latency_p99.as_secs_f64() * 1e6);
        Ok(costs
            .compared(case, |cost| cost.responses_per_core_second(&background))
            .with("answered_per_second", fact(&costs.ours))
            .with("answered_per_second_baseline", fact(&costs.baseline))
            .with("frontend_busy", busy(&costs.ours))
            .with("frontend_busy_baseline", busy(&costs.baseline))
            .with("p99_us", p99(&costs.ours))
            .with("p99_us_baseline", p99(&costs.baseline)))
    }

    fn idle(&self, bed: &Bed) -> Result<CaseOutcome> {
        let background = bed.background();
        let costs = self.costs(bed, Case::Idle, CONNECTIONS)?;
        let cpu = |costs: &[Cost]| median(costs, |cost| cost.microseconds(&background));
        Ok(costs
            .compared(Case::Idle, |cost| cost.report.requests_per_second)
            .with("cpu_us", cpu(&costs.ours))
            .with("cpu_us_baseline", cpu(&costs.baseline)))
    }
}

/// Loads one side with the requests of a case.
pub(super) fn load(bed: &Bed, case: Case, side: Side, connections: u32, time: Duration) -> Result<Cost> {
    let (_, chain) = bed.target(side)?;
    let wrk = Wrk::new(chain.url(&format!("/{}", size_name(case.size())))).connections(connections).duration(time);
    bed.load_with(side, if matches!(case, Case::Alone { .. }) { wrk.new_connections() } else { wrk })
}

/// Whether a case is measured with the same requests as `first`.
fn comes_with(case: Case, first: Case) -> bool {
    match (case, first) {
        (Case::Latency { size, .. }, Case::Latency { size: of_first, .. }) => size == of_first,
        _ => case == first,
    }
}

fn first_intermediate(bed: &Bed) -> Result<String> {
    let (lab, _) = bed.target(Side::Baseline)?;
    let first = lab.intermediates().first().map(|host| host.name().to_owned());
    first.context("no intermediate in this bed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_one_size_share_their_requests() {
        let case = |name| Case::parse(name).unwrap();
        assert!(comes_with(case("p99/64k"), case("p50/64k")) && !comes_with(case("p99/1m"), case("p50/64k")));
        assert!(!comes_with(case("cpu/0is/64k/mtu"), case("cpu/0is/64k/tso")));
    }
}
