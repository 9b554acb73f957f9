//! Disturbances of the service under load. A disturbance explains responses that break while it lasts or soon after it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::response::{Response, Way};
use crate::answer::Ending;
use crate::faults::{Bed, Fault};
use crate::random::Random;

/// Time after a disturbance until the service works again. nginx's workers and the agents (Shunt's daemons) wait 5
/// seconds at most before they try to reach each other again.
const RECOVERY: Duration = Duration::from_secs(6);

/// Part of the service that is disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    None,
    /// The first backend and the intermediate. The path to the second backend must not be affected.
    First,
    All,
}

const FIRST: &[Fault] = &[
    Fault::BackendServerReloaded,
    Fault::BackendServerKilled,
    Fault::BackendAgentRestarted,
    Fault::BackendAgentKilled,
    Fault::BackendAgentStopped,
    Fault::BackendCutBriefly,
    Fault::IntermediateKilled,
    Fault::SessionLost,
];
const FRONTEND: &[Fault] = &[
    Fault::FrontendServerReloaded,
    Fault::FrontendServerReloaded,
    Fault::FrontendWorkerKilled,
    Fault::FrontendAgentRestarted,
    Fault::FrontendAgentKilled,
    Fault::FrontendCutBriefly,
];

/// A disturbance that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disturbance {
    pub(super) fault: Fault,
    pub(super) begin: Instant,
    pub(super) end: Instant,
}

impl Disturbance {
    /// Chooses a random fault; `None` if nothing is to be disturbed.
    pub(super) fn choose(reach: Reach, random: &mut Random) -> Option<Fault> {
        let among: Vec<Fault> = match reach {
            Reach::None => return None,
            Reach::First => FIRST.to_vec(),
            Reach::All => [FIRST, FRONTEND].concat(),
        };
        Some(among[(random.next() % among.len() as u64) as usize])
    }

    /// Injects a fault, waits, and repairs the damage.
    pub(super) fn make(fault: Fault, lasts: Duration, bed: &mut Bed<'_>) -> Result<Self> {
        let begin = Instant::now();
        fault.inject(bed).with_context(|| format!("injecting {}", fault.name()))?;
        std::thread::sleep(fault.lasts().unwrap_or(lasts));
        fault.repair(bed).with_context(|| format!("repairing {}", fault.name()))?;
        Ok(Self { fault, begin, end: Instant::now() })
    }

    /// Whether responses on this path through the service may break.
    fn breaks(&self, way: Way) -> bool {
        match self.fault {
            // On a reload, nginx lets its present requests finish.
            Fault::BackendServerReloaded | Fault::FrontendServerReloaded => false,
            fault if FRONTEND.contains(&fault) => true,
            _ => way == Way::First,
        }
    }

    /// Whether the frontend may close clients' idle connections.
    fn closes_idle(&self) -> bool {
        matches!(self.fault, Fault::FrontendServerReloaded | Fault::FrontendWorkerKilled)
    }

    /// Whether this disturbance explains the ending of `response`. `ended` is the time of the ending.
    pub(super) fn explains(&self, response: &Response, ended: Instant) -> bool {
        let until = self.end + RECOVERY;
        let breaks = self.breaks(response.way) && response.asked <= until && self.begin <= ended;
        let closes = self.closes_idle() && response.opened <= until && self.begin <= ended;
        match response.ending {
            Ending::Whole | Ending::Wrong(_) | Ending::Hang(_) => false,
            Ending::Unanswered => breaks || closes,
            Ending::Error(_) | Ending::Reset(_) | Ending::Short(_) => breaks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_disturbance_of_the_same_way_and_time_explains_a_reset() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let disturbance = |fault| Disturbance { fault, begin: at(100), end: at(101) };
        let reset = |way, asked| Response {
            way,
            size: 1,
            ending: Ending::Reset(0),
            asked,
            opened: start,
            body_bytes: 0,
            before: None,
        };
        let killed = disturbance(Fault::BackendAgentKilled);
        assert!(killed.explains(&reset(Way::First, at(99)), at(103)));
        assert!(!killed.explains(&reset(Way::Second, at(99)), at(103)), "the other backend");
        assert!(!killed.explains(&reset(Way::First, at(98)), at(99)), "before");
        assert!(!killed.explains(&reset(Way::First, at(120)), at(121)), "long after");
        let reloaded = disturbance(Fault::FrontendServerReloaded);
        assert!(!reloaded.explains(&reset(Way::First, at(99)), at(103)), "a reload breaks nothing");
        let unanswered = |asked| Response { ending: Ending::Unanswered, ..reset(Way::First, asked) };
        assert!(reloaded.explains(&unanswered(at(130)), at(130)), "an old worker's connection may be closed late");
        let wrong = Response { ending: Ending::Wrong(3), ..reset(Way::First, at(100)) };
        assert!(!killed.explains(&wrong, at(101)), "nothing explains a wrong byte");
    }
}
