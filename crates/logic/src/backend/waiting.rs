//! Waiting claims: claims of bytes of this machine's store whose payload cannot be sent now. Either the limit of
//! senders is reached, or the client's sender is busy on another connection. (A client that connects to two servers
//! from one port can have only one sender.) A refusal would reset the client if the program has already written more
//! bytes after the payload. So the claim waits, and the frontend's program is told to make no more claims for a while.
//! A *claim* is a frontend's message that asks for a payload on its client's connection. A *store* has the payloads of
//! a machine's programs. A *sender* is this machine's kernel socket for that client. A *peer* is a frontend's agent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use shunt_wire::local::Reason;
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Claim, Claimant};

/// Longest time that a claim waits. A client that gets nothing for longer may give up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Number of places for waiting claims of all peers. A peer gets another place if it has fewer places than are free, or
/// fewer than MOST_OF_ITS_OWN.
const MOST: usize = 4096;
const MOST_OF_ITS_OWN: usize = 64;

/// One waiting claim.
pub struct Waits {
    /// The claim, which may hold keys.
    pub claim: Claim,
    /// Ranges of the store that the claim's payload consists of.
    pub parts: Parts,
    /// Numbers of the peer, the server connection there (worker number) and the handoff that the claim is for.
    pub claimant: Claimant,
    /// Time until which the claim may wait.
    pub until: Instant,
    /// Reason of the wait: [`Reason::Limit`] if no sender is free, or [`Reason::Busy`] if another connection of the
    /// claim's client has the sender.
    pub reason: Reason,
}

/// Waiting claims, the oldest first. Each is in a separate box, because it may hold keys: the agent's allocator erases
/// a box that is freed.
#[derive(Default)]
pub struct Waiting {
    claims: VecDeque<Box<Waits>>,
    /// Number of claims that are still to be examined in this round.
    left: usize,
}

impl Waiting {
    /// Number of claims.
    pub fn len(&self) -> usize {
        self.claims.len()
    }

    /// Returns whether no claim waits.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// Returns whether another claim of this peer may have to wait: one of the peer's claims waits, or any peer's claim
    /// waits for a sender. Other peers' claims that wait because their clients are busy do not matter.
    pub fn delays(&self, peer: u32) -> bool {
        self.claims.iter().any(|waits| waits.claimant.peer == peer || waits.reason == Reason::Limit)
    }

    /// Returns whether there is room for another waiting claim of this peer.
    fn has_room(&self, peer: u32) -> bool {
        let own = self.claims.iter().filter(|waits| waits.claimant.peer == peer).count();
        own < MOST.saturating_sub(self.claims.len()).max(MOST_OF_ITS_OWN)
    }

    /// Adds a claim that was refused for `reason`, if it can wait. Returns whether it can.
    pub fn add(&mut self, claim: &Claim, parts: &Parts, claimant: Claimant, reason: Reason, now: Instant) -> bool {
        let can_wait = matches!(reason, Reason::Limit | Reason::Busy) && self.has_room(claimant.peer);
        if can_wait {
            let waits = Waits { claim: *claim, parts: *parts, claimant, until: now + PATIENCE, reason };
            self.claims.push_back(Box::new(waits));
        }
        can_wait
    }

    /// Begins a round, in which each claim that waits now is examined once.
    pub fn begin_round(&mut self) {
        self.left = self.claims.len();
    }

    /// Takes the next claim of the round, or returns `None` at the round's end.
    pub fn next_of_round(&mut self) -> Option<Box<Waits>> {
        self.left = self.left.checked_sub(1)?;
        self.claims.pop_front()
    }

    /// Puts a claim back behind all others, with the reason for which it waits now. So the next round has the same
    /// order.
    pub fn keep(&mut self, mut waits: Box<Waits>, reason: Reason) {
        waits.reason = reason;
        self.claims.push_back(waits);
    }

    /// Removes the oldest claim. Returns the handoff that it was made for.
    pub fn pop(&mut self) -> Option<Claimant> {
        self.claims.pop_front().map(|waits| waits.claimant)
    }

    /// Removes the claims for which `is_gone` is true: their peer is lost, or has given them up.
    pub fn forget(&mut self, is_gone: impl Fn(&Claimant) -> bool) {
        let (mut position, mut gone) = (0, 0);
        self.claims.retain(|waits| {
            let is_left = position < self.left;
            position += 1;
            let is_gone = is_gone(&waits.claimant);
            gone += usize::from(is_gone && is_left);
            !is_gone
        });
        self.left -= gone;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn waiting(handoffs: &[u64], now: Instant) -> Waiting {
        let mut waiting = Waiting::default();
        for handoff in handoffs {
            let mut claim = Claim::new_zeroed();
            claim.handoff = (*handoff).into();
            let claimant = Claimant::of(0, &claim);
            assert!(waiting.add(&claim, &Parts::new(&[Default::default()]).unwrap(), claimant, Reason::Limit, now));
        }
        waiting
    }

    #[test]
    fn each_is_looked_at_once_in_a_round_and_the_order_stays() {
        let mut waiting = waiting(&[1, 2, 3], Instant::now());
        assert!(waiting.next_of_round().is_none(), "no round has begun");
        for _ in 0..3 {
            waiting.begin_round();
            let mut seen = Vec::new();
            while let Some(waits) = waiting.next_of_round() {
                seen.push(waits.claimant.handoff);
                waiting.keep(waits, Reason::Limit);
            }
            assert_eq!(seen, [1, 2, 3]);
        }
    }

    #[test]
    fn only_what_may_find_a_place_later_waits_and_only_so_many() {
        let now = Instant::now();
        let mut waiting = waiting(&[1], now);
        let parts = Parts::new(&[Default::default()]).unwrap();
        let claim = Claim::new_zeroed();
        let mut add = |peer, reason| waiting.add(&claim, &parts, Claimant::of(peer, &claim), reason, now);
        assert!(!add(0, Reason::NotAllowed) && !add(0, Reason::Unreachable) && add(0, Reason::Busy));
        assert_eq!((0..2 * MOST).filter(|_| add(0, Reason::Limit)).count(), MOST / 2 - 2, "there is room for others");
        let fewest = (1..100).map(|peer| (0..MOST).filter(|_| add(peer, Reason::Limit)).count()).min();
        assert_eq!(fewest, Some(MOST_OF_ITS_OWN), "however many others wait");
    }

    #[test]
    fn only_a_lack_of_senders_is_a_reason_for_other_peers_to_wait() {
        let (now, parts, claim) = (Instant::now(), Parts::new(&[Default::default()]).unwrap(), Claim::new_zeroed());
        let mut waiting = Waiting::default();
        assert!(waiting.add(&claim, &parts, Claimant::of(0, &claim), Reason::Busy, now));
        assert!(waiting.delays(0) && !waiting.delays(1));
        waiting.begin_round();
        let waits = waiting.next_of_round().unwrap();
        waiting.keep(waits, Reason::Limit);
        assert!(waiting.delays(0) && waiting.delays(1));
    }

    #[test]
    fn what_is_forgotten_in_a_round_is_not_looked_at() {
        let mut waiting = waiting(&[1, 2, 3], Instant::now());
        waiting.begin_round();
        let first = waiting.next_of_round().unwrap();
        waiting.keep(first, Reason::Limit);
        waiting.forget(|of| of.handoff == 2);
        assert_eq!(waiting.next_of_round().map(|waits| waits.claimant.handoff), Some(3));
        assert!(waiting.next_of_round().is_none(), "the first one waits for the next round");
        assert_eq!(waiting.pop().map(|claimant| claimant.handoff), Some(1));
    }
}
