//! How much an agent takes on, and what happens then: new responses are relayed. A server learns it from the board
//! without a message, so nothing of this costs a response anything.
//!
//! Limits are soft where a response could break otherwise: what was consented to or offered when a limit was reached
//! still goes through, so that each may be passed by what is under way at that moment. Descriptors are the exception:
//! the last ones are kept for what already runs.
//!
//! Any consent may lead to a fetch. So a limit of fetches is one of consents (here, for all) and of offers (the backend's,
//! for one peer or all): whoever holds fetches up costs others their shortcuts, and no response.

use std::time::Instant;

use serde::Deserialize;
use shunt_handoff::sender::{EVICTED_AT_ONCE, Load};
use shunt_wire::local::{BOARD_PEERS, closed};
use shunt_wire::peer::Closed;

use crate::agent::Agent;
use crate::incoming::Seldom;

/// Descriptors that stay free for what already runs: sessions, answers, fetches.
const SPARE_DESCRIPTORS: u64 = 64;
/// Parked senders leave this part of all descriptors free, for what is new until the next look.
const FREE_PART: u64 = 8;
/// A look at everything costs more than an offer: between two looks a limit may be passed by this part of it.
const SLACK: u64 = 32;

/// `[limits]`
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Handoffs of this machine's servers that are not over.
    pub handoffs: u64,
    /// Of those, to one peer.
    pub handoffs_per_peer: u64,
    /// Payloads that are offered or being sent here.
    pub offers: u64,
    /// Of those, for one peer.
    pub offers_per_peer: u64,
    /// Their lengths.
    pub bytes: u64,
    /// Of those, for one peer.
    pub bytes_per_peer: u64,
    /// Payloads that are fetched, in each direction.
    pub fetches: usize,
    /// Of those, with one peer.
    pub fetches_per_peer: usize,
    /// Connections of this machine's servers, two for each worker. A user gets no more than are left for others: half.
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
    /// What is wrong with them.
    pub(crate) fn problem(&self) -> Option<String> {
        let Limits { handoffs, offers, bytes, fetches, servers, .. } = *self;
        let zero = [("handoffs", handoffs), ("offers", offers), ("bytes", bytes), ("servers", servers as u64)];
        if let Some((name, _)) = zero.iter().find(|(_, value)| *value == 0) {
            return Some(format!("[limits] {name} = 0 relays everything: leave out [frontend] or [backend] instead"));
        }
        (fetches == 0).then(|| "[limits] fetches = 0: a response that needs its body here would fail".into())
    }
}

/// A limit, and how much of it is used.
#[derive(Clone, Copy)]
struct Bound<'a> {
    /// Names what an operator has to raise, and where.
    name: &'static str,
    /// Whose, where each peer has its own.
    peer: Option<&'a str>,
    used: u64,
    limit: u64,
}

/// Closes at a limit and opens below 9 tenths of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    is_closed: bool,
    said: Seldom,
}

impl Gate {
    /// Whether it is closed now; counts the closing, and tells of it now and then.
    fn look(&mut self, bound: &Bound<'_>, closings: &mut u64, now: Instant) -> bool {
        let Bound { name, peer, used, limit } = *bound;
        let least = if self.is_closed { limit - limit / 10 } else { limit };
        let was_closed = std::mem::replace(&mut self.is_closed, used >= least);
        let closes = self.is_closed && !was_closed;
        *closings += u64::from(closes);
        if closes && self.said.may_speak(now) {
            tracing::warn!(peer, used, limit, "limit reached: what is new is relayed for now; raise {name}");
        }
        self.is_closed
    }
}

/// How often each limit was reached.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Closings {
    pub(crate) handoffs: u64,
    pub(crate) handoffs_per_peer: u64,
    pub(crate) offers: u64,
    pub(crate) offers_per_peer: u64,
    pub(crate) bytes: u64,
    pub(crate) bytes_per_peer: u64,
    pub(crate) senders: u64,
    pub(crate) descriptors: u64,
    pub(crate) fetches: u64,
    pub(crate) fetches_per_peer: u64,
}

/// What one peer, or all of them, use at the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Use {
    pub(crate) handoffs: u64,
    pub(crate) sent: Load,
    pub(crate) fetches_out: u64,
    pub(crate) fetches_in: u64,
}

#[derive(Default)]
struct PeerGates {
    handoffs: Gate,
    offers: Gate,
    bytes: Gate,
    fetches_out: Gate,
    fetches_in: Gate,
    /// Its agent has as many handoffs as it wants.
    is_full: bool,
    /// It has been told to offer nothing.
    is_told: bool,
    /// Limits how often the log says that its agent is full.
    said: Seldom,
}

