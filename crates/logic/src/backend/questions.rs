//! Digests (SHA-256) of files, by which a frontend's server learns whether two backends have the same file. Over TLS,
//! another backend may continue a payload only if its file is the same, byte for byte. It encrypts under a key and
//! record numbers that the lost backend may have used already, and this is safe only for the same bytes. A *peer* is
//! another machine's agent. A *handoff* lets a backend send a payload on the connection of a server's client. It is
//! named by the worker number (the agent's number of the server's connection) and a number that the server chose. A
//! *claim* asks for a handoff's payload, and an *offer* is a payload that a backend holds ready.
//!
//! ```text
//!   a claim under way for 1 s   backend's agent ==DIGEST==> frontend's agent --DIGEST--> its server
//!   the backend is lost, and a second one has offered the rest:
//!   server --PROVE--> frontend's agent ==PROVE==> second backend's agent ==DIGEST==> ... --DIGEST--> server
//! ```
//!
//! The server compares the digests, and claims the second backend's offer if they are equal. The second backend sends
//! the payload only while its file is in the state whose digest it has told. If a backend's file changes after its
//! digest was told, the backend encrypts nothing more until it knows that the server has forgotten the digest:
//!
//! ```text
//!   the file changes    backend's agent ==DIGEST, unknown==> ... --> server
//!                             continues <==WITHDRAWN==       ... <--
//! ```

use std::time::{Duration, Instant};

use shunt_wire::local::Reason;
use shunt_wire::peer::{self, Claimant};

use super::Backend;
use crate::machine::{Known, Machine, Sha256, Want};
use crate::turn::Turn;

/// Longest time that a question waits for its file to be read. The server that asked gives up earlier.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most questions that wait: of all peers together, and of one peer.
const QUESTIONS: usize = 4096;
const QUESTIONS_OF_A_PEER: usize = 1024;

/// A peer's question about the offer with this `number`. `worker` and `handoff` name, at the peer, the server that
/// asked and the handoff that it asked for. `state` is the state of the offer's file when the question came, and
/// `offset` is the place of the offer's payload in the file.
#[derive(Clone, Copy)]
struct Question<S> {
    peer: usize,
    worker: u32,
    handoff: u64,
    number: u64,
    state: S,
    offset: u64,
    until: Instant,
}

impl<S> Question<S> {
    /// Returns the worker and handoff numbers by which the answer finds the server that asked.
    fn asker(&self) -> (u32, u64) {
        (self.worker, self.handoff)
    }
}

/// Questions that wait for a file's digest. They are examined when a digest becomes known, and ten times a second.
pub struct Questions<M: Machine>(Vec<Question<M::State>>);

impl<M: Machine> Default for Questions<M> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<M: Machine> Questions<M> {
    /// Adds a question. If that leaves a question without a place, returns this question, to be answered now. It is an
    /// older question about the same offer, which the new one replaces. Or it is the new one, if all places are taken.
    /// A question that only repeats an older one is merged with it.
    #[must_use]
    fn add(&mut self, question: Question<M::State>) -> Option<Question<M::State>> {
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

impl<M: Machine> Backend<M> {
    /// Handles a peer's question (PROVE) for the digest of the file behind an offer.
    pub fn prove(&mut self, peer: usize, prove: &peer::Prove, turn: &mut Turn<'_, M>) {
        let (worker, handoff, number) = (prove.worker.get(), prove.handoff.get(), prove.offer.get());
        let until = turn.now + PATIENCE;
        let found = self.offers.find(peer, number, prove.length.get(), prove.tag);
        let question = found.and_then(|offered| {
            let state = turn.machine.state(&offered.file).ok_or(Reason::Socket)?;
            Ok(Question { peer, worker, handoff, number, state, offset: offered.offer.offset, until })
        });
        match question {
            Ok(question) => {
                let waits = self.answer_question(question, turn);
                if let Some(Question { worker, handoff, .. }) = waits.and_then(|waits| self.questions.add(waits)) {
                    tell_digest(peer, &digest(worker, handoff, 0, None), turn);
                }
            }
            Err(reason) => {
                tracing::debug!(%reason, handoff, "no digest for this file");
                tell_digest(peer, &digest(worker, handoff, 0, None), turn);
            }
        }
    }

    /// Answers the questions that need not wait any longer, for example because their files have been read.
    pub fn answer_questions(&mut self, turn: &mut Turn<'_, M>) {
        let waited = std::mem::take(&mut self.questions.0);
        let left = waited.into_iter().filter_map(|question| self.answer_question(question, turn)).collect();
        self.questions.0 = left;
    }

    /// Answers a question, or returns it if it has to wait longer.
    fn answer_question(&mut self, question: Question<M::State>, turn: &mut Turn<'_, M>) -> Option<Question<M::State>> {
        let Question { peer, worker, handoff, number, state, offset, until } = question;
        let known = match self.offers.file(number) {
            Some(file) => turn.machine.digest(file, state, Want::Now),
            None => Known::Never,
        };
        let sha256 = match known {
            Known::Digest(sha256) if self.offers.note_proven(number, state) => Some(sha256),
            Known::NotYet if turn.now < until && turn.shared.peers.is_up(peer) => return Some(question),
            _ => None,
        };
        tell_digest(peer, &digest(worker, handoff, offset, sha256), turn);
        None
    }

    /// Tells a frontend the digest of the file whose bytes are being sent for the claim `of`. `None` says that the
    /// digest is unknown, or no longer valid. `offset` is the place of the payload in the file.
    pub fn tell_file(&mut self, of: &Claimant, offset: u64, sha256: Option<Sha256>, turn: &mut Turn<'_, M>) {
        tell_digest(of.peer as usize, &digest(of.worker, of.handoff, offset, sha256), turn);
    }
}

fn tell_digest<M: Machine>(peer: usize, digest: &peer::Digest, turn: &mut Turn<'_, M>) {
    let is_known = digest.known.get() == 1;
    turn.shared.counts.proven += u64::from(is_known);
    turn.shared.counts.unproven += u64::from(!is_known);
    turn.tell_peer(peer, |out| digest.emit(out));
}

/// Builds a DIGEST about a handoff, for the server with this worker number. `None`: the digest is not known.
pub fn digest(worker: u32, handoff: u64, offset: u64, sha256: Option<Sha256>) -> peer::Digest {
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
    use crate::machine::model::Model;

    fn question(peer: usize, number: u64) -> Question<u64> {
        Question { peer, worker: 1, handoff: 1, number, state: 1, offset: 0, until: Instant::now() }
    }

    #[test]
    fn a_peer_has_its_share_of_places_and_an_offer_one() {
        let mut questions = Questions::<Model>::default();
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
