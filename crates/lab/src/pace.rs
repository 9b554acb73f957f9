//! Pace of a machine, for bounds of time. The bounds are written for a machine that does nothing else, as in a
//! benchmark. Beside other work everything may take longer, but nothing else may differ.

use std::time::Duration;

/// Other work of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// No other work.
    Alone,
    /// Any other work: tests run beside compilers, and beside each other.
    BesideOthers,
}

impl Pace {
    /// Bound of time that applies, given the bound for a machine without other work.
    #[must_use]
    pub fn bound(self, alone: Duration) -> Duration {
        match self {
            Self::Alone => alone,
            Self::BesideOthers => alone * 4,
        }
    }
}