impl PeerGates {
    /// There is so much with that peer that it is to make no more offers.
    fn has_enough(&self) -> bool {
        self.handoffs.is_closed || self.fetches_out.is_closed
    }
}

/// Where things stand.
pub(crate) struct Pressure {
    handoffs: Gate,
    offers: Gate,
    bytes: Gate,
    senders: Gate,
    descriptors: Gate,
    fetches_out: Gate,
    fetches_in: Gate,
    peers: Vec<PeerGates>,
    pub(crate) closings: Closings,
    pub(crate) total: Use,
    /// RLIMIT_NOFILE.
    pub(crate) descriptor_limit: u64,
    /// A peer has said something about limits.
    is_news: bool,
    /// All senders were looked at since the last tick, for want of descriptors.
    has_swept: bool,
    /// Until the next look, which is due at once when one of them is used up.
    handoffs_left: u64,
    offers_left: u64,
    bytes_left: u64,
}

impl Pressure {
    pub(crate) fn new(peers: usize) -> Self {
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
            descriptor_limit: u64::MAX,
            is_news: false,
            has_swept: false,
            handoffs_left: 0,
            offers_left: 0,
            bytes_left: 0,
        }
    }

    pub(crate) fn note_handoff(&mut self) {
        self.handoffs_left = self.handoffs_left.saturating_sub(1);
    }

    pub(crate) fn note_offer(&mut self, length: u64) {
        self.offers_left = self.offers_left.saturating_sub(1);
        self.bytes_left = self.bytes_left.saturating_sub(length);
    }

    /// Whether so much is new that a limit may be reached. One that is reached waits for the tick.
    pub(crate) fn is_look_due(&self) -> bool {
        let closed = self.handoffs.is_closed || self.offers.is_closed || self.bytes.is_closed;
        self.is_news || !closed && (self.handoffs_left == 0 || self.offers_left == 0 || self.bytes_left == 0)
    }

    fn descriptor_room(&self) -> u64 {
        self.descriptor_limit.saturating_sub(SPARE_DESCRIPTORS).max(1)
    }

    /// The peer has said whether its agent takes offers of this machine. Looked at once, when the turn ends.
    pub(crate) fn set_full(&mut self, peer: usize, is_full: bool) {
        self.peers[peer].is_full = is_full;
        self.is_news = true;
    }

    /// Whether the log is to have it that a peer takes no offers.
    fn is_full_said(&mut self, peer: usize, now: Instant) -> bool {
        let gates = &mut self.peers[peer];
        gates.is_full && gates.said.may_speak(now)
    }
}

/// How much more there may be before the next look.
fn left(limit: u64, used: u64) -> u64 {
    limit.saturating_sub(used).max(limit / SLACK).max(1)
}

impl Agent {
    /// Holds everything against its limits, and tells servers by the board and peers by a frame where one is reached
    /// or free again.
    pub(crate) fn look_at_limits(&mut self) {
        self.pressure.is_news = false;
        let peers = self.use_by_peer();
        let mut total = Use::default();
        for used in &peers {
            total.handoffs += used.handoffs;
            total.sent += used.sent;
            total.fetches_out += used.fetches_out;
            total.fetches_in += used.fetches_in;
        }
        self.pressure.total = total;
        self.keep_room();
        let limits = self.config.limits;
        let close = self.close_to_all(&total);
        let most = |of: fn(&Use) -> u64| peers.iter().map(of).max().unwrap_or(0);
        let pressure = &mut self.pressure;
        pressure.handoffs_left =
            left(limits.handoffs, total.handoffs).min(left(limits.handoffs_per_peer, most(|used| used.handoffs)));
        pressure.offers_left =
            left(limits.offers, total.sent.payloads).min(left(limits.offers_per_peer, most(|used| used.sent.payloads)));
        pressure.bytes_left =
            left(limits.bytes, total.sent.bytes).min(left(limits.bytes_per_peer, most(|used| used.sent.bytes)));
        self.set_closed(None, close);
        for (index, used) in peers.iter().enumerate() {
            self.look_at_peer(index, used);
        }
    }

