//! The table of what is expected when a part of the service falls silent (stopped, cut off, or slow): bounds for the
//! responses of clients that need this part, and for the wait of *bystanders*, clients that do not need it. A *payload*
//! is the body of a response. A *store* has the bodies that programs under `shunt run` have written, and a *reference*
//! names bytes of such a body.

use std::fmt::Write as _;
use std::time::Duration;

use super::part::{Manner, Part};
use crate::answer::Ending;
use crate::pace::Pace;

/// Longest allowed wait of a bystander, in every row.
pub const BYSTANDER_BOUND: Duration = Duration::from_secs(1);

/// Allowed endings of the response of a client that needs the silent part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// Whole, with every byte.
    Whole,
    /// Whole, or visibly not whole: an error status, a reset, or a connection that is closed too early.
    WholeOrVisiblyNot,
}

/// Bound for the response of one client that needs the silent part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub(super) ends: Ends,
    pub(super) within: Duration,
}

/// Expectations of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    /// Bound for the client that is in mid-payload when the silence begins.
    pub(super) under_way: Bound,
    /// Bound for the client that sends its request during the silence.
    pub(super) asks: Bound,
}

/// Bound for a response that waits for nothing, on a machine that also does other work.
const SOON: Duration = Duration::from_secs(4);
/// Bound for a response if the frontend's agent (Shunt's daemon) is silent. A silent agent delays a download by 5 s at
/// most; the other 2 s are for the download itself.
const AGENT: Duration = Duration::from_secs(7);
/// Bound for a response that a timeout ends. The timeouts of the service are 3 s (`proxy_read_timeout`, `progress`,
/// `send_timeout`), and a quarter is added to them. A timeout begins when a silent agent counts as lost (after four
/// heartbeats), or when an attempt to connect is given up (after 2 s).
const TIMEOUT: Duration = Duration::from_secs(7);
/// Bound for a response that may end only after the silence ([`super::row::SILENCE`]). During the silence, a slow part
/// continues the response slowly.
const AFTERWARDS: Duration = Duration::from_secs(14);

const fn whole(within: Duration) -> Bound {
    Bound { ends: Ends::Whole, within }
}

const fn ended(within: Duration) -> Bound {
    Bound { ends: Ends::WholeOrVisiblyNot, within }
}

pub(super) fn expected(part: Part, manner: Manner) -> Expected {
    let (under_way, asks) = match (part, manner) {
        // A payload under way is sent by agents and kernels. It does not need nginx.
        (Part::Backend | Part::Intermediate, Manner::Slow) => (whole(SOON), ended(AFTERWARDS)),
        (Part::Backend | Part::Intermediate, _) => (whole(SOON), ended(TIMEOUT)),
        (Part::BackendAgent, Manner::Slow) => (ended(AFTERWARDS), ended(AFTERWARDS)),
        (Part::BackendAgent, _) => (ended(TIMEOUT), ended(TIMEOUT)),
        (Part::FrontendAgent, _) => (whole(AGENT), whole(AGENT)),
        (Part::Disk | Part::Link, Manner::Slow) => (ended(AFTERWARDS), ended(AFTERWARDS)),
        (Part::Disk | Part::Link, _) => (ended(TIMEOUT), ended(TIMEOUT)),
        // References to bodies do not pass this store.
        (Part::MiddleStore, _) => (whole(TIMEOUT), whole(TIMEOUT)),
        (_, Manner::Slow) => (ended(AFTERWARDS), ended(AFTERWARDS)),
        // A response waits for a second at each process that needs the silent part, or it waits until a timeout.
        _ => (ended(TIMEOUT), ended(TIMEOUT)),
    };
    Expected { under_way, asks }
}

impl Bound {
    /// Says what is wrong with a response that ended in this way after this many seconds. `None` if it is as expected.
    pub(super) fn objection(&self, who: &str, ending: Ending, seconds: f64, pace: Pace) -> Option<String> {
        let good = match ending {
            Ending::Whole => true,
            Ending::Wrong(_) | Ending::Hang(_) => false,
            _ => self.ends == Ends::WholeOrVisiblyNot,
        };
        let late = seconds > pace.bound(self.within).as_secs_f64();
        (!good || late).then(|| format!("{who}: {ending} after {seconds:.1} s; expected: {self}"))
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ends = if self.ends == Ends::Whole { "whole" } else { "whole, or visibly incomplete" };
        write!(f, "{ends}, within {} s", self.within.as_secs())
    }
}

/// The table in the form of docs/silence.md.
#[must_use]
pub fn page() -> String {
    let heads = "| silent | how | in mid-payload | asks then | bystander waits | who is one |\n";
    let mut page = heads.to_owned() + "| --- | --- | --- | --- | --- | --- |\n";
    for part in Part::ALL {
        for manner in Manner::ALL {
            let Expected { under_way, asks } = expected(part, manner);
            let (bound, who) = (BYSTANDER_BOUND.as_secs(), part.bystanders(manner).join(", "));
            let (part, manner) = (part.name(), manner.name());
            let _ = writeln!(page, "| {part} | {manner} | {under_way} | {asks} | at most {bound} s | {who} |");
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_page_has_this_table() {
        let docs = include_str!("../../../../docs/silence.md");
        assert!(docs.contains(&page()), "docs/silence.md is to have this table:\n{}", page());
    }

    #[test]
    fn wrong_bytes_and_silence_are_never_right() {
        for bound in [whole(SOON), ended(TIMEOUT)] {
            assert!(bound.objection("x", Ending::Wrong(1), 0.0, Pace::Alone).is_some());
            assert!(bound.objection("x", Ending::Hang(1), 0.0, Pace::Alone).is_some());
            assert!(bound.objection("x", Ending::Whole, 0.0, Pace::Alone).is_none());
            assert!(bound.objection("x", Ending::Whole, 7.1, Pace::Alone).is_some());
        }
        assert!(whole(SOON).objection("x", Ending::Reset(1), 0.0, Pace::Alone).is_some());
        assert!(ended(SOON).objection("x", Ending::Reset(1), 0.0, Pace::Alone).is_none());
    }
}
