//! Check of all limits, and the messages to servers and peers about them. An *offer* is a payload that a machine holds
//! ready until a frontend's agent claims it. A *handoff* lets a backend send a payload on the connection of a
//! frontend's client. A *consent* is a request's header field that permits this. A *fetch* brings a payload through
//! both agents instead. A *turn* is one pass of the daemon's event loop.

use shunt_wire::local::closed;
use shunt_wire::peer::Closed;

use super::{Call, Logic};
use crate::action::Action;
use crate::limits::{Descriptors, Load, Use};
use crate::machine::Machine;

/// Resources in use on this machine that only the daemon knows.
#[derive(Clone, Debug)]
pub struct Usage {
    /// For each peer, number of handoffs to it that are not over, from the counters of all servers.
    pub handoffs: Vec<u64>,
    /// For each peer, the load of the payloads that are being sent for it.
    pub sending: Vec<Load>,
    /// File descriptors of the agent's process.
    pub descriptors: Descriptors,
}

impl<M: Machine> Logic<M> {
    /// Checks all limits except that of server connections. When a limit is reached, or no longer reached, servers
    /// learn it from the board (memory that the agent writes), and peers from a frame (CLOSED), as far as the limit
    /// concerns them.
    pub fn look_at_limits(&mut self, usage: &Usage, call: &mut Call<'_, M>) {
        let used = self.use_by_peer(usage);
        let limits = self.shared.settings.limits;
        let most_senders = self.shared.settings.backend.map_or(u64::MAX, |backend| backend.senders as u64);
        let mut bits = self.gates.look(&used, &limits, most_senders, usage.descriptors, call.now);
        if self.shared.is_draining {
            bits |= closed::HANDOFFS | closed::OFFERS;
        }
        call.actions.extend(self.shared.board.close(None, bits).map(Action::WriteBoard));
        for (peer, used) in used.iter().enumerate() {
            let name = &self.shared.settings.peers[peer].name;
            let looked = self.gates.look_at_peer(peer, name, used, &limits, call.now);
            call.actions.extend(self.shared.board.close(Some(peer), looked.closed).map(Action::WriteBoard));
            if self.gates.was_told(peer) != (looked.is_full || self.takes_none_of(peer)) {
                self.tell_full(peer);
            }
        }
    }

    /// Returns whether the limits have to be checked before the next tick (the periodic work, 10 times a second).
    pub fn is_look_due(&self) -> bool {
        self.gates.is_look_due()
    }

    fn use_by_peer(&self, usage: &Usage) -> Vec<Use> {
        let mut all = vec![Use::default(); self.shared.peers.len()];
        self.frontend.fetches.peers().for_each(|peer| all[peer].fetches_out += 1);
        self.backend.served.peers().for_each(|peer| all[peer].fetches_in += 1);
        for (peer, used) in all.iter_mut().enumerate() {
            used.handoffs = usage.handoffs.get(peer).copied().unwrap_or(0);
            used.sent = usage.sending.get(peer).copied().unwrap_or_default();
            used.sent += self.backend.offers.load(peer);
        }
        all
    }

    /// Returns whether a peer is to make no offers, because this agent is draining or no route leads to the peer's
    /// senders. The peer's offers would only be fetched.
    fn takes_none_of(&self, peer: usize) -> bool {
        self.shared.is_draining || self.frontend.steered.is_unreachable(peer)
    }

    /// Tells a peer whether its servers may make offers for this machine (CLOSED).
    fn tell_full(&mut self, peer: usize) {
        let is_full = self.gates.is_full_of(peer) || self.takes_none_of(peer);
        self.gates.note_told(peer, is_full);
        if let Some(outbox) = self.shared.peers.outbox(peer) {
            Closed { offers: u32::from(is_full).into() }.emit(outbox);
        }
    }

    /// Forgets the CLOSED messages from and to a peer, because a session begins: the peer's agent may have started
    /// anew. Tells the peer again if it is to make no offers.
    pub(super) fn renew_limits(&mut self, peer: usize) {
        self.gates.set_full(peer, false);
        self.gates.note_told(peer, false);
        if self.gates.is_full_of(peer) || self.takes_none_of(peer) {
            self.tell_full(peer);
        }
    }

    /// Notes a new fetch, in either direction. If the number of fetches now reaches a limit, all limits are checked at
    /// the end of the turn, so that consents and offers are closed.
    pub fn note_fetch(&mut self, peer: Option<usize>) {
        let Some(peer) = peer else { return };
        let limits = &self.shared.settings.limits;
        let (out, served) = (&self.frontend.fetches, &self.backend.served);
        let of_peer = |peers: &mut dyn Iterator<Item = usize>| peers.filter(|one| *one == peer).count();
        let most = out.len().max(served.len());
        let most_of_peer = of_peer(&mut out.peers()).max(of_peer(&mut served.peers()));
        if most >= limits.fetches || most_of_peer >= limits.fetches_per_peer {
            self.gates.set_news();
        }
    }
}