    /// Bits of `closed` for everybody.
    fn close_to_all(&mut self, total: &Use) -> u32 {
        let (limits, now) = (self.config.limits, self.now);
        let open = self.descriptors_in_use();
        let most_senders = self.config.backend.as_ref().map_or(u64::MAX, |backend| backend.senders as u64);
        let room = self.pressure.descriptor_room();
        let Pressure { closings, descriptors, handoffs, offers, bytes, senders, fetches_out, fetches_in, .. } =
            &mut self.pressure;
        let most_fetches = limits.fetches as u64;
        let of = |name, used, limit| Bound { name, peer: None, used, limit };
        let fetches = |used| of("`fetches` in [limits]", used, most_fetches);
        let handoffs =
            handoffs.look(&of("`handoffs` in [limits]", total.handoffs, limits.handoffs), &mut closings.handoffs, now)
                | fetches_out.look(&fetches(total.fetches_out), &mut closings.fetches, now);
        let Load { payloads, bytes: length, senders: busy } = total.sent;
        let offers = offers.look(&of("`offers` in [limits]", payloads, limits.offers), &mut closings.offers, now)
            | bytes.look(&of("`bytes` in [limits]", length, limits.bytes), &mut closings.bytes, now)
            | senders.look(&of("`senders` in [backend]", busy, most_senders), &mut closings.senders, now)
            | descriptors.look(&of("LimitNOFILE= in shuntd's unit", open, room), &mut closings.descriptors, now)
            | fetches_in.look(&fetches(total.fetches_in), &mut closings.fetches, now);
        let ends = self.drain.is_some();
        (u32::from(handoffs | ends) * closed::HANDOFFS) | (u32::from(offers | ends) * closed::OFFERS)
    }

    fn look_at_peer(&mut self, index: usize, used: &Use) {
        let (limits, now) = (self.config.limits, self.now);
        let Pressure { peers, closings, .. } = &mut self.pressure;
        let gates = &mut peers[index];
        let peer = Some(self.peers[index].name.as_str());
        let of = |name, used, limit| Bound { name, peer, used, limit };
        let (payloads, length) = (used.sent.payloads, used.sent.bytes);
        let fetches = |used| of("`fetches_per_peer` in [limits]", used, limits.fetches_per_peer as u64);
        let offers = of("`offers_per_peer` in [limits]", payloads, limits.offers_per_peer);
        let offers = gates.offers.look(&offers, &mut closings.offers_per_peer, now);
        let bytes = of("`bytes_per_peer` in [limits]", length, limits.bytes_per_peer);
        let bytes = gates.bytes.look(&bytes, &mut closings.bytes_per_peer, now);
        let fetches_in = gates.fetches_in.look(&fetches(used.fetches_in), &mut closings.fetches_per_peer, now);
        let offers = offers | bytes | fetches_in | gates.is_full;
        let handoffs = of("`handoffs_per_peer` in [limits]", used.handoffs, limits.handoffs_per_peer);
        let handoffs = gates.handoffs.look(&handoffs, &mut closings.handoffs_per_peer, now);
        let fetches_out = gates.fetches_out.look(&fetches(used.fetches_out), &mut closings.fetches_per_peer, now);
        let is_full = handoffs | fetches_out;
        let was_told = gates.is_told;
        self.set_closed(Some(index), if offers { closed::OFFERS } else { 0 });
        if was_told != (is_full || self.takes_none_of(index)) {
            self.tell_full(index);
        }
    }

    /// Whether this agent ends, or no route leads to any of a peer's senders: what it offered would only be fetched.
    fn takes_none_of(&self, index: usize) -> bool {
        if self.drain.is_some() {
            return true;
        }
        let is_asked = self.uplinks.as_ref().is_some_and(|uplinks| uplinks.is_answered(index as u32));
        is_asked && self.frontend.as_ref().is_some_and(|frontend| frontend.families(index as u32) == 0)
    }

    fn set_closed(&mut self, peer: Option<usize>, bits: u32) {
        if let Err(error) = self.board.close(peer, bits) {
            tracing::error!(%error, "cannot write the board");
        }
    }

    /// A claim has found no place among the senders, which a look between two claims need not see.
    pub(crate) fn say_senders(&mut self) {
        let limit = self.config.backend.as_ref().map_or(0, |backend| backend.senders);
        if self.pressure.senders.said.may_speak(self.now) {
            tracing::warn!(
                limit,
                "limit reached: a claim has found no place among the senders; raise `senders` in [backend]"
            );
        }
    }

    /// A peer's limits are configured there, and its log names the one that is reached.
    pub(crate) fn say_full(&mut self, index: usize) {
        if self.pressure.is_full_said(index, self.now) {
            let peer = &self.peers[index].name;
            tracing::info!(
                peer,
                "this peer takes no offers for now: it has reached a limit, or is told to stop, as its agent's log says; bodies are relayed"
            );
        }
    }

    /// Has the peer's servers make us no more offers, or make them again. Also when its session begins.
    pub(crate) fn tell_full(&mut self, index: usize) {
        let full = self.pressure.peers[index].has_enough() || self.takes_none_of(index);
        self.pressure.peers[index].is_told = full;
        if let Some(session) = self.peers[index].session() {
            Closed { offers: u32::from(full).into() }.emit(session.transport.output());
            self.mark_unsent(index);
        }
    }

