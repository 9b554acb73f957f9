//! The table: how a response ends after each fault at each step, and within what time. An *agent* is Shunt's daemon on
//! a machine, and a *session* is the use of a connection between two agents.

use std::time::Duration;

use super::fault::Fault;
use super::step::Step;
use crate::answer::Ending;
use crate::pace::Pace;

/// Ending of a response, as the client sees it. A wrong byte, a short body that looks complete, and a connection on
/// which nothing more happens are never allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The whole body.
    Whole,
    /// An error status in place of the body.
    Error,
    /// A reset, or a connection closed before the length that the header named.
    Broken,
    /// The connection ended before the header of a response was complete. This is allowed: a server may close an idle
    /// connection just when a request comes, and clients then ask again.
    Unanswered,
}

impl End {
    /// `None` for an ending that is never allowed.
    fn of(ending: Ending) -> Option<Self> {
        match ending {
            Ending::Whole => Some(Self::Whole),
            Ending::Error(_) => Some(Self::Error),
            Ending::Reset(_) | Ending::Short(_) => Some(Self::Broken),
            Ending::Unanswered => Some(Self::Unanswered),
            Ending::Wrong(_) | Ending::Hang(_) => None,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Error => "error",
            Self::Broken => "broken",
            Self::Unanswered => "none",
        }
    }
}

/// Allowed endings after a fault at a step, and the time within which one of them must come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    pub ends: &'static [End],
    pub within: Duration,
}

/// Bound for endings that do not depend on a timeout. The longest waits are three. A silent agent counts as lost after
/// four heartbeats (1 s). A passing fault is over after 1 s. The frontend's nginx asks for the rest of a body for the
/// last time after 2.5 s. The bound adds time for a machine that does other work.
const SOON: Duration = Duration::from_secs(4);
/// Bound for endings that come with a timeout. The timeout takes up to 1.25 times [`super::bed::TIMEOUT`]
/// (docs/nginx.md, `send_timeout`). It may begin only after waits like those that [`SOON`] allows for.
const LATE: Duration = Duration::from_secs(7);

const fn soon(ends: &'static [End]) -> Expected {
    Expected { ends, within: SOON }
}

const fn late(ends: &'static [End]) -> Expected {
    Expected { ends, within: LATE }
}

/// The whole body.
const W: Expected = soon(&[End::Whole]);
/// An error status.
const E: Expected = soon(&[End::Error]);
/// A broken connection.
const B: Expected = soon(&[End::Broken]);
/// No answer.
const N: Expected = soon(&[End::Unanswered]);
/// An error status after a timeout.
const LE: Expected = late(&[End::Error]);
/// A broken connection after a timeout.
const LB: Expected = late(&[End::Broken]);
/// One of two endings, as the timing decides. A brief cut lasts a second, which is four heartbeats, so the agents may
/// lose each other or not. This decides whether the frontend's nginx can ask for the rest of the body in time. The
/// timing also decides after a restart of the frontend's agent: nginx may ask before the session with the backend's
/// agent is back.
const WE: Expected = late(&[End::Whole, End::Error]);
const WB: Expected = late(&[End::Whole, End::Broken]);
/// The connection is broken, or the body is whole: the queued rest of the body may have reached the client before the
/// reset.
const BW: Expected = soon(&[End::Broken, End::Whole]);
/// The body is whole, or there is no answer: nginx closes idle connections when it is told to end, and the request may
/// be on its way at that moment.
const WN: Expected = soon(&[End::Whole, End::Unanswered]);
/// Any of three endings: it is not known which allocation fails, and whether the agent ends because of that.
const WEB: Expected = late(&[End::Whole, End::Error, End::Broken]);

