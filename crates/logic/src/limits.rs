//! Limits on the work of an agent. When a limit is reached, new responses are *relayed*: their bodies come through all
//! tiers, as without Shunt. Servers see on the board (memory that the agent writes) whether a limit is reached, so no
//! response has to ask the agent. A *handoff* lets another machine send a payload on a client's connection. A *consent*
//! is a request's header field that permits this. An *offer* is a payload that this machine holds ready for a *claim*,
//! a peer's message that asks for the payload. A *fetch* brings a payload through both agents to the frontend's server.
//! A *sender* is this machine's kernel socket for a client of a *peer*, another machine's agent. A *turn* is one pass
//! of the daemon's event loop. A limit's state is its *gate*, which is open or closed.
//!
//! Limits are soft where a response could break otherwise. A response that has a consent or an offer when a limit is
//! reached is still handed off. So such a limit may be exceeded by the work that is under way at that moment.
//! Descriptors are the exception: the last ones are kept for work that has already begun.
//!
//! Any consent may lead to a fetch. So a frontend that has reached its limit of fetches gives no consents, and a
//! backend that has reached its limit makes no offers. The limit for one peer stops only offers between the two
//! machines: a frontend that reaches it tells the peer to make none (CLOSED). So a peer that delays fetches can keep
//! other peers' payloads from being handed off, but it makes no response fail.

use std::ops::{AddAssign, SubAssign};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shunt_wire::local::closed;

use crate::rate::Seldom;

/// Number of descriptors that stay free for work that has already begun: sessions, answers, fetches.
pub const SPARE_DESCRIPTORS: u64 = 64;
/// Divisor of a limit: new work between two checks may exceed a limit by one SLACK-th of the limit, or by 1. So not
/// each offer causes a check, because a check of all limits costs more than an offer.
const SLACK: u64 = 32;

/// Section `[limits]` of the configuration.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Most handoffs of this machine's servers that are not over.
    pub handoffs: u64,
    /// Most handoffs to one peer that are not over.
    pub handoffs_per_peer: u64,
    /// Most payloads that are offered or being sent by this machine.
    pub offers: u64,
    /// Most payloads for one peer that are offered or being sent.
    pub offers_per_peer: u64,
    /// Most bytes of all payloads that are offered or being sent by this machine.
    pub bytes: u64,
    /// Most bytes, for one peer, of payloads that are offered or being sent.
    pub bytes_per_peer: u64,
    /// Most fetches under way in each direction: those of this machine's servers, and those that peers ask for.
    pub fetches: usize,
    /// Most fetches under way with one peer, in each direction.
    pub fetches_per_peer: usize,
    /// Most connections of this machine's servers, two for each nginx worker. A user gets no more connections than are
    /// left for others, so at most half of this limit, or four if that is more. With all in use, there is none for
    /// anybody.
    pub servers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handoffs: 32768,
            handoffs_per_peer: 16384,
            offers: 32768,
            offers_per_peer: 16384,
            bytes: 16 << 40,
            bytes_per_peer: 8 << 40,
            fetches: 4096,
            fetches_per_peer: 1024,
            servers: 1024,
        }
    }
}

impl Limits {
    /// Returns a sentence that names an error in the limits and says what to do, or `None` if there is no error.
    pub fn problem(&self) -> Option<String> {
        let Limits { handoffs, offers, bytes, fetches, servers, .. } = *self;
        let zero = [("handoffs", handoffs), ("offers", offers), ("bytes", bytes), ("servers", servers as u64)];
        if let Some((name, _)) = zero.iter().find(|(_, value)| *value == 0) {
            return Some(format!("[limits] {name} = 0 relays everything: leave out [frontend] or [backend] instead"));
        }
        let Limits { handoffs_per_peer, offers_per_peer, bytes_per_peer, .. } = *self;
        let per_peer = [
            ("handoffs_per_peer", handoffs_per_peer),
            ("offers_per_peer", offers_per_peer),
            ("bytes_per_peer", bytes_per_peer),
        ];
        if let Some((name, _)) = per_peer.iter().find(|(_, value)| *value == 0) {
            return Some(format!(
                "[limits] {name} = 0 relays everything: write a number above 0, or leave the key out"
            ));
        }
        let none = [("fetches", fetches), ("fetches_per_peer", self.fetches_per_peer)];
        let none = none.iter().find(|(_, value)| *value == 0);
        none.map(|(name, _)| {
            format!("[limits] {name} = 0 makes each response fail that needs its body here: write a number above 0")
        })
    }
}

