//! A benchmark's cases, for the code that is the same for all benchmarks.

use super::target::Target;
use crate::report::Unit;

/// A case, as far as the choice of cases and the report need to know it.
pub(super) trait Subject: Copy {
    /// Every case, in the order of the report.
    fn all() -> Vec<Self>;

    /// Name of the case. It never changes.
    fn name(self) -> String;

    fn unit(self) -> Unit;

    /// Target of the case, if it has one.
    fn target(self) -> Option<Target>;

    /// Returns the case with this name.
    fn parse(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|case| case.name() == name)
    }
}
