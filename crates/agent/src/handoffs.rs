//! This machine as a frontend: its servers' handoffs go to the backends' agents.
//!
//! The kernel has begun the region already (SHUNT_BEGIN), and tells the server itself when it is complete; the agent
//! only carries the claim there, and bad news back.

use std::net::SocketAddr;

use shunt_wire::TraceId;
use shunt_wire::local::{Handoff, Reason};
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Abort, Claim, Delivered, Ended, Spacing};
use tracing::field::display;

use crate::agent::Agent;
use crate::hearing::News;

/// Who has a handoff cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Canceller {
    /// Who was to send it.
    Peer(u32),
    /// The server that hears of its completion by this ring.
    Ring(u32),
    /// Any server, where nobody has its ring any more: an agent that is gone gave that out.
    Anybody,
}

/// Whether a handoff ends so because its client went away: many do, and nothing is to be done.
fn is_clients(reason: Reason) -> bool {
    matches!(reason, Reason::ClientGone | Reason::Aborted)
}

impl Agent {
    /// `parts`: of the peer's store, in place of an offer.
    pub(crate) fn hand_off(&mut self, server: usize, handoff: &Handoff, parts: Option<&Parts>) {
        self.counts.handoffs += 1;
        self.pressure.note_handoff();
        self.keys_passed |= handoff.tls.suite != 0;
        let peer = handoff.peer as usize;
        let worker = self.servers[server].worker;
        // Of another session: its regions were given up with it (lose_peer), and the server asks for the rest again.
        let current = self.board.epoch(peer) == Some(handoff.epoch);
        let ring = self.servers[server].ring();
        if !self.frontend.as_mut().zip(ring).is_some_and(|(frontend, ring)| frontend.knows(handoff, ring)) {
            self.counts.handoffs_unknown += 1;
            let ended = self.frontend.as_ref().zip(ring).and_then(|(frontend, ring)| frontend.end_of(handoff, ring));
            let client = Some(handoff.flow.client().socket_addr());
            self.log_failed_handoff(ended.unwrap_or(Reason::NotAllowed), handoff.handoff, client, handoff.trace);
            return self.tell_server(server, handoff.handoff, Reason::NotAllowed);
        }
        let session = self.peers.get_mut(peer).filter(|_| current).and_then(|peer| peer.session());
        let (id, trace) = (handoff.handoff, handoff.trace.known().map(display));
        let Some(session) = session else {
            let client = Some(handoff.flow.client().socket_addr());
            self.log_failed_handoff(Reason::UnknownOffer, id, client, handoff.trace);
            return self.tell_server(server, id, Reason::UnknownOffer);
        };
        tracing::debug!(handoff = id, length = handoff.length, trace, "a payload is claimed");
        let claim = Claim::of(worker, handoff);
        match parts {
            None => claim.emit(session.transport.output()),
            Some(parts) => claim.emit_with(parts, session.transport.output()),
        }
        self.note_given(peer, &claim, parts.is_some());
        self.mark_unsent(peer);
    }

    /// Every backend hears of it: only one knows this handoff, and aborts are rare.
    pub(crate) fn abort_handoff(&mut self, server: usize, handoff: u64) {
        let worker = self.servers[server].worker;
        for index in 0..self.peers.len() {
            if let Some(session) = self.peers[index].session() {
                Abort { worker: worker.into(), handoff: handoff.into() }.emit(session.transport.output());
                self.mark_unsent(index);
            }
        }
    }

    pub(crate) fn on_spacing(&mut self, peer: usize, spacing: &Spacing) {
        if let Some(frontend) = &self.frontend {
            frontend.set_spacing(peer as u32, spacing);
        }
    }

    pub(crate) fn on_delivered(&mut self, peer: usize, word: &Delivered) {
        if let Some(frontend) = &self.frontend {
            frontend.set_delivered(peer as u32, word);
        }
    }

    /// `client`: where it is known.
    pub(crate) fn log_failed_handoff(
        &mut self,
        reason: Reason,
        handoff: u64,
        client: Option<SocketAddr>,
        trace: TraceId,
    ) {
        let (client, trace) = (client.map(display), trace.known().map(display));
        if is_clients(reason) {
            tracing::debug!(%reason, handoff, client, trace, "a handoff ended early");
        } else if self.failures.may_speak(self.now) {
            tracing::warn!(%reason, handoff, client, trace, "a handoff failed");
        }
    }

    pub(crate) fn on_ended(&mut self, peer: usize, ended: &Ended) {
        if !self.is_heard(peer, None, News::End) {
            return;
        }
        let reason = Reason::from_number(ended.reason.get()).unwrap_or(Reason::Malformed);
        let trace = ended.trace.known().map(display);
        let (handoff, name) = (ended.handoff.get(), &self.peers[peer].name);
        if is_clients(reason) {
            tracing::debug!(peer = name, %reason, handoff, trace, "the backend's agent ended a handoff");
        } else if self.failures.may_speak(self.now) {
            tracing::warn!(peer = name, %reason, handoff, trace, "the backend's agent ended a handoff");
        }
        match self.owner_of(ended.worker.get()) {
            Some(server) => self.pass_on_end(server, peer as u32, ended.handoff.get(), reason),
            None => self.cancel_handoff(Canceller::Peer(peer as u32), ended.handoff.get()),
        }
    }

    /// Ends at the end of this turn what nobody sends, and whose connection no server has: whoever holds that still is the
    /// kernel alone. Those that are not the canceller's stay.
    pub(crate) fn cancel_handoff(&mut self, by: Canceller, handoff: u64) {
        self.cancelled.insert((by, handoff));
    }

    /// With one look at all flows, however many were cancelled.
    pub(crate) fn cancel_handoffs(&mut self) {
        let cancelled = std::mem::take(&mut self.cancelled);
        let Some(frontend) = self.frontend.as_ref().filter(|_| !cancelled.is_empty()) else { return };
        for region in frontend.active_regions(None).into_iter().filter(|region| region.queues) {
            let owner = if frontend.has_ring(region.ring) { Canceller::Ring(region.ring) } else { Canceller::Anybody };
            let may = [Canceller::Peer(region.peer), owner];
            if may.into_iter().any(|by| cancelled.contains(&(by, region.handoff))) {
                frontend.cancel(&region);
            }
        }
    }
}
