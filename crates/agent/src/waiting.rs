//! Claims of bytes of this machine's store that there is no place for now: as many are being sent as may be, or the client's
//! connection with another server has the one port that there is. They wait. To refuse one would reset its client, if the
//! program has written on behind it; and the program is told to make no more for a while.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use shunt_handoff::sender::{Claimant, Failure};
use shunt_wire::local::Reason;
use shunt_wire::parts::Parts;
use shunt_wire::peer::Claim;

use crate::agent::Agent;

/// How long one waits: a client that gets nothing for longer may give up.
const PATIENCE: Duration = Duration::from_secs(30);
/// As many as there may be.
const MOST: usize = 4096;

struct Waits {
    peer: usize,
    claim: Claim,
    parts: Parts,
    claimant: Claimant,
    until: Instant,
}

/// All of them, the oldest first. Each in a place of its own, which is erased when it is over: there may be keys in it.
#[derive(Default)]
pub(crate) struct WaitingClaims(VecDeque<Box<Waits>>);

impl WaitingClaims {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Agent {
    /// Whether a claim would not have to wait.
    pub(crate) fn has_place(&self) -> Result<(), Reason> {
        if self.waiting.0.is_empty() && self.drain.is_none() { Ok(()) } else { Err(Reason::Limit) }
    }

    /// False: it cannot wait, for this reason.
    pub(crate) fn wait_for_place(&mut self, claim: &Claim, parts: &Parts, claimant: Claimant, reason: Reason) -> bool {
        if !matches!(reason, Reason::Limit | Reason::Busy) || self.waiting.0.len() >= MOST {
            return false;
        }
        let peer = claimant.peer as usize;
        self.counts.claims_waited += 1;
        let until = self.now + PATIENCE;
        self.waiting.0.push_back(Box::new(Waits { peer, claim: *claim, parts: *parts, claimant, until }));
        self.answer(peer, claimant.worker, claimant.handoff, reason as u32);
        true
    }

    /// Those that find a place now, ten times a second, and those that have waited too long.
    pub(crate) fn tend_waiting(&mut self) {
        for waits in std::mem::take(&mut self.waiting.0) {
            let Waits { peer, claim, parts, claimant, until } = &*waits;
            self.keys_passed |= claim.suite.get() != 0;
            match self.send_payload(*peer, claim, Some(parts), *claimant) {
                Ok(progress) => self.follow(progress),
                Err(Reason::Limit | Reason::Busy) if self.now < *until => self.waiting.0.push_back(waits),
                Err(reason) => self.report(Failure { claimant: *claimant, reason }),
            }
        }
    }

    /// This agent ends.
    pub(crate) fn give_up_waiting(&mut self) {
        for waits in std::mem::take(&mut self.waiting.0) {
            self.report(Failure { claimant: waits.claimant, reason: Reason::PeerLost });
        }
    }

    /// A peer is lost, or has given handoffs up.
    pub(crate) fn forget_waiting(&mut self, is_gone: impl Fn(&Claimant) -> bool) {
        self.waiting.0.retain(|waits| !is_gone(&waits.claimant));
    }
}
