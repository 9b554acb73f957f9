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
use crate::incoming::OncePerSecond;

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

/// Closes at a limit and opens below 9 tenths of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    is_closed: bool,
}

impl Gate {
    /// Whether it is closed now; counts the closing.
    fn look(&mut self, used: u64, limit: u64, closings: &mut u64) -> bool {
        let bound = if self.is_closed { limit - limit / 10 } else { limit };
        let was_closed = std::mem::replace(&mut self.is_closed, used >= bound);
        *closings += u64::from(self.is_closed && !was_closed);
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
    said: Said,
}

/// What the log was last told that is taken, for one peer or for all: once a second, for a peer may change its mind often.
#[derive(Default)]
struct Said {
    closed: u32,
    speaker: OncePerSecond,
}

impl Said {
    /// Whether that is news, and it is time for some.
    fn is_due(&mut self, closed: u32, now: Instant) -> bool {
        let is_due = closed != self.closed && self.speaker.may_speak(now);
        if is_due {
            self.closed = closed;
        }
        is_due
    }
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
    said: Said,
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
            said: Said::default(),
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
        let limits = self.config.limits;
        let open = self.descriptors_in_use();
        let most_senders = self.config.backend.as_ref().map_or(u64::MAX, |backend| backend.senders as u64);
        let room = self.pressure.descriptor_room();
        let Pressure { closings, descriptors, handoffs, offers, bytes, senders, fetches_out, fetches_in, .. } =
            &mut self.pressure;
        let most_fetches = limits.fetches as u64;
        let handoffs = handoffs.look(total.handoffs, limits.handoffs, &mut closings.handoffs)
            | fetches_out.look(total.fetches_out, most_fetches, &mut closings.fetches);
        let offers = offers.look(total.sent.payloads, limits.offers, &mut closings.offers)
            | bytes.look(total.sent.bytes, limits.bytes, &mut closings.bytes)
            | senders.look(total.sent.senders, most_senders, &mut closings.senders)
            | descriptors.look(open, room, &mut closings.descriptors)
            | fetches_in.look(total.fetches_in, most_fetches, &mut closings.fetches);
        let ends = self.drain.is_some();
        (u32::from(handoffs | ends) * closed::HANDOFFS) | (u32::from(offers | ends) * closed::OFFERS)
    }

    fn look_at_peer(&mut self, index: usize, used: &Use) {
        let limits = self.config.limits;
        let Pressure { peers, closings, .. } = &mut self.pressure;
        let gates = &mut peers[index];
        let offers = gates.offers.look(used.sent.payloads, limits.offers_per_peer, &mut closings.offers_per_peer)
            | gates.bytes.look(used.sent.bytes, limits.bytes_per_peer, &mut closings.bytes_per_peer)
            | gates.fetches_in.look(used.fetches_in, limits.fetches_per_peer as u64, &mut closings.fetches_per_peer)
            | gates.is_full;
        let is_full = gates.handoffs.look(used.handoffs, limits.handoffs_per_peer, &mut closings.handoffs_per_peer)
            | gates.fetches_out.look(used.fetches_out, limits.fetches_per_peer as u64, &mut closings.fetches_per_peer);
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
        let said = match peer {
            None => &mut self.pressure.said,
            Some(index) => &mut self.pressure.peers[index].said,
        };
        if said.is_due(bits, self.now) {
            let peer = peer.map(|index| self.peers[index].name.as_str());
            let (offers, handoffs) = (bits & closed::OFFERS == 0, bits & closed::HANDOFFS == 0);
            tracing::warn!(peer, offers, handoffs, "limits: what is taken now");
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
        let (mut gate, mut closings) = (Gate::default(), 0);
        let states = [99, 100, 95, 91, 90, 89, 99, 120].map(|used| gate.look(used, 100, &mut closings));
        assert_eq!(states, [false, true, true, true, true, false, false, true]);
        assert_eq!(closings, 2);
    }

    #[test]
    fn what_changes_often_is_said_once_a_second_and_the_last_word_in_the_end() {
        let (mut said, start) = (Said::default(), Instant::now());
        let at = |ms| start + std::time::Duration::from_millis(ms);
        let lines = (0..100).filter(|step| said.is_due(1 - u32::from(*step as u8 % 2), at(step * 10))).count();
        assert_eq!(lines, 1);
        assert!(said.is_due(0, at(1000)) && !said.is_due(0, at(3000)) && said.closed == 0);
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