    /// A session with the peer begins: it has said nothing yet, and may not know what we said before.
    pub(crate) fn renew_limits(&mut self, index: usize) {
        self.pressure.set_full(index, false);
        self.pressure.peers[index].is_told = false;
        if self.pressure.peers[index].has_enough() || self.takes_none_of(index) {
            self.tell_full(index);
        }
    }

    /// One fetch more, in either direction: where that is the last one, nobody is to consent or to offer from now on.
    pub(crate) fn note_fetch(&mut self, peer: usize) {
        let of_peer = |used: &Use| used.fetches_out.max(used.fetches_in);
        let limits = self.config.limits;
        let most = self.fetches_out.len().max(self.fetches_in.len());
        if most >= limits.fetches
            || self.fetches_by_peer().get(peer).map_or(0, of_peer) >= limits.fetches_per_peer as u64
        {
            self.look_at_limits();
        }
    }

    fn fetches_by_peer(&self) -> Vec<Use> {
        let mut all = vec![Use::default(); self.peers.len().min(BOARD_PEERS)];
        for (_, out) in &self.fetches_out {
            all[out.peer()].fetches_out += 1;
        }
        for (_, serving) in &self.fetches_in {
            all[serving.peer()].fetches_in += 1;
        }
        all
    }

    fn use_by_peer(&self) -> Vec<Use> {
        let mut all = self.fetches_by_peer();
        for (_, server) in &self.servers {
            let Some(counters) = server.counters() else {
                continue;
            };
            for (used, handoffs) in all.iter_mut().zip(counters.read().handoffs) {
                used.handoffs += u64::from(handoffs);
            }
        }
        for (peer, load) in self.senders.iter().flat_map(|senders| senders.loads()) {
            all[peer as usize].sent += load;
        }
        for (peer, used) in all.iter_mut().enumerate() {
            used.sent += self.offers.load(peer as u32);
        }
        all
    }

    /// By what this agent holds: counting /proc/self/fd would cost more with every one of them.
    pub(crate) fn descriptors_in_use(&self) -> u64 {
        let senders = self.senders.as_ref().map_or(0, |senders| senders.len());
        let sending = self.senders.as_ref().map_or(0, |senders| senders.busy());
        let few = 32 + self.peers.len() + self.incoming.len();
        let servers = 2 * self.servers.len();
        let store = self.store.as_ref().map_or(0, |store| store.counters.descriptors()) + self.reaching.len();
        (few + store
            + servers
            + self.offers.len()
            + senders
            + sending
            + 3 * self.fetches_out.len()
            + 2 * self.fetches_in.len()) as u64
    }

    /// Whether one more file may be kept. A parked socket is worth less than what is new.
    pub(crate) fn has_descriptors(&mut self) -> bool {
        let limit = self.pressure.descriptor_limit;
        let has = |agent: &Self| agent.descriptors_in_use() + SPARE_DESCRIPTORS / 2 < limit;
        if !has(self) {
            self.make_room(EVICTED_AT_ONCE as u64);
        }
        has(self)
    }

    /// Before the descriptors are used up. Once in each tick: closes as many parked senders as would soon be in the way.
    fn keep_room(&mut self) {
        self.pressure.has_swept = false;
        let room = self.pressure.descriptor_room();
        let over = self.descriptors_in_use().saturating_sub(room - room / FREE_PART);
        if over > 0 {
            self.make_room(over);
        }
    }

    /// Parks what is acknowledged, which closes its file, and closes parked senders.
    fn make_room(&mut self, descriptors: u64) {
        let (now, is_first) = (self.now, !std::mem::replace(&mut self.pressure.has_swept, true));
        let Some(senders) = &mut self.senders else {
            return;
        };
        let failures = if is_first { senders.sweep_all(now) } else { Vec::new() };
        senders.evict_parked(usize::try_from(descriptors).unwrap_or(usize::MAX));
        failures.into_iter().for_each(|failure| self.report(failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut pressure = Pressure::new(1);
        (pressure.handoffs_left, pressure.offers_left, pressure.bytes_left) = (1, 1, 1);
        assert!(!pressure.is_look_due());
        (0..1000).for_each(|_| pressure.set_full(0, true));
        assert!(pressure.is_look_due());
    }

    #[test]
    fn the_next_look_comes_before_a_limit_is_passed_by_much() {
        assert_eq!(left(1000, 0), 1000);
        assert_eq!(left(1000, 990), 31);
        assert_eq!(left(10, 10), 1);
    }
}
