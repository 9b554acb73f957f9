//! Answers of machines to a question: whether they send to clients in the name of one of this machine's servers (with
//! the server's address as source). In a *handoff*, another machine sends a payload to a client. Each machine is asked
//! before the first handoff of each server. A refusal after a handoff has begun would come too late: the program may
//! have written something behind the payload.

use std::collections::HashMap;
use std::net::SocketAddr;

use shunt_wire::local::{Answer, Reason};

use super::Sender;
use crate::segment::now_ms;

/// Time after which an unanswered question is repeated, in milliseconds. An agent that was started again does not know
/// the question.
const SILENCE_MS: u64 = 1000;
/// Time for which a refusal is valid, in milliseconds. Later the machine may have another configuration.
const NO_MS: u64 = 10_000;
/// Time for which a refusal for a temporary reason is valid, in milliseconds.
const NOT_NOW_MS: u64 = 1000;
/// Most answers that are remembered, one for each machine and server. A program has few servers. Before there would be
/// more, all are forgotten.
const MOST: usize = 1024;

/// Answer of a machine to the question whether it sends in a server's name, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The machine sends.
    Yes,
    /// The machine does not send.
    No,
    /// The machine has not answered yet. If the question has to be asked now, this is its name.
    Unknown(Option<u64>),
}

#[derive(Clone, Copy, Debug)]
enum Said {
    /// The question with this name was asked, and has no answer yet.
    Nothing(u64),
    Yes,
    No {
        holds_ms: u64,
    },
}

#[derive(Debug, Default)]
pub(super) struct Standings {
    /// By a machine's index on the agent's board and a server's address: the machine's epoch, the machine's answer, and
    /// a time. The epoch is a number that changes when a session with the machine begins or ends, or
    /// its prefixes change. The time is that of
    /// the answer, or of the question while there is no answer, in milliseconds.
    said: HashMap<(u32, SocketAddr), (u32, Said, u64)>,
    asked: u64,
}

impl Standings {
    /// Returns the answer for a server, by the address that its clients know.
    pub(super) fn of(&mut self, sender: Sender, server: SocketAddr) -> Standing {
        let now = now_ms();
        let known = self.said.get(&(sender.index, server)).filter(|(epoch, ..)| *epoch == sender.epoch);
        let is_fresh = |since: u64, ms: u64| now.saturating_sub(since) < ms;
        match known {
            Some((_, Said::Yes, _)) => return Standing::Yes,
            Some((_, Said::No { holds_ms }, since)) if is_fresh(*since, *holds_ms) => return Standing::No,
            Some((_, Said::Nothing(_), since)) if is_fresh(*since, SILENCE_MS) => return Standing::Unknown(None),
            _ => {}
        }
        if self.said.len() >= MOST {
            self.said.clear();
        }
        self.asked += 1;
        self.said.insert((sender.index, server), (sender.epoch, Said::Nothing(self.asked), now));
        Standing::Unknown(Some(self.asked))
    }

    /// Takes in an agent's answer. Returns false if it answers no question that is still open.
    pub(super) fn hear(&mut self, answer: &Answer) -> bool {
        let asked = self.said.iter_mut().find(|((peer, _), (_, said, _))| {
            *peer == answer.peer && matches!(said, Said::Nothing(asked) if *asked == answer.handoff)
        });
        let Some((_, (_, said, since))) = asked else { return false };
        let not_now = [Reason::Limit, Reason::Busy].iter().any(|reason| *reason as u32 == answer.reason);
        let holds_ms = if not_now { NOT_NOW_MS } else { NO_MS };
        *said = if answer.reason == Answer::YES { Said::Yes } else { Said::No { holds_ms } };
        *since = now_ms();
        true
    }

    /// Notes that a machine cannot send more now.
    pub(super) fn hold_back(&mut self, sender: Sender, server: SocketAddr) {
        self.said.insert((sender.index, server), (sender.epoch, Said::No { holds_ms: NOT_NOW_MS }, now_ms()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDER: Sender = Sender { index: 3, epoch: 8 };

    fn server() -> SocketAddr {
        "192.0.2.1:80".parse().unwrap()
    }

    fn answer(handoff: u64, reason: u32, peer: u32) -> Answer {
        Answer { header: Answer::HEADER, handoff, reason, peer }
    }

    #[test]
    fn no_machine_is_asked_to_send_before_it_has_agreed() {
        let mut standings = Standings::default();
        let Standing::Unknown(Some(question)) = standings.of(SENDER, server()) else { panic!("a question") };
        assert_eq!(standings.of(SENDER, server()), Standing::Unknown(None), "asked once");
        assert!(!standings.hear(&answer(question, Answer::YES, 4)), "another's answer");
        assert!(!standings.hear(&answer(question + 1, Answer::YES, 3)), "to another question");
        assert_eq!(standings.of(SENDER, server()), Standing::Unknown(None));
        assert!(standings.hear(&answer(question, Answer::YES, 3)));
        assert_eq!(standings.of(SENDER, server()), Standing::Yes);
        assert!(!standings.hear(&answer(question, Reason::NotAllowed as u32, 3)), "answered once");
        let other = "192.0.2.1:81".parse().unwrap();
        assert!(matches!(standings.of(SENDER, other), Standing::Unknown(Some(_))), "of each server");
    }

    #[test]
    fn a_new_session_is_asked_anew() {
        let mut standings = Standings::default();
        let Standing::Unknown(Some(question)) = standings.of(SENDER, server()) else { panic!("a question") };
        standings.hear(&answer(question, Answer::YES, 3));
        let next = Sender { epoch: 10, ..SENDER };
        assert!(matches!(standings.of(next, server()), Standing::Unknown(Some(_))));
        assert!(!standings.hear(&answer(question, Answer::YES, 3)), "of the old one");
    }

    #[test]
    fn a_no_holds_and_so_does_one_about_now() {
        let mut standings = Standings::default();
        let Standing::Unknown(Some(question)) = standings.of(SENDER, server()) else { panic!("a question") };
        standings.hear(&answer(question, Reason::NotAllowed as u32, 3));
        assert_eq!(standings.of(SENDER, server()), Standing::No);
        let other = Sender { index: 4, ..SENDER };
        standings.hold_back(other, server());
        assert_eq!(standings.of(other, server()), Standing::No);
    }
}
