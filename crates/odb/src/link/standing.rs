//! Which machines send to clients in the name of which of this machine's servers, as they have said themselves. They are asked
//! before the first handoff of each: one that is refused later may have had something written behind it.

use std::collections::HashMap;
use std::net::SocketAddr;

use shunt_wire::local::{Answer, Reason};

use super::Sender;
use crate::segment::now_ms;

/// After so long without an answer it is asked for again: agents that begin anew know nothing of it.
const SILENCE_MS: u64 = 1000;
/// So long a no holds; a configuration may be another by then.
const NO_MS: u64 = 10_000;
/// So long a no holds that is only about now.
const NOT_NOW_MS: u64 = 1000;
/// Servers that are remembered: a program has few.
const MOST: usize = 1024;

/// What a machine says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It sends.
    Yes,
    /// It does not.
    No,
    /// It has not said yet. The question, if it is due: its name.
    Unknown(Option<u64>),
}

#[derive(Clone, Copy, Debug)]
enum Said {
    /// Asked, under that name.
    Nothing(u64),
    Yes,
    No {
        holds_ms: u64,
    },
}

#[derive(Debug, Default)]
pub(super) struct Standings {
    said: HashMap<(u32, SocketAddr), (u32, Said, u64)>,
    asked: u64,
}

impl Standings {
    /// Of a server, by the address that its clients know.
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

    /// What an agent has answered. False: not to a question of ours.
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

    /// A machine cannot send more now.
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
    fn nobody_sends_before_it_has_said_so() {
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
