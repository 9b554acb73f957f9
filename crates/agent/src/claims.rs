//! This machine as a backend: claims of its offers, and of bytes of its store.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use shunt_handoff::payload::{Kept, Payload};
use shunt_handoff::sender::{Claimant, Failure, Progress, Unsent};
use shunt_odb::reference::{PayloadId, Reference, Weight};
use shunt_odb::store::pinned::Pinned;
use shunt_wire::local::Reason;
use shunt_wire::parts::{Part, Parts};
use shunt_wire::peer::Claim;

use crate::agent::Agent;
use crate::poll::{Interest, Source};

/// Bytes of this machine's store.
#[derive(Debug)]
struct Stored(Pinned);

impl AsFd for Stored {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Kept for Stored {
    fn send(&self, offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.0.place().send(offset, bytes, socket)
    }

    fn is_unchanged(&self) -> bool {
        self.0.place().is_unchanged()
    }
}

impl Agent {
    /// `parts`: of this machine's store, in place of an offer.
    pub(crate) fn on_claim(&mut self, peer: usize, claim: &Claim, parts: Option<&Parts>) {
        self.counts.claims += 1;
        self.abort_given_up();
        self.keys_passed |= claim.suite.get() != 0;
        let claimant = Claimant::of(peer as u32, claim);
        match self.send_payload(peer, claim, parts, claimant) {
            Ok(progress) => {
                let (handoff, length, trace) = (claimant.handoff, claim.length.get(), claimant.trace.known());
                tracing::debug!(handoff, length, ?progress, trace = trace.map(display), "a payload is being sent");
                self.follow(progress);
            }
            Err(reason) => {
                if reason == Reason::Limit {
                    self.say_senders();
                }
                let waits = parts.is_some_and(|parts| self.wait_for_place(claim, parts, claimant, reason));
                if !waits {
                    self.report(Failure { claimant, reason });
                }
            }
        }
        self.tell_frontends();
    }

    /// Which ACKs senders need, and which payloads clients have acknowledged. What has no session to go by is lost with that:
    /// frontends look after its payloads themselves.
    pub(crate) fn tell_frontends(&mut self) {
        let Some(senders) = &mut self.senders else { return };
        let (advice, words) = (senders.take_advice(), senders.take_words());
        for (peer, spacing) in advice {
            self.tell_frontend(peer, |output| spacing.emit(output));
        }
        for (peer, word) in words {
            self.tell_frontend(peer, |output| word.emit(output));
        }
    }

    fn tell_frontend(&mut self, peer: u32, emit: impl FnOnce(&mut Vec<u8>)) {
        let peer = peer as usize;
        if let Some(session) = self.peers[peer].session() {
            emit(session.transport.output());
            self.mark_unsent(peer);
        }
    }

    /// Reports of the programs, and what frontends are told for them.
    pub(crate) fn on_reports(&mut self) {
        if let Some(senders) = &mut self.senders {
            let reports = senders.take_reports();
            senders.on_reports(&reports);
        }
        self.tell_frontends();
    }

    pub(crate) fn send_payload(
        &mut self,
        peer: usize,
        claim: &Claim,
        parts: Option<&Parts>,
        claimant: Claimant,
    ) -> Result<Progress, Reason> {
        let server = claim.flow.server().socket_addr();
        let client = claim.flow.client_address.ip();
        match parts {
            None => self.may_speak_for(peer, server, client)?,
            Some(_) => self.would_send(peer, server, client)?,
        }
        let backend = self.config.backend.as_ref().ok_or(Reason::UnknownOffer)?;
        let port = *backend.ports.0.start() + peer as u16;
        let local = self.peers[peer].senders.towards(claim.flow.client_address).ok_or(Reason::Malformed)?;
        let senders = self.senders.as_mut().ok_or(Reason::UnknownOffer)?;
        // Before the offer is taken: what is refused here can be fetched.
        if !senders.has(claim, port)? {
            if !senders.has_room() {
                return Err(Reason::Limit);
            }
            self.may_reach(peer, local, client)?;
        }
        let payload = match parts {
            None => self.offered(peer, claim)?,
            Some(parts) => self.stored(parts)?,
        };
        let senders = self.senders.as_mut().ok_or(Reason::UnknownOffer)?;
        senders.start(claim, claimant, SocketAddr::new(local, port), payload, self.now)
    }

    fn offered(&mut self, peer: usize, claim: &Claim) -> Result<Payload, Reason> {
        let offer = claim.offer.get();
        if !self.offers.contains(offer) {
            self.drain_offers(offer);
        }
        self.offers.claim(peer as u32, offer, claim.length.get(), claim.tag)
    }

    /// Bytes that programs of this machine have left in the store, for a peer whose programs may read them anyway.
    fn stored(&self, parts: &Parts) -> Result<Payload, Reason> {
        let store = self.store.as_ref().ok_or(Reason::UnknownOffer)?;
        let kept = |part: &Part| {
            let &Part { segment, slot, secret, offset, length } = part;
            let (segment, slot, secret) = (segment.get(), slot.get(), secret.get());
            let payload = PayloadId { holder: store.holder, segment, slot, secret };
            let reference = Reference { payload, weight: Weight::WHOLE, offset: offset.get(), length: length.get() };
            let pinned = store.shelf.pin(&reference).ok_or(Reason::UnknownOffer)?;
            let (from, length) = (pinned.place().from(), pinned.place().length());
            Ok((Box::new(Stored(pinned)) as Box<dyn Kept>, from, length))
        };
        Ok(Payload::of_kept(parts.as_slice().iter().map(kept).collect::<Result<Vec<_>, Reason>>()?))
    }

    /// A socket that takes no more is watched once.
    pub(crate) fn follow(&mut self, progress: Progress) {
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
        self.tell_frontends();
    }

    pub(crate) fn on_abort(&mut self, peer: usize, worker: u32, handoff: u64) {
        self.counts.aborts += 1;
        self.given_up.insert((peer as u32, worker, handoff));
    }

    /// What was given up since the last call: at the end of a turn, and before anything else begins.
    pub(crate) fn abort_given_up(&mut self) {
        let given_up = std::mem::take(&mut self.given_up);
        if !given_up.is_empty() {
            self.forget_waiting(|of| given_up.contains(&(of.peer, of.worker, of.handoff)));
        }
        if let (false, Some(senders)) = (given_up.is_empty(), &mut self.senders) {
            senders.abort(&given_up);
        }
    }

    pub(crate) fn tend_senders(&mut self) {
        let failures = self.senders.as_mut().map(|senders| senders.sweep(self.now)).unwrap_or_default();
        let unsent = self.senders.as_mut().map(|senders| senders.take_unsent()).unwrap_or_default();
        for Unsent { offer, file, proven } in unsent {
            self.offers.put_back(offer, file, proven, self.now);
        }
        failures.into_iter().for_each(|failure| self.report(failure));
        self.tell_frontends();
        self.hear_clients();
    }

    pub(crate) fn report(&mut self, failure: Failure) {
        let Failure { claimant, reason } = failure;
        self.log_failed_handoff(reason, claimant.handoff, None, claimant.trace);
        self.tell_peer(&claimant, reason);
    }
}
