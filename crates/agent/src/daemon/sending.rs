//! Sending of payloads that frontends have claimed. A *sender* is this machine's kernel socket for a client of a
//! frontend. A *claim* is the frontend's message that asks for a payload. The payload is the file range of an *offer*,
//! or bytes of the *store* (payloads of programs under `shunt run`).

use shunt_handoff::payload::Payload;
use shunt_handoff::reading::Done;
use shunt_handoff::sender::{Failure, Progress, Unsent};
use shunt_logic::backend::Start;
use shunt_logic::backend::offers::Offered;
use shunt_logic::backend::waiting::Waits;
use shunt_logic::machine::{Known, Want};
use shunt_wire::local::Reason;
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Claim, Claimant};

use super::Daemon;
use crate::backend::digests::was_quiet;
use crate::backend::stored;
use crate::kernel::Kernel;
use crate::os::poll::{Interest, Source};

impl Daemon {
    /// Handles a peer's claim of a payload.
    pub(crate) fn on_claim(&mut self, peer: usize, claim: &Claim, parts: Option<&Parts>) {
        let start = self.event(|logic, call| logic.claim(peer, claim, parts, call));
        if let Some(start) = start {
            self.begin_to_send(Claimant::of(peer as u32, claim), claim, parts, start);
        }
        self.tell_frontends();
    }

    fn begin_to_send(&mut self, claimant: Claimant, claim: &Claim, parts: Option<&Parts>, start: Start<Kernel>) {
        let Start { local, offered } = start;
        let payload = self.payload(offered, parts);
        let started = payload.and_then(|payload| {
            let senders = self.kernel.senders.as_mut().ok_or(Reason::UnknownOffer)?;
            senders.start(claim, claimant, local, payload, self.now)
        });
        match started {
            Ok(progress) => {
                let (handoff, length, trace) = (claimant.handoff, claim.length.get(), claimant.trace.known());
                tracing::debug!(handoff, length, ?progress, trace = trace.map(display), "a payload is being sent");
                self.follow(progress);
            }
            Err(reason) => self.event(|logic, call| logic.start_failed(claimant, claim, parts, reason, call)),
        }
    }

    /// Returns the payload of a claim: the file range of the offer that the claim has used up, or ranges of the store.
    fn payload(&self, offered: Option<Offered<Kernel>>, parts: Option<&Parts>) -> Result<Payload, Reason> {
        if let Some(Offered { offer, file, proven, .. }) = offered {
            return Ok(Payload::proven(file, &offer, proven).closed_by(&self.kernel.reads));
        }
        let ((holder, shelf), parts) = self.kernel.store.as_ref().zip(parts).ok_or(Reason::UnknownOffer)?;
        stored::payload(*holder, shelf, parts)
    }

    /// Begins to send for claims that had to wait, if there is a sender and a port for them now.
    pub(crate) fn tend_waiting(&mut self) {
        self.logic.begin_waiting_round();
        while let Some(next) = self.event(|logic, call| logic.next_waiting(call)) {
            if let Some((waits, start)) = next {
                let Waits { claim, parts, claimant, .. } = &*waits;
                self.begin_to_send(*claimant, claim, Some(parts), start);
            }
        }
        self.tell_frontends();
    }

    /// If a sender's socket takes no more bytes now, has epoll report once when the socket takes bytes again.
    fn follow(&mut self, progress: Progress) {
        let (Progress::Blocked(index), Some(senders)) = (progress, &self.kernel.senders) else { return };
        let watched = self.poll.set(senders.socket(index), Source::Sender(index), Interest::WritableOnce);
        if let Err(error) = watched {
            // The sender stands still, and its deadline ends it.
            tracing::error!(%error, "cannot watch a sender");
        }
    }

    /// Continues a sender whose socket takes bytes again.
    pub(crate) fn on_sender(&mut self, index: usize) {
        self.go_on(index);
        self.tell_frontends();
    }

    /// Continues a sender, if it still exists.
    pub(crate) fn go_on(&mut self, index: usize) {
        let Some(senders) = self.kernel.senders.as_mut().filter(|senders| senders.contains(index)) else { return };
        match senders.resume(index, self.now) {
            Ok(progress) => self.follow(progress),
            Err(failure) => self.fail(failure),
        }
    }

