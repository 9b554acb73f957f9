//! A bound on the messages that a peer has this machine's servers read. A server's socket has little room: a peer that could
//! fill it would keep from servers what others have to say.
//!
//! A question (ASK, PROVE) is known by its names until it is answered. What a peer says unasked is about a handoff that it was
//! given; an agent does not know when one of these is over, so they are counted, and not remembered.

use std::collections::{HashMap, HashSet};

use shunt_wire::flow::FlowState;
use shunt_wire::peer::Claim;

use crate::agent::Agent;

/// Questions that one peer leaves unanswered at a time. Each server may have as many as are left for others, and a few
/// however many others have.
const QUESTIONS: usize = 4096;
const QUESTIONS_OF_ITS_OWN: usize = 16;
/// Messages of a kind that a peer may still send, however many handoffs it was given: as many may end at once.
const MOST: u32 = 1 << 16;
/// Digests of one handoff: known, withdrawn, and that again after 1, 2, 4... s for a minute, where its server did not take it.
const DIGESTS: u32 = 8;

/// A kind of question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Question {
    /// Answered by ANSWER.
    Ask,
    /// Answered by DIGEST.
    Prove,
}

/// A kind of message that a peer sends unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// ENDED.
    End,
    /// DIGEST of a handoff that is under way.
    Digest,
    /// ANSWER: a handoff of stored bytes waits.
    Waits,
}

/// The messages of one peer that servers still take.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    /// By the server's number, with its names for them. Those of no server are no entry.
    questions: HashMap<u32, HashSet<(Question, u64)>>,
    ends: u32,
    digests: u32,
    waits: u32,
}

impl Hearing {
    /// Notes a question: whether it may be asked.
    #[must_use]
    fn ask(&mut self, question: Question, worker: u32, name: u64) -> bool {
        let left = QUESTIONS.saturating_sub(self.questions.values().map(HashSet::len).sum());
        let may = self.questions.get(&worker).map_or(0, HashSet::len) < left.max(QUESTIONS_OF_ITS_OWN);
        if may {
            self.questions.entry(worker).or_default().insert((question, name));
        }
        may
    }

    /// Whether a question waits for this answer, which is the only one.
    fn is_answer(&mut self, question: Question, worker: u32, name: u64) -> bool {
        let Some(questions) = self.questions.get_mut(&worker) else { return false };
        let is_answer = questions.remove(&(question, name));
        if questions.is_empty() {
            self.questions.remove(&worker);
        }
        is_answer
    }

    /// The peer is given a handoff. `has_parts`: of bytes of its store.
    fn give(&mut self, claim: &Claim, has_parts: bool) {
        let more = |have: &mut u32, some: u32| *have = have.saturating_add(some).min(MOST);
        more(&mut self.ends, 1);
        if claim.flow.options & FlowState::DIGEST != 0 {
            more(&mut self.digests, DIGESTS);
        }
        if has_parts {
            more(&mut self.waits, 1);
        }
    }

    /// Whether a message is one of those that its handoffs let it send.
    fn take(&mut self, news: News) -> bool {
        let left = match news {
            News::End => &mut self.ends,
            News::Digest => &mut self.digests,
            News::Waits => &mut self.waits,
        };
        let may = *left > 0;
        *left -= u32::from(may);
        may
    }

    /// Its session is lost, and with it the answers.
    pub(crate) fn forget_questions(&mut self) {
        self.questions = HashMap::new();
    }

    /// A server is gone.
    fn forget_server(&mut self, worker: u32) {
        self.questions.remove(&worker);
    }
}

impl Agent {
    /// A server's question to a peer: whether it may be asked.
    #[must_use]
    pub(crate) fn may_ask(&mut self, peer: usize, question: Question, worker: u32, name: u64) -> bool {
        self.peers[peer].hearing.ask(question, worker, name)
    }

    pub(crate) fn note_given(&mut self, peer: usize, claim: &Claim, has_parts: bool) {
        self.peers[peer].hearing.give(claim, has_parts);
    }

    /// Whether what a peer says answers a question; or else is news that it may have. Counts what is neither.
    pub(crate) fn is_heard(&mut self, peer: usize, answer: Option<(Question, u32, u64)>, news: News) -> bool {
        let hearing = &mut self.peers[peer].hearing;
        let is_answer = answer.is_some_and(|(question, worker, name)| hearing.is_answer(question, worker, name));
        let is_heard = is_answer || hearing.take(news);
        self.counts.unasked += u64::from(!is_heard);
        is_heard
    }

    pub(crate) fn forget_questions_of(&mut self, worker: u32) {
        self.peers.iter_mut().for_each(|peer| peer.hearing.forget_server(worker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn claim(options: u8) -> Claim {
        let mut claim = Claim::new_zeroed();
        claim.flow.options = options;
        claim
    }

    #[test]
    fn a_question_is_answered_once_by_its_name() {
        let mut hearing = Hearing::default();
        assert!(hearing.ask(Question::Ask, 1, 7));
        assert!(!hearing.is_answer(Question::Prove, 1, 7) && !hearing.is_answer(Question::Ask, 2, 7));
        assert!(hearing.is_answer(Question::Ask, 1, 7));
        assert!(!hearing.is_answer(Question::Ask, 1, 7), "twice");
    }

    #[test]
    fn questions_that_nobody_answers_are_bounded_and_end_with_server_and_session() {
        let mut hearing = Hearing::default();
        let mut asked_by =
            |worker| (0..2 * QUESTIONS as u64).filter(|name| hearing.ask(Question::Prove, worker, *name)).count();
        assert_eq!(
            [1, 2, 3].map(&mut asked_by),
            [QUESTIONS / 2, QUESTIONS / 4, QUESTIONS / 8],
            "there is place for others"
        );
        let fewest = (4..100).map(&mut asked_by).min();
        assert_eq!(fewest, Some(QUESTIONS_OF_ITS_OWN), "however many others ask");
        assert!(!hearing.ask(Question::Ask, 1, 1));
        hearing.forget_server(1);
        assert!(hearing.ask(Question::Ask, 1, 1));
        hearing.forget_questions();
        assert!(!hearing.is_answer(Question::Ask, 1, 1));
    }

    #[test]
    fn news_are_as_many_as_handoffs_let_a_peer_have() {
        let mut hearing = Hearing::default();
        let all = [News::End, News::Digest, News::Waits];
        assert!(all.into_iter().all(|news| !hearing.take(news)), "of nothing");
        hearing.give(&claim(FlowState::DIGEST), false);
        hearing.give(&claim(0), true);
        let taken = all.map(|news| (0..100).filter(|_| hearing.take(news)).count());
        assert_eq!(taken, [2, DIGESTS as usize, 1]);
        (0..2 * MOST).for_each(|_| hearing.give(&claim(0), false));
        assert_eq!((0..2 * MOST).filter(|_| hearing.take(News::End)).count(), MOST as usize);
    }
}