/// Number and size of payloads that are offered or being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Number of payloads.
    pub payloads: u64,
    /// Sum of the payloads' lengths, in bytes.
    pub bytes: u64,
    /// Number of those payloads that have a sender.
    pub senders: u64,
}

impl Load {
    /// Returns the load of one payload of this length that is offered and not claimed.
    pub fn waiting(bytes: u64) -> Self {
        Self { payloads: 1, bytes, senders: 0 }
    }

    /// Returns the load of one payload of this length that is being sent.
    pub fn sending(bytes: u64) -> Self {
        Self { payloads: 1, bytes, senders: 1 }
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.payloads += other.payloads;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.senders += other.senders;
    }
}

/// Subtracts a load that was added before.
impl SubAssign for Load {
    fn sub_assign(&mut self, other: Self) {
        self.payloads -= other.payloads;
        self.bytes = self.bytes.saturating_sub(other.bytes);
        self.senders -= other.senders;
    }
}

/// Resources in use for one peer, or for all peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Handoffs of this machine's servers.
    pub handoffs: u64,
    /// Payloads that are offered or being sent.
    pub sent: Load,
    /// Fetches of this machine's servers.
    pub fetches_out: u64,
    /// Fetches that the peer has asked this machine for.
    pub fetches_in: u64,
}

impl AddAssign for Use {
    fn add_assign(&mut self, other: Self) {
        self.handoffs += other.handoffs;
        self.sent += other.sent;
        self.fetches_out += other.fetches_out;
        self.fetches_in += other.fetches_in;
    }
}

/// File descriptors of the agent's process.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    /// Number of open descriptors.
    pub open: u64,
    /// Most descriptors (RLIMIT_NOFILE).
    pub limit: u64,
}

impl Descriptors {
    /// Returns the number of open descriptors at which new work is refused.
    fn room(self) -> u64 {
        self.limit.saturating_sub(SPARE_DESCRIPTORS).max(1)
    }
}

/// A limit, and how much of it is used.
#[derive(Clone, Copy)]
struct Bound<'a> {
    /// The setting that an operator has to raise, with its section.
    name: &'static str,
    /// Name of the peer, if the limit is one for each peer.
    peer: Option<&'a str>,
    used: u64,
    limit: u64,
}

/// Gate of one limit. It closes when the use reaches the limit, and opens when the use is below nine tenths of the
/// limit (rounded up).
#[derive(Clone, Copy, Debug, Default)]
struct Gate {
    is_closed: bool,
    said: Seldom,
}

impl Gate {
    /// Compares the use with the limit. Returns whether the gate is closed now. Counts each closing in `closings`, and
    /// logs it at most once per [`SELDOM`](crate::rate::SELDOM).
    fn look(&mut self, bound: &Bound<'_>, closings: &mut u64, now: Instant) -> bool {
        let Bound { name, peer, used, limit } = *bound;
        let least = if self.is_closed { limit - limit / 10 } else { limit };
        let was_closed = std::mem::replace(&mut self.is_closed, used >= least);
        let closes = self.is_closed && !was_closed;
        *closings += u64::from(closes);
        if closes && self.said.allows(now) {
            tracing::warn!(peer, used, limit, "limit reached: new responses are relayed for now; raise {name}");
        }
        self.is_closed
    }
}

/// Number of times that each limit was reached. `shunt stats` shows the numbers under these names (`agent.limited`).
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Closings {
    pub handoffs: u64,
    pub handoffs_per_peer: u64,
    pub offers: u64,
    pub offers_per_peer: u64,
    pub bytes: u64,
    pub bytes_per_peer: u64,
    pub senders: u64,
    pub descriptors: u64,
    pub fetches: u64,
    pub fetches_per_peer: u64,
}

/// Gates of one peer.
#[derive(Debug, Default)]
struct PeerGates {
    handoffs: Gate,
    offers: Gate,
    bytes: Gate,
    fetches_out: Gate,
    fetches_in: Gate,
    /// The peer's agent has said (CLOSED) that it takes no offers.
    is_full: bool,
    /// The peer has been told to make no offers.
    is_told: bool,
    said_full: Seldom,
}

