//! Which file a payload is of. Another backend goes on with a payload over TLS only where its file is the same, byte for
//! byte: its records have the numbers and the key of those that the lost backend may have sealed already.
//!
//! ```text
//!   a claim under way for 1 s   backend's agent ==DIGEST==> frontend's agent --DIGEST--> its server
//!   that backend is lost, and another one has offered the rest:
//!   server --PROVE--> frontend's agent ==PROVE==> that backend's agent ==DIGEST==> ... --DIGEST--> server
//! ```
//!
//! The server compares, and claims the offer if they are equal. The second backend then sends nothing but the file that
//! it has told of. The first one seals nothing more of a file that is not the one it has told of, until it is known that this
//! counts no longer:
//!
//! ```text
//!   the file changes    backend's agent ==DIGEST, unknown==> ... --> server
//!                             goes on   <==WITHDRAWN==       ... <--
//! ```

use std::time::{Duration, Instant};

use shunt_handoff::identity::FileIdentity;
use shunt_handoff::sender::Claimant;
use shunt_wire::local::{self, Reason};
use shunt_wire::peer;
use zerocopy::IntoBytes;

use crate::agent::Agent;
use crate::digests::{Known, Sha256, Want, was_quiet};
use crate::hearing::{News, Question as Asked};
use crate::packets;
use crate::peers::Peer;

/// How long a question waits for its file to be read; a server gives up earlier.
const PATIENCE: Duration = Duration::from_secs(10);
/// Questions that wait, and those of one peer, so that none takes all the places.
const QUESTIONS: usize = 4096;
const QUESTIONS_OF_A_PEER: usize = 1024;

/// One question of a peer's: the names that it has there, and the offer.
#[derive(Clone, Copy)]
pub(crate) struct Question {
    peer: usize,
    worker: u32,
    handoff: u64,
    number: u64,
    identity: FileIdentity,
    offset: u64,
    until: Instant,
}

impl Question {
    /// The server's number and the handoff, by which the answer finds who asked.
    fn asker(&self) -> (u32, u64) {
        (self.worker, self.handoff)
    }
}

/// Questions that wait for a file's digest. Each is looked at when more is known, and with the clock.
#[derive(Default)]
pub(crate) struct Questions(Vec<Question>);

impl Questions {
    /// Gives back the question that has no place, to be answered: one about the same offer has the place of the one before,
    /// which nobody else would answer; where there is no place at all it is this one. The same question again is one.
    #[must_use]
    fn add(&mut self, question: Question) -> Option<Question> {
        let mut of_peer = 0;
        for other in self.0.iter_mut().filter(|other| other.peer == question.peer) {
            if other.number == question.number {
                let before = std::mem::replace(other, Question { until: other.until, ..question });
                return (before.asker() != question.asker()).then_some(before);
            }
            of_peer += 1;
        }
        if self.0.len() >= QUESTIONS || of_peer >= QUESTIONS_OF_A_PEER {
            return Some(question);
        }
        self.0.push(question);
        None
    }
}

impl Agent {
    /// A server asks before it claims an offer.
    pub(crate) fn prove(&mut self, server: usize, prove: &local::Prove) {
        let index = prove.peer as usize;
        let worker = self.servers[server].worker;
        let current = self.board.epoch(index) == Some(prove.epoch);
        let is_up = current && self.peers.get(index).is_some_and(Peer::is_up);
        let may = is_up && self.may_ask(index, Asked::Prove, worker, prove.handoff);
        let Some(session) = self.peers.get_mut(index).filter(|_| may).and_then(|peer| peer.session()) else {
            let unknown = digest(worker, prove.handoff, 0, None);
            return self.pass_on_digest(index, &unknown);
        };
        let question = peer::Prove {
            worker: worker.into(),
            zero: 0.into(),
            handoff: prove.handoff.into(),
            offer: prove.offer.into(),
            length: prove.length.into(),
            tag: prove.tag,
        };
        question.emit(session.transport.output());
        self.mark_unsent(index);
    }

    /// Another agent asks.
    pub(crate) fn on_prove(&mut self, peer: usize, prove: &peer::Prove) {
        let (worker, handoff, number) = (prove.worker.get(), prove.handoff.get(), prove.offer.get());
        if !self.offers.contains(number) {
            self.drain_offers(number);
        }
        let until = self.now + PATIENCE;
        let found = self.offers.file(peer as u32, number, prove.length.get(), prove.tag);
        let question = found.and_then(|(file, offset)| {
            let identity = FileIdentity::at_hand(file).map_err(|_| Reason::Socket)?;
            Ok(Question { peer, worker, handoff, number, identity, offset, until })
        });
        match question.map(|question| self.answer_question(question)) {
            Ok(None) => {}
            Ok(Some(question)) => {
                if let Some(Question { worker, handoff, .. }) = self.questions.add(question) {
                    self.tell_digest(peer, &digest(worker, handoff, 0, None));
                }
            }
            Err(reason) => {
                tracing::debug!(%reason, handoff, "a digest cannot be told");
                self.tell_digest(peer, &digest(worker, handoff, 0, None));
            }
        }
    }

    /// Answers what can be, or has waited too long.
    pub(crate) fn answer_questions(&mut self) {
        let waited = std::mem::take(&mut self.questions.0);
        self.questions.0 = waited.into_iter().filter_map(|question| self.answer_question(question)).collect();
    }