    /// Continues a sender whose read has ended.
    pub(crate) fn on_sender_read(&mut self, index: usize, done: Done) {
        let Some(senders) = &mut self.kernel.senders else { return };
        match senders.take_read(index, done, self.now) {
            Ok(Some(progress)) => self.follow(progress),
            Ok(None) => {}
            Err(failure) => self.fail(failure),
        }
        self.tell_frontends();
    }

    fn fail(&mut self, failure: Failure) {
        let Failure { claimant, reason } = failure;
        self.event(|logic, call| logic.sender_failed(&claimant, reason, call));
    }

    /// Reports the senders that failed while [`Kernel`] answered the logic's questions.
    pub(crate) fn fail_ended(&mut self) {
        while let Some(failure) = self.kernel.failures.pop() {
            self.fail(failure);
        }
    }

    /// Reads the reports of the steering programs (BPF): clients have acknowledged the ends of payloads.
    pub(crate) fn on_reports(&mut self) {
        if let Some(senders) = &mut self.kernel.senders {
            let reports = senders.take_reports();
            senders.on_reports(&reports);
        }
        self.tell_frontends();
    }

    /// Tells frontends which ACKs senders need, and which payloads clients have acknowledged.
    fn tell_frontends(&mut self) {
        let Some(senders) = &mut self.kernel.senders else { return };
        let (advice, words) = (senders.take_advice(), senders.take_words());
        if !advice.is_empty() || !words.is_empty() {
            self.event(|logic, call| logic.tell_frontends(&advice, &words, call));
        }
    }

    /// Parks senders whose payloads are acknowledged: they wait for the next payload. Ends senders without progress,
    /// puts back offers of which the client has received nothing, and notes which clients have answered. To be called
    /// ten times a second.
    pub(crate) fn tend_senders(&mut self) {
        let now = self.now;
        let Some(senders) = &mut self.kernel.senders else { return };
        let (failures, unsent, answers) = (senders.sweep(now), senders.take_unsent(), senders.take_answers());
        for Unsent { offer, file, proven } in unsent {
            self.logic.backend.offers.put_back(offer, file, proven, now);
        }
        failures.into_iter().for_each(|failure| self.fail(failure));
        self.tell_frontends();
        for answer in answers {
            let peer = answer.peer as usize;
            let local = self.logic.shared.peers.peer(peer).senders.towards(answer.client.address);
            if let (Some(paths), Some(local)) = (&mut self.kernel.paths, local) {
                paths.hear(&answer, &self.kernel.peers[peer], local, now);
            }
        }
    }

    /// Tells frontends the digests (SHA-256) of files whose payloads have been under way for a while. Also tells them
    /// of files that have no digest, or that have changed since their digest was told.
    pub(crate) fn tell_files(&mut self) {
        let Kernel { senders: Some(senders), digests, .. } = &mut self.kernel else { return };
        let mut told = Vec::new();
        for news in senders.take_news() {
            let known = match news.file {
                Some((file, identity)) if was_quiet(&identity, self.now.duration_since(news.begun)) => {
                    digests.ask(file, identity, Want::Ahead)
                }
                _ => Known::Never,
            };
            let sha256 = match known {
                Known::NotYet => continue,
                Known::Never => None,
                Known::Digest(sha256) => Some(sha256),
            };
            told.push((news.index, news.claimant, news.offset, sha256));
        }
        for (index, claimant, offset, sha256) in told {
            if let Some(senders) = &mut self.kernel.senders {
                senders.settle_news(index, sha256.is_some(), self.now);
            }
            self.event(|logic, call| logic.tell_file(&claimant, offset, sha256, call));
        }
    }

    /// Gives up all senders because the agent ends. Frontends are told of each payload that is not wholly in the
    /// kernel's send buffer.
    pub(crate) fn give_up_senders(&mut self) {
        let failures = self.kernel.senders.as_mut().map(|senders| senders.give_up()).unwrap_or_default();
        failures.into_iter().for_each(|failure| self.fail(failure));
    }
}
