//! Bound on the messages that this agent passes from a peer to this machine's servers. A server's socket has little
//! room, and a peer that could fill it would block other peers' messages to that server. A *peer* is another machine's
//! agent, and a *worker* number the agent's number of one server connection. A *handoff* lets a peer send a payload on
//! the connection of a server's client. A *claim* is the message that asks the peer for the payload.
//!
//! A question (ASK, PROVE) is remembered, by worker and number, until it is answered. An unasked message is about a
//! handoff whose payload the peer was asked to send. An agent does not know when a handoff is over, so it only counts
//! how many unasked messages a peer may still send.

use std::collections::{HashMap, HashSet};

use shunt_wire::flow::FlowState;
use shunt_wire::peer::Claim;

/// Most questions to one peer that are unanswered at a time. One server may have as many unanswered questions as are
/// left for other servers. It may have QUESTIONS_OF_ITS_OWN even if that exceeds QUESTIONS.
const QUESTIONS: usize = 4096;
const QUESTIONS_OF_ITS_OWN: usize = 16;
/// Most messages of one kind ([`News`]) that a peer may still send, however many handoffs it was given.
const MOST: u32 = 1 << 16;
/// Number of DIGEST messages that a peer may send for one handoff: one with the digest, one that withdraws it, and six
/// repetitions of the second. They come after pauses of 1, 2, 4, 8, 16 and 32 s, while no answer comes.
const DIGESTS: u32 = 8;

/// Kind of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Question {
    /// Answered by ANSWER.
    Ask,
    /// Answered by DIGEST.
    Prove,
}

/// Kind of a message that a peer sends unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// ENDED: a handoff has ended without success.
    End,
    /// DIGEST of a handoff that is under way.
    Digest,
    /// ANSWER: a handoff of bytes of the peer's store waits.
    Waits,
}

/// Messages that one peer may still send to this machine's servers.
#[derive(Debug, Default)]
pub struct Hearing {
    /// Questions by the worker number of the server that asked, each with the server's number for it. A server without
    /// questions has no entry.
    questions: HashMap<u32, HashSet<(Question, u64)>>,
    ends: u32,
    digests: u32,
    waits: u32,
}

impl Hearing {
    /// Notes a question, if it may be asked. Returns whether it may be asked.
    #[must_use]
    pub fn ask(&mut self, question: Question, worker: u32, name: u64) -> bool {
        let left = QUESTIONS.saturating_sub(self.questions.values().map(HashSet::len).sum());
        let may = self.questions.get(&worker).map_or(0, HashSet::len) < left.max(QUESTIONS_OF_ITS_OWN);
        if may {
            self.questions.entry(worker).or_default().insert((question, name));
        }
        may
    }

    /// Returns whether a question waits for this answer, and forgets the question.
    fn is_answer(&mut self, question: Question, worker: u32, name: u64) -> bool {
        let Some(questions) = self.questions.get_mut(&worker) else { return false };
        let is_answer = questions.remove(&(question, name));
        if questions.is_empty() {
            self.questions.remove(&worker);
        }
        is_answer
    }

    /// Notes that the peer is asked to send the payload of a handoff. `has_parts` says that the payload consists of
    /// bytes that the peer's store has, the memory for the payloads of its machine's programs.
    pub fn give(&mut self, claim: &Claim, has_parts: bool) {
        let more = |have: &mut u32, some: u32| *have = have.saturating_add(some).min(MOST);
        more(&mut self.ends, 1);
        if claim.flow.options & FlowState::DIGEST != 0 {
            more(&mut self.digests, DIGESTS);
        }
        if has_parts {
            more(&mut self.waits, 1);
        }
    }

    /// Counts an unasked message. Returns whether the claims that the peer was given allow it.
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

    /// Returns whether a message answers a question, or is an unasked one that the peer may send.
    #[must_use]
    pub fn hear(&mut self, answer: Option<(Question, u32, u64)>, news: News) -> bool {
        answer.is_some_and(|(question, worker, name)| self.is_answer(question, worker, name)) || self.take(news)
    }

    /// Forgets all questions, because the session is lost and they will not be answered.
    pub fn forget_questions(&mut self) {
        self.questions = HashMap::new();
    }

    /// Forgets the questions of a server that is gone.
    pub fn forget_server(&mut self, worker: u32) {
        self.questions.remove(&worker);
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
            |worker| (0..2 * QUESTIONS as u64).take_while(|name| hearing.ask(Question::Prove, worker, *name)).count();
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
