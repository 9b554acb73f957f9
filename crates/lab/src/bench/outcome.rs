//! Figures of a run, and the file that they are written to. The *baseline* is nginx without Shunt, and "ours" is nginx
//! with Shunt. In a round, both are measured once.

use std::collections::BTreeMap;

use serde::Serialize;

use super::case::Case;
use super::subject::Subject;
use super::target::{Figure, Target};
use crate::report::{Machine, Sample, Unit};

/// Result of one case.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CaseOutcome {
    pub(super) name: String,
    pub(super) unit: Unit,
    #[serde(skip)]
    pub(super) target: Option<Target>,
    /// Median of the runs with Shunt ("ours"). `baseline` is the median of the baseline's runs.
    pub(super) ours: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) baseline: Option<f64>,
    /// Ratio of ours to the baseline, or `ours` if there is no baseline. It is the median of the rounds' ratios.
    /// Changes of the machine from minute to minute affect ours and the baseline of one round alike.
    pub(super) ratio: f64,
    pub(super) runs: Runs,
    /// Values that are shown beside the figure: HAProxy, the physical limit, utilisation...
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) extra: BTreeMap<&'static str, f64>,
}

/// Values of all runs, in the order in which they ran.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Runs {
    pub(super) ours: Sample,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) baseline: Option<Sample>,
}

impl CaseOutcome {
    /// Compares the runs with Shunt with those of the baseline, round by round.
    pub(super) fn compared(case: impl Subject, baseline: Sample, ours: Sample) -> Self {
        let (ours_median, baseline_median) = (ours.median(), baseline.median());
        let ratio = ours.ratios_to(&baseline).median();
        Self {
            name: case.name(),
            unit: case.unit(),
            target: case.target(),
            ours: ours_median,
            baseline: Some(baseline_median),
            ratio,
            runs: Runs { ours, baseline: Some(baseline) },
            extra: BTreeMap::new(),
        }
    }

    /// Result of a case that has no baseline.
    pub(super) fn alone(case: impl Subject, ours: Sample) -> Self {
        let median = ours.median();
        let runs = Runs { ours, baseline: None };
        let (name, unit, target, extra) = (case.name(), case.unit(), case.target(), BTreeMap::new());
        Self { name, unit, target, ours: median, baseline: None, ratio: median, runs, extra }
    }

    pub(super) fn with(mut self, what: &'static str, value: f64) -> Self {
        self.extra.insert(what, value);
        self
    }

    /// Spread (highest less lowest value, as a fraction of the median) of the rounds' ratios. Without a baseline, it is
    /// the spread of the runs with Shunt.
    pub(super) fn spread(&self) -> f64 {
        match &self.runs.baseline {
            Some(baseline) => self.runs.ours.ratios_to(baseline).spread(),
            None => self.runs.ours.spread(),
        }
    }
}

/// A target, and the figure that was measured for it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TargetOutcome {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) target: Target,
    pub(super) measured: f64,
    pub(super) met: bool,
}

/// Results of a benchmark, as `--json` writes them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    pub(super) bench: &'static str,
    pub(super) machine: Machine,
    pub(super) quick: bool,
    /// For each kind of lab (test hosts and links) in which cases were measured: the fraction of time for which the
    /// core under measurement was busy although nobody sent requests.
    pub(super) background: BTreeMap<String, f64>,
    pub(super) cases: Vec<CaseOutcome>,
    pub(super) targets: Vec<TargetOutcome>,
}

impl Outcome {
    /// Results of cases that were measured on this machine.
    pub(super) fn new(
        bench: &'static str,
        quick: bool,
        background: BTreeMap<String, f64>,
        cases: Vec<CaseOutcome>,
    ) -> Self {
        let targets = targets(&cases);
        Self { bench, machine: Machine::this(), quick, background, cases, targets }
    }
}

/// Compares the figure of each case that has a target with this target. Leaves out a target for the growth since 64 KiB
/// if the case for 64 KiB was not measured.
fn targets(cases: &[CaseOutcome]) -> Vec<TargetOutcome> {
    let judged = cases.iter().filter_map(|outcome| {
        let target = outcome.target?;
        let measured = match target.figure {
            Figure::Ratio => outcome.ratio,
            Figure::Growth => outcome.ours / at_64k(cases, &outcome.name)?.ours,
        };
        Some(TargetOutcome { name: outcome.name.clone(), target, measured, met: target.is_met(measured) })
    });
    judged.collect()
}

fn at_64k<'a>(cases: &'a [CaseOutcome], of: &str) -> Option<&'a CaseOutcome> {
    let Case::TierCpu { tier, wire, .. } = Case::parse(of)? else { return None };
    let name = Case::TierCpu { tier, size: 64 << 10, wire }.name();
    cases.iter().find(|outcome| outcome.name == name)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench) fn outcome() -> Outcome {
        let of = |name: &str, baseline: f64, ours: f64| {
            CaseOutcome::compared(Case::parse(name).unwrap(), Sample(vec![baseline]), Sample(vec![ours]))
        };
        let cases = vec![
            of("cpu/0is/64k/mtu", 100.0, 75.0).with("haproxy", 90.0).with("limit", 60.0),
            of("fe-cpu/64k/mtu", 80.0, 20.0),
            of("fe-cpu/1m/mtu", 900.0, 25.0),
            CaseOutcome::alone(Case::Handoff, Sample(vec![20.0, 22.0, 40.0])),
        ];
        Outcome {
            bench: "disc",
            machine: Machine { processor: "test".to_owned(), cores: 2, kernel: "6".to_owned() },
            quick: true,
            background: BTreeMap::new(),
            targets: targets(&cases),
            cases,
        }
    }

    #[test]
    fn the_file_has_every_figure_by_its_name() {
        let json = serde_json::to_value(outcome()).unwrap();
        assert_eq!(json["bench"], "disc");
        assert_eq!(json["machine"]["cores"], 2);
        let case = &json["cases"][0];
        assert_eq!((case["name"].as_str(), case["unit"].as_str()), (Some("cpu/0is/64k/mtu"), Some("us/response")));
        assert_eq!((case["ours"].as_f64(), case["baseline"].as_f64()), (Some(75.0), Some(100.0)));
        assert_eq!((case["ratio"].as_f64(), case["extra"]["haproxy"].as_f64()), (Some(0.75), Some(90.0)));
        assert_eq!(case["runs"], serde_json::json!({"ours": [75.0], "baseline": [100.0]}));
        assert_eq!(json["cases"][3]["ratio"], 22.0);
        assert!(json["cases"][3].get("baseline").is_none());
        let target = &json["targets"][0];
        assert_eq!((target["name"].as_str(), target["at_most"].as_f64()), (Some("cpu/0is/64k/mtu"), Some(0.8)));
        assert_eq!((target["measured"].as_f64(), target["met"].as_bool()), (Some(0.75), Some(true)));
    }

    #[test]
    fn growth_is_against_the_same_tier_at_64k() {
        let growth = outcome().targets.into_iter().find(|target| target.name == "fe-cpu/1m/mtu").unwrap();
        assert!((growth.measured - 1.25).abs() < 1e-9 && !growth.met);
    }
}