/// Expected endings after one fault, at each step in the order of [`Step::ALL`]: asked, offered, begun, claimed,
/// sending, queued, parked, next.
fn row(fault: Fault) -> [Expected; Step::ALL.len()] {
    use Fault::*;
    match fault {
        BackendServerKilled => [E, W, W, W, W, W, E, W],
        BackendServerReloaded => [W; 8],
        BackendAgentKilled | BackendAgentRestarted => [W; 8],
        BackendAgentStopped | FrontendAgentStopped | FrontendAgentKilled => [W; 8],
        FrontendWorkerKilled | FrontendServerKilled => [N, N, B, B, B, BW, N, B],
        FrontendServerReloaded | FrontendServerUpgraded => [W, W, W, W, W, W, WN, W],
        FrontendAgentRestarted => [W, W, WB, W, W, W, W, W],
        IntermediateKilled => [E, E, W, W, W, W, E, W],
        BackendCut => [LE, LB, LB, LB, LB, LB, LE, LB],
        FrontendCut => [LE, LE, LB, LB, LB, LB, LE, LB],
        BackendCutBriefly | FrontendCutBriefly => [WE, WE, WB, WB, WB, WB, WE, WB],
        SessionLost | FlowTableFull | FrontendAgentNoDescriptors | BackendAgentNoDescriptors => [W; 8],
        FrontendAgentNoMemory | BackendAgentNoMemory => [WEB, WEB, WEB, WEB, WEB, W, WEB, WEB],
        NoPorts => [W, W, W, W, W, W, E, W],
        DiskReadError => [B, B, B, B, B, W, B, B],
    }
}

/// Expected endings of a response after a fault at a step.
#[must_use]
pub fn expected(step: Step, fault: Fault) -> Expected {
    row(fault)[step as usize]
}

impl Expected {
    /// Names of the allowed endings.
    #[must_use]
    pub fn name(&self) -> String {
        let ends: Vec<&str> = self.ends.iter().map(|end| end.name()).collect();
        ends.join(" or ")
    }

    /// Says what is wrong with an ending that came after this many seconds. `None` if it is as expected.
    pub(super) fn objection(&self, ending: Ending, seconds: f64, pace: Pace) -> Option<String> {
        if End::of(ending).is_none_or(|end| !self.ends.contains(&end)) {
            return Some(format!("the response should be {}, and is: {ending}", self.name()));
        }
        let bound = pace.bound(self.within).as_secs_f64();
        (seconds > bound).then(|| format!("{ending} after {seconds:.1} s, more than {bound} s"))
    }
}

/// The table in the form of docs/faults.md.
#[must_use]
pub fn page() -> String {
    let mut page = "| fault |".to_owned();
    page.extend(Step::ALL.map(|step| format!(" {} |", step.name())));
    page.push_str(" bystander |\n| --- |");
    page.push_str(&" --- |".repeat(Step::ALL.len() + 1));
    for fault in Fault::ALL {
        page.push_str(&format!("\n| {} |", fault.name()));
        page.extend(row(fault).map(|cell| {
            let bound = if cell.within == SOON { String::new() } else { format!(" {} s", cell.within.as_secs()) };
            format!(" {}{bound} |", cell.name())
        }));
        page.push_str(&format!(" {} |", fault.bystander().name()));
    }
    page + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_page_has_this_table() {
        let docs = include_str!("../../../../docs/faults.md");
        assert!(docs.contains(&page()), "docs/faults.md is to have this table:\n{}", page());
    }

    #[test]
    fn wrong_bytes_and_silence_are_never_right() {
        for fault in Fault::ALL {
            for step in Step::ALL {
                for ending in [Ending::Wrong(7), Ending::Hang(7)] {
                    assert!(
                        expected(step, fault).objection(ending, 0.0, Pace::Alone).is_some(),
                        "{step:?} {fault:?} {ending}"
                    );
                }
            }
        }
        assert_eq!(W.objection(Ending::Whole, 1.0, Pace::Alone), None);
        assert!(W.objection(Ending::Whole, 4.1, Pace::Alone).is_some_and(|found| found.contains("more than 4 s")));
        assert!(W.objection(Ending::Error(502), 0.0, Pace::BesideOthers).is_some());
        assert_eq!(W.objection(Ending::Whole, 4.1, Pace::BesideOthers), None);
        assert_eq!(LB.objection(Ending::Short(3), 6.9, Pace::Alone), None);
    }
}
