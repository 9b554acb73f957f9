//! This machine as a backend: claims of its offers.

use std::net::SocketAddr;

use shunt_handoff::sender::{Claimant, Failure, Progress};
use shunt_wire::Endpoint;
use shunt_wire::local::Reason;
use shunt_wire::peer::Claim;
use tracing::field::display;

use crate::agent::Agent;
use crate::poll::{Interest, Source};

impl Agent {
    pub(crate) fn on_claim(&mut self, peer: usize, claim: &Claim) {
        self.counts.claims += 1;
        self.abort_given_up();
        self.keys_passed |= claim.suite.get() != 0;
        let claimant = Claimant::of(peer as u32, claim);
        match self.send_payload(peer, claim, claimant) {
            Ok(progress) => {
                let (handoff, length, trace) = (claimant.handoff, claim.length.get(), claimant.trace.known());
                tracing::debug!(handoff, length, ?progress, trace = trace.map(display), "a payload is being sent");
                self.follow(progress);
            }
            Err(reason) => self.report(Failure { claimant, reason }),
        }
        self.pass_advice();
    }

    fn pass_advice(&mut self) {
        for (peer, spacing) in self.senders.as_mut().map(|senders| senders.take_advice()).unwrap_or_default() {
            let peer = peer as usize;
            if let Some(session) = self.peers[peer].session() {
                spacing.emit(session.transport.output());
                self.mark_unsent(peer);
            }
        }
    }

    fn send_payload(&mut self, peer: usize, claim: &Claim, claimant: Claimant) -> Result<Progress, Reason> {
        let (Some(backend), true) = (&self.config.backend, self.senders.is_some()) else {
            return Err(Reason::UnknownOffer);
        };
        let port = *backend.ports.0.start() + peer as u16;
        let end = |address, port_be| Endpoint { address, port_be }.socket_addr();
        let (server, client) = (end(claim.server_address, claim.server_port), claim.client_address.ip());
        if !self.config.peers[peer].may_have_sent(server, client) {
            tracing::warn!(peer = self.peers[peer].name, %server, %client, "refused to send as that server (speaks_for)");
            return Err(Reason::NotAllowed);
        }
        let offer = claim.offer.get();
        if !self.offers.contains(offer) {
            self.drain_offers(offer);
        }
        let payload = self.offers.claim(peer as u32, offer, claim.length.get(), claim.tag)?;
        let local = self.peers[peer].senders.towards(claim.client_address).ok_or(Reason::Malformed)?;
        let senders = self.senders.as_mut().ok_or(Reason::UnknownOffer)?;
        senders.start(claim, claimant, SocketAddr::new(local, port), payload, self.now)
    }

    /// A socket that takes no more is watched once.
    fn follow(&mut self, progress: Progress) {
        let (Progress::Blocked(index), Some(senders)) = (progress, &self.senders) else {
            return;
        };
        let watched = self.poll.set(senders.socket(index), Source::Sender(index), Interest::WritableOnce);
        if let Err(error) = watched {
            // It goes on no further; its deadline ends it.
            tracing::error!(%error, "cannot watch a sender");
        }
    }

    pub(crate) fn on_sender(&mut self, index: usize) {
        let Some(senders) = self.senders.as_mut().filter(|senders| senders.contains(index)) else {
            return;
        };
        match senders.resume(index, self.now) {
            Ok(progress) => self.follow(progress),
            Err(failure) => self.report(failure),
        }
        self.pass_advice();
    }

    pub(crate) fn on_abort(&mut self, peer: usize, worker: u32, handoff: u64) {
        self.counts.aborts += 1;
        self.given_up.insert((peer as u32, worker, handoff));
    }

    /// What was given up since the last call: at the end of a turn, and before anything else begins.
    pub(crate) fn abort_given_up(&mut self) {
        let given_up = std::mem::take(&mut self.given_up);
        if let (false, Some(senders)) = (given_up.is_empty(), &mut self.senders) {
            senders.abort(&given_up);
        }
    }

    pub(crate) fn tend_senders(&mut self) {
        let failures = self.senders.as_mut().map(|senders| senders.sweep(self.now)).unwrap_or_default();
        failures.into_iter().for_each(|failure| self.report(failure));
    }

    pub(crate) fn report(&mut self, failure: Failure) {
        let Failure { claimant, reason } = failure;
        let trace = claimant.trace.known().map(display);
        tracing::warn!(%reason, handoff = claimant.handoff, trace, "a handoff failed");
        self.tell_peer(&claimant, reason);
    }
}
