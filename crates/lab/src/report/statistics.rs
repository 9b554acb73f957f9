//! Median and spread of a few runs.

use serde::Serialize;

/// Values of one quantity, one per run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Sample(pub Vec<f64>);

impl Sample {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The middle value, or the mean of the middle two; NaN for an empty sample.
    #[must_use]
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match (sorted.len(), sorted.len() / 2) {
            (0, _) => f64::NAN,
            (length, middle) if length % 2 == 1 => sorted[middle],
            (_, middle) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    /// Ratio of each value to the value at the same place in `others`, which is from the same round.
    #[must_use]
    pub fn ratios_to(&self, others: &Self) -> Self {
        self.0.iter().zip(&others.0).map(|(own, other)| own / other).collect()
    }

    /// Distance from the lowest to the highest value, as a fraction of the median; 0 if this is no finite number.
    #[must_use]
    pub fn spread(&self) -> f64 {
        let low = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let spread = (high - low) / self.median().abs();
        if spread.is_finite() { spread } else { 0.0 }
    }
}

impl FromIterator<f64> for Sample {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        Self(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[f64]) -> Sample {
        values.iter().copied().collect()
    }

    #[test]
    fn the_median_ignores_one_outlier() {
        assert_eq!(sample(&[3.0, 1000.0, 1.0]).median(), 3.0);
        assert_eq!(sample(&[4.0, 1.0, 2.0, 1000.0]).median(), 3.0);
        assert_eq!(sample(&[7.0]).median(), 7.0);
        assert!(sample(&[]).median().is_nan());
    }

    #[test]
    fn ratios_are_of_neighbours() {
        let ratios = sample(&[1.0, 9.0]).ratios_to(&sample(&[2.0, 3.0]));
        assert_eq!(ratios.0, [0.5, 3.0]);
    }

    #[test]
    fn spread_is_relative_and_always_a_number() {
        assert!((sample(&[9.0, 10.0, 12.0]).spread() - 0.3).abs() < 1e-12);
        assert_eq!(sample(&[5.0]).spread(), 0.0);
        assert_eq!(sample(&[]).spread(), 0.0);
        assert_eq!(sample(&[0.0, 0.0]).spread(), 0.0);
    }
}