    /// Gives the question back where it waits on.
    fn answer_question(&mut self, question: Question) -> Option<Question> {
        let Question { peer, worker, handoff, number, identity, offset, until } = question;
        let known = match self.offers.file_of(number) {
            Some(file) => self.digests.ask(file, identity, Want::Now),
            None => Known::Never,
        };
        let sha256 = match known {
            Known::Digest(sha256) if self.offers.note_proven(number, identity) => Some(sha256),
            Known::NotYet if self.now < until && self.peers[peer].is_up() => return Some(question),
            _ => None,
        };
        self.tell_digest(peer, &digest(worker, handoff, offset, sha256));
        None
    }

    fn tell_digest(&mut self, peer: usize, digest: &peer::Digest) {
        let is_known = digest.known.get() == 1;
        self.counts.proven += u64::from(is_known);
        self.counts.unproven += u64::from(!is_known);
        if let Some(session) = self.peers[peer].session() {
            digest.emit(session.transport.output());
            self.mark_unsent(peer);
        }
    }

    /// Tells frontends which files the payloads are of that have been under way for a while.
    pub(crate) fn tell_files(&mut self) {
        let Some(senders) = &mut self.senders else { return };
        let mut told = Vec::new();
        for news in senders.take_news() {
            let known = match news.file {
                Some((file, identity)) if was_quiet(&identity, self.now.duration_since(news.begun)) => {
                    self.digests.ask(file, identity, Want::Ahead)
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
            if let Some(senders) = &mut self.senders {
                senders.settle_news(index, sha256.is_some(), self.now);
            }
            let Claimant { peer, worker, handoff, .. } = claimant;
            self.tell_digest(peer as usize, &digest(worker, handoff, offset, sha256));
        }
    }

    /// A server has forgotten the digest of a handoff. Of a session that is gone nobody waits for that.
    pub(crate) fn withdrawn(&mut self, server: usize, withdrawn: &local::Withdrawn) {
        let index = withdrawn.peer as usize;
        let worker = self.servers[server].worker;
        let current = self.board.epoch(index) == Some(withdrawn.epoch);
        if let Some(session) = self.peers.get_mut(index).filter(|_| current).and_then(|peer| peer.session()) {
            let known = peer::Withdrawn { worker: worker.into(), zero: 0.into(), handoff: withdrawn.handoff.into() };
            known.emit(session.transport.output());
            self.mark_unsent(index);
        }
    }

    /// Another agent's server has forgotten one that it was told by this agent.
    pub(crate) fn on_withdrawn(&mut self, peer: usize, known: &peer::Withdrawn) {
        self.withdrawn.insert((peer as u32, known.worker.get(), known.handoff.get()));
    }

    /// Senders whose frontends have forgotten their digests go on, at the end of a turn.
    pub(crate) fn go_on_unproven(&mut self) {
        let withdrawn = std::mem::take(&mut self.withdrawn);
        let (false, Some(senders)) = (withdrawn.is_empty(), &mut self.senders) else { return };
        for index in senders.go_on_unproven(&withdrawn) {
            self.on_sender(index);
        }
    }

    /// For the server that asked, or whose handoff it is about.
    pub(crate) fn on_digest(&mut self, peer: usize, digest: &peer::Digest) {
        let question = (Asked::Prove, digest.worker.get(), digest.handoff.get());
        if self.is_heard(peer, Some(question), News::Digest) {
            self.pass_on_digest(peer, digest);
        }
    }

    fn pass_on_digest(&mut self, peer: usize, digest: &peer::Digest) {
        let Some(server) = self.owner_of(digest.worker.get()) else { return };
        let told = local::Digest {
            header: local::Digest::HEADER,
            handoff: digest.handoff.get(),
            offset: digest.offset.get(),
            peer: peer as u32,
            known: digest.known.get(),
            sha256: digest.sha256,
        };
        if !matches!(packets::send(&self.servers[server].socket, told.as_bytes(), &[]), Ok(true)) {
            self.counts.unread += 1;
        }
    }
}

fn digest(worker: u32, handoff: u64, offset: u64, sha256: Option<Sha256>) -> peer::Digest {
    peer::Digest {
        worker: worker.into(),
        known: u32::from(sha256.is_some()).into(),
        handoff: handoff.into(),
        offset: offset.into(),
        sha256: sha256.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(peer: usize, number: u64) -> Question {
        let identity = FileIdentity { device: 1, inode: 1, size: 1, mtime_ns: 0, ctime_ns: 0 };
        Question { peer, worker: 1, handoff: 1, number, identity, offset: 0, until: Instant::now() }
    }

    #[test]
    fn a_peer_has_its_share_of_places_and_an_offer_one() {
        let mut questions = Questions::default();
        let added = (0..2 * QUESTIONS as u64).filter(|number| questions.add(question(1, *number)).is_none()).count();
        assert_eq!(added, QUESTIONS_OF_A_PEER);
        assert!(questions.add(question(2, 0)).is_none(), "there is place for another peer");
        let again = Question { handoff: 7, until: Instant::now() + PATIENCE, ..question(2, 0) };
        let before = questions.0.len();
        let replaced: Vec<_> = (0..QUESTIONS).filter_map(|_| questions.add(again)).map(|one| one.asker()).collect();
        assert_eq!(replaced, [(1, 1)], "is answered, and the same question again is not");
        let last = questions.0.last().expect("the other peer's");
        assert_eq!((questions.0.len(), last.handoff), (before, 7), "the answer is for who asked last");
        assert!(last.until < again.until, "whoever asks again and again does not wait longer");
    }
}
