//! Number and duration of the measurements of each case. The baseline is nginx without Shunt, and "ours" is nginx with
//! Shunt. A case with a *target* is judged: its ratio must keep a bound. The *measured core* runs the hosts whose CPU
//! is measured.

use std::time::Duration;

use super::case::Case;
use super::subject::Subject;

/// Effort of a run: quick covers every case within 3 minutes, full within 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    Quick,
    Full,
}

impl Effort {
    /// Number of rounds, in each of which the baseline and ours are measured once.
    pub(super) fn rounds(self, case: Case) -> usize {
        // The target of [`Case::TierCpu`] bounds the growth of the tier's CPU from the shorter to the longer body. So a
        // full run measures both bodies as often as a case with a target. A quick run measures each body once.
        let tier = matches!(case, Case::TierCpu { .. });
        let judged = tier || case.target().is_some();
        match self {
            _ if judged && !tier => self.judged_rounds(),
            Self::Full if judged => self.judged_rounds(),
            Self::Full => 3,
            Self::Quick => 1,
        }
    }

    /// Number of rounds for a case whose ratio has a target.
    pub(super) fn judged_rounds(self) -> usize {
        match self {
            Self::Quick => 2,
            Self::Full => 7,
        }
    }

    /// Number of runs of a service that is only shown for comparison.
    pub(super) fn side_rounds(self) -> usize {
        match self {
            Self::Quick => 1,
            Self::Full => 3,
        }
    }

    /// Duration of one closed-loop load.
    pub(super) fn load(self) -> Duration {
        Duration::from_secs(1) // short, so that the machine changes little between the two sides of a round
    }

    /// Duration of one load at a constant rate.
    pub(super) fn rate(self, case: Case) -> Duration {
        match (self, case) {
            // The slowest thousandth of the responses must still be many responses.
            (Self::Quick, Case::IdleTail) => Duration::from_secs(2),
            (Self::Quick, _) => Duration::from_secs(1),
            (Self::Full, Case::IdleTail) => Duration::from_secs(6),
            (Self::Full, _) => Duration::from_secs(3),
        }
    }

    /// Time for which the measured core is watched without a load.
    pub(super) fn background(self) -> Duration {
        self.load() / 2
    }

    /// Whether the baseline is also measured with an allocator that gives no memory back to the kernel.
    pub(super) fn kept_heap(self, case: Case) -> bool {
        self == Self::Full || case.target().is_some()
    }

    /// Whether HAProxy is measured for this case, too.
    pub(super) fn haproxy(self, case: Case) -> bool {
        self == Self::Full || case.size() == 64 << 10
    }
}