/// All gates, and how much new work may come before the next check.
#[derive(Debug)]
pub struct Gates {
    handoffs: Gate,
    offers: Gate,
    bytes: Gate,
    senders: Gate,
    descriptors: Gate,
    fetches_out: Gate,
    fetches_in: Gate,
    peers: Vec<PeerGates>,
    /// Number of times that each gate was closed.
    pub closings: Closings,
    /// Use of all peers together at the last check.
    pub total: Use,
    /// The limits are to be checked at the end of the turn. Something other than new handoffs and offers has happened,
    /// for example a peer's CLOSED.
    is_news: bool,
    handoffs_left: u64,
    offers_left: u64,
    bytes_left: u64,
}

/// Result of the check of one peer's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// Bits of [`closed`] for the peer's entry on the board.
    pub closed: u32,
    /// This agent has reached its limit of handoffs to the peer, or of fetches from it.
    pub is_full: bool,
}

impl Gates {
    /// Returns open gates for this number of peers.
    pub fn new(peers: usize) -> Self {
        let [handoffs, offers, bytes, senders, descriptors, fetches_out, fetches_in] = [Gate::default(); 7];
        Self {
            handoffs,
            offers,
            bytes,
            senders,
            descriptors,
            fetches_out,
            fetches_in,
            peers: (0..peers).map(|_| PeerGates::default()).collect(),
            closings: Closings::default(),
            total: Use::default(),
            is_news: false,
            handoffs_left: 0,
            offers_left: 0,
            bytes_left: 0,
        }
    }

    /// Adds a peer.
    pub fn add_peer(&mut self) {
        self.peers.push(PeerGates::default());
    }

    /// Subtracts a handoff from the new work that may come before the next check.
    pub fn note_handoff(&mut self) {
        self.handoffs_left = self.handoffs_left.saturating_sub(1);
    }

    /// Subtracts an offer from the new work that may come before the next check.
    pub fn note_offer(&mut self, length: u64) {
        self.offers_left = self.offers_left.saturating_sub(1);
        self.bytes_left = self.bytes_left.saturating_sub(length);
    }

    /// Returns whether the limits are to be checked at the end of this turn. They are if there is news, or if so much
    /// new work has come that a limit may be reached. If a limit of handoffs, offers or bytes for all peers is already
    /// reached, new work causes no check before the next tick (10 a second).
    pub fn is_look_due(&self) -> bool {
        let closed = self.handoffs.is_closed || self.offers.is_closed || self.bytes.is_closed;
        self.is_news || !closed && (self.handoffs_left == 0 || self.offers_left == 0 || self.bytes_left == 0)
    }

    /// Notes whether a peer takes no offers of this machine (`is_full`). The limits are checked at the end of the turn.
    pub fn set_full(&mut self, peer: usize, is_full: bool) {
        self.peers[peer].is_full = is_full;
        self.set_news();
    }

    /// Has the limits checked at the end of the turn.
    pub fn set_news(&mut self) {
        self.is_news = true;
    }

    /// Checks the limits that hold for all peers together. Returns the bits of [`closed`] for the board's head.
    /// `most_senders` is `senders` in `[backend]`.
    pub fn look(
        &mut self,
        used: &[Use],
        limits: &Limits,
        most_senders: u64,
        descriptors: Descriptors,
        now: Instant,
    ) -> u32 {
        self.is_news = false;
        let mut total = Use::default();
        used.iter().for_each(|one| total += *one);
        self.total = total;
        let most = |of: fn(&Use) -> u64| used.iter().map(of).max().unwrap_or(0);
        let least = |limit, used, limit_of_peer, of| left(limit, used).min(left(limit_of_peer, most(of)));
        let Load { payloads, bytes: length, senders: busy } = total.sent;
        self.handoffs_left = least(limits.handoffs, total.handoffs, limits.handoffs_per_peer, |one| one.handoffs);
        self.offers_left = least(limits.offers, payloads, limits.offers_per_peer, |one| one.sent.payloads);
        self.bytes_left = least(limits.bytes, length, limits.bytes_per_peer, |one| one.sent.bytes);
        let closings = &mut self.closings;
        let of = |name, used, limit| Bound { name, peer: None, used, limit };
        let fetches = |used| of("`fetches` in [limits]", used, limits.fetches as u64);
        let handoffs = of("`handoffs` in [limits]", total.handoffs, limits.handoffs);
        let handoffs = self.handoffs.look(&handoffs, &mut closings.handoffs, now)
            | self.fetches_out.look(&fetches(total.fetches_out), &mut closings.fetches, now);
        let open = of("LimitNOFILE= in shuntd's unit", descriptors.open, descriptors.room());
        let offers = of("`offers` in [limits]", payloads, limits.offers);
        let bytes = of("`bytes` in [limits]", length, limits.bytes);
        let senders = of("`senders` in [backend]", busy, most_senders);
        let offers = self.offers.look(&offers, &mut closings.offers, now)
            | self.bytes.look(&bytes, &mut closings.bytes, now)
            | self.senders.look(&senders, &mut closings.senders, now)
            | self.descriptors.look(&open, &mut closings.descriptors, now)
            | self.fetches_in.look(&fetches(total.fetches_in), &mut closings.fetches, now);
        bits(handoffs, offers)
    }

