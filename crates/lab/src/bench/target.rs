//! Targets: bounds for the figures of cases. The *baseline* is the service without Shunt.

use serde::Serialize;

/// Figure of a case that is compared with its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Figure {
    /// Ratio of the figure with Shunt to the baseline's. Without a baseline, it is the figure with Shunt.
    Ratio,
    /// Ratio of the case's figure with Shunt to the figure for bodies of 64 KiB. It shows whether the cost grows with
    /// the body.
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

    /// A growth of at most `bound`.
    pub(super) fn growth_at_most(bound: f64) -> Self {
        Self { figure: Figure::Growth, at_most: Some(bound), at_least: None }
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
