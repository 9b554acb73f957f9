//! Targets of the cases.

use serde::Serialize;

use super::case::Case;
use super::choice::Subject;

/// Figure of a case that is compared with its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Figure {
    /// Ratio of ours to the baseline, or ours where there is no baseline.
    Ratio,
    /// Ratio of ours to ours at 64 KiB: it shows whether the cost grows with the body.
    Growth,
}

/// A bound for one figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Target {
    pub(super) figure: Figure,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at_most: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at_least: Option<f64>,
}

impl Target {
    /// A ratio of at most `bound`.
    pub(super) fn at_most(bound: f64) -> Self {
        Self { figure: Figure::Ratio, at_most: Some(bound), at_least: None }
    }

    /// A ratio of at least `bound`.
    pub(super) fn at_least(bound: f64) -> Self {
        Self { figure: Figure::Ratio, at_most: None, at_least: Some(bound) }
    }

    /// Target of a case, if it has one.
    pub(super) fn of(case: Case) -> Option<Self> {
        if let Case::TierCpu { size, .. } = case {
            return (size > 64 << 10).then_some(Self { figure: Figure::Growth, at_most: Some(1.2), at_least: None });
        }
        let (at_most, at_least) = match case.name().as_str() {
            "cpu/0is/64k/mtu" => (Some(0.80), None),
            "cpu/2is/64k/mtu" => (Some(0.48), None),
            "cpu/2is/64k/tso" => (Some(0.75), None),
            "cpu/0is/256k/tso" => (Some(0.45), None),
            "cpu/2is/1m/tso" | "cpu/2is/1m/mtu" => (Some(0.20), None),
            "handoff/64k" => (Some(25.0), None),
            "is-bytes/1m" => (Some(0.01), None),
            "saturated/32k/mtu" => (None, Some(1.8)),
            "saturated/256k/mtu" => (None, Some(5.0)),
            "idle/1k" => (None, Some(0.97)),
            "idle-p999/1k" => (Some(1.03), None),
            "p99/64k" => (Some(1.0), None),
            "wan/50ms/64k/second-response" | "wan/50ms/4m" => (None, Some(1.0)),
            "wan/50ms/64k/second-response/loss1" | "wan/50ms/4m/loss1" => (None, Some(0.95)),
            _ => return None,
        };
        Some(Self { figure: Figure::Ratio, at_most, at_least })
    }

    /// Whether `value` meets the target; NaN does not.
    pub(super) fn is_met(&self, value: f64) -> bool {
        self.at_most.is_none_or(|most| value <= most)
            && self.at_least.is_none_or(|least| value >= least)
            && !value.is_nan()
    }

    /// The bound itself.
    pub(super) fn bound(&self) -> f64 {
        self.at_most.or(self.at_least).unwrap_or(f64::NAN)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sign = if self.at_most.is_some() { "<=" } else { ">=" };
        let figure = if self.figure == Figure::Growth { "growth " } else { "" };
        write!(f, "{figure}{sign} {}", self.bound())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(name: &str) -> Target {
        Target::of(Case::parse(name).unwrap()).unwrap()
    }

    #[test]
    fn bounds_hold_at_their_edge() {
        assert!(target("cpu/2is/1m/tso").is_met(0.2) && !target("cpu/2is/1m/tso").is_met(0.201));
        assert!(target("saturated/32k/mtu").is_met(1.8) && !target("saturated/32k/mtu").is_met(1.79));
        assert!(!target("idle/1k").is_met(f64::NAN) && !target("handoff/64k").is_met(f64::NAN));
    }

    #[test]
    fn every_target_has_its_case() {
        assert_eq!(Case::all().into_iter().filter_map(Target::of).count(), 6 + 1 + 4 + 1 + 2 + 2 + 1 + 4);
        assert_eq!(target("fe-cpu/1m/tso").to_string(), "growth <= 1.2");
        assert_eq!(target("saturated/256k/mtu").to_string(), ">= 5");
        assert_eq!(Target::of(Case::parse("fe-cpu/64k/tso").unwrap()), None);
    }
}