    /// Checks the limits of one peer.
    pub fn look_at_peer(&mut self, peer: usize, name: &str, used: &Use, limits: &Limits, now: Instant) -> Looked {
        let (gates, closings) = (&mut self.peers[peer], &mut self.closings);
        let of = |setting, used, limit| Bound { name: setting, peer: Some(name), used, limit };
        let fetches = |used| of("`fetches_per_peer` in [limits]", used, limits.fetches_per_peer as u64);
        let offers = of("`offers_per_peer` in [limits]", used.sent.payloads, limits.offers_per_peer);
        let bytes = of("`bytes_per_peer` in [limits]", used.sent.bytes, limits.bytes_per_peer);
        let handoffs = of("`handoffs_per_peer` in [limits]", used.handoffs, limits.handoffs_per_peer);
        let offers = gates.offers.look(&offers, &mut closings.offers_per_peer, now)
            | gates.bytes.look(&bytes, &mut closings.bytes_per_peer, now)
            | gates.fetches_in.look(&fetches(used.fetches_in), &mut closings.fetches_per_peer, now)
            | gates.is_full;
        let is_full = gates.handoffs.look(&handoffs, &mut closings.handoffs_per_peer, now)
            | gates.fetches_out.look(&fetches(used.fetches_out), &mut closings.fetches_per_peer, now);
        Looked { closed: bits(false, offers), is_full }
    }

    /// Returns whether this machine has reached its limit of handoffs to a peer, or of fetches from it. The peer then
    /// has to stop making offers.
    pub fn is_full_of(&self, peer: usize) -> bool {
        self.peers[peer].handoffs.is_closed || self.peers[peer].fetches_out.is_closed
    }

    /// Returns whether a peer has been told to make no offers.
    pub fn was_told(&self, peer: usize) -> bool {
        self.peers[peer].is_told
    }

    /// Notes whether a peer has been told to make no offers.
    pub fn note_told(&mut self, peer: usize, is_full: bool) {
        self.peers[peer].is_told = is_full;
    }

    /// Logs that all senders were in use when a claim came. A check of the limits may miss that, because a sender may
    /// be free again when the check comes.
    pub fn say_senders(&mut self, limit: usize, now: Instant) {
        if self.senders.said.allows(now) {
            tracing::warn!(limit, "limit reached: no sender was free for a claim; raise `senders` in [backend]");
        }
    }

    /// Logs that a peer takes no offers, if that is so, at most once per [`SELDOM`](crate::rate::SELDOM). The reason is
    /// in the peer's log.
    pub fn say_full(&mut self, peer: usize, name: &str, now: Instant) {
        let gates = &mut self.peers[peer];
        if gates.is_full && gates.said_full.allows(now) {
            tracing::info!(
                peer = name,
                "this peer takes no offers for now, and bodies are relayed: it has reached a limit or is draining; \
                 its agent's log says which"
            );
        }
    }
}

/// Returns the board's bits (module [`closed`]) for these states of two gates: whether handoffs are closed, and whether
/// offers are.
pub fn bits(handoffs: bool, offers: bool) -> u32 {
    (u32::from(handoffs) * closed::HANDOFFS) | (u32::from(offers) * closed::OFFERS)
}

