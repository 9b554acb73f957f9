//! How long what has a bound may take. The bounds are written for a machine that does nothing else, as a benchmark's does.
//! Beside other work everything may take longer, and nothing else may happen.

use std::time::Duration;

/// What else the machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Nothing.
    Alone,
    /// Anything: tests run beside compilers, and beside each other.
    BesideOthers,
}

impl Pace {
    /// The bound that holds.
    #[must_use]
    pub fn bound(self, alone: Duration) -> Duration {
        match self {
            Self::Alone => alone,
            Self::BesideOthers => alone * 4,
        }
    }
}