/// Returns how much new work may come before the next check: the unused part of the limit, but at least one SLACK-th of
/// the limit, and at least 1.
fn left(limit: u64, used: u64) -> u64 {
    limit.saturating_sub(used).max(limit / SLACK).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_gate_opens_later_than_it_closes() {
        let (mut gate, mut closings, now) = (Gate::default(), 0, Instant::now());
        let of = |used| Bound { name: "", peer: None, used, limit: 100 };
        let states = [99, 100, 95, 91, 90, 89, 99, 120].map(|used| gate.look(&of(used), &mut closings, now));
        assert_eq!(states, [false, true, true, true, true, false, false, true]);
        assert_eq!(closings, 2);
    }

    #[test]
    fn a_peer_that_speaks_often_has_one_look_a_turn() {
        let mut gates = Gates::new(1);
        (gates.handoffs_left, gates.offers_left, gates.bytes_left) = (1, 1, 1);
        assert!(!gates.is_look_due());
        (0..1000).for_each(|_| gates.set_full(0, true));
        assert!(gates.is_look_due());
    }

    #[test]
    fn the_next_look_comes_before_a_limit_is_passed_by_much() {
        assert_eq!(left(1000, 0), 1000);
        assert_eq!(left(1000, 990), 31);
        assert_eq!(left(10, 10), 1);
    }

    /// Checks what the limits of handoffs, offers, bytes, senders and fetches close, and for which peers.
    #[test]
    fn each_limit_closes_its_own_gate() {
        let most = Limits {
            handoffs: 10,
            handoffs_per_peer: 5,
            offers: 10,
            offers_per_peer: 5,
            bytes: 1000,
            bytes_per_peer: 500,
            fetches: 10,
            fetches_per_peer: 5,
            servers: 10,
        };
        let sent = |payloads, bytes, senders| Use { sent: Load { payloads, bytes, senders }, ..Use::default() };
        let (both, offers, handoffs) = (closed::OFFERS | closed::HANDOFFS, closed::OFFERS, closed::HANDOFFS);
        let cases = [
            (Use::default(), 1, (0, 0, false)),
            (Use { handoffs: 4, ..Use::default() }, 2, (0, 0, false)),
            (Use { handoffs: 5, ..Use::default() }, 2, (handoffs, 0, true)),
            (sent(5, 0, 0), 1, (0, offers, false)),
            (sent(5, 0, 0), 2, (offers, offers, false)),
            (sent(1, 500, 0), 1, (0, offers, false)),
            (sent(1, 500, 0), 2, (offers, offers, false)),
            (sent(1, 1, 7), 1, (offers, 0, false)),
            (Use { fetches_in: 5, ..Use::default() }, 1, (0, offers, false)),
            (Use { fetches_in: 5, ..Use::default() }, 2, (offers, offers, false)),
            (Use { fetches_out: 5, ..Use::default() }, 1, (0, 0, true)),
            (Use { fetches_out: 5, ..Use::default() }, 2, (handoffs, 0, true)),
            (Use { fetches_out: 5, fetches_in: 5, ..Use::default() }, 2, (both, offers, true)),
        ];
        for (used, peers, expected) in cases {
            let (mut gates, now) = (Gates::new(3), Instant::now());
            let mut all = [Use::default(); 3];
            all[..peers].fill(used);
            let descriptors = Descriptors { open: 10, limit: 1024 };
            let closed = gates.look(&all, &most, 7, descriptors, now);
            let Looked { closed: of_peer, is_full } = gates.look_at_peer(0, "be", &all[0], &most, now);
            assert_eq!((closed, of_peer, is_full), expected, "{used:?} of {peers}");
            // Nothing is closed for a peer that uses nothing.
            assert_eq!(gates.look_at_peer(2, "other", &all[2], &most, now), Looked { closed: 0, is_full: false });
            let later = now + Duration::from_secs(1);
            assert_eq!(gates.look(&[Use::default(); 3], &most, 7, descriptors, later), 0, "{used:?}");
        }
    }

    #[test]
    fn the_last_descriptors_are_for_what_runs() {
        let (mut gates, now) = (Gates::new(0), Instant::now());
        let mut look = |open| gates.look(&[], &Limits::default(), 1, Descriptors { open, limit: 1024 }, now);
        assert_eq!((look(1024 - SPARE_DESCRIPTORS - 1), look(1024 - SPARE_DESCRIPTORS)), (0, closed::OFFERS));
    }

    #[test]
    fn zero_is_no_limit() {
        assert_eq!(Limits::default().problem(), None);
        let zero = Limits::default;
        for limits in [
            Limits { handoffs: 0, ..zero() },
            Limits { offers: 0, ..zero() },
            Limits { bytes: 0, ..zero() },
            Limits { handoffs_per_peer: 0, ..zero() },
            Limits { offers_per_peer: 0, ..zero() },
            Limits { bytes_per_peer: 0, ..zero() },
            Limits { fetches: 0, ..zero() },
            Limits { fetches_per_peer: 0, ..zero() },
            Limits { servers: 0, ..zero() },
        ] {
            assert!(limits.problem().is_some_and(|problem| problem.contains("= 0")), "{limits:?}");
        }
    }
}
