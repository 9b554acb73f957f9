//! First hops to clients behind which payload seems to vanish.
//!
//! ```text
//!   (none) --silent--> Counting --silent, ROW in a row--> Refusing --pause is over--> Trying
//!      ^                  |                                  ^                           |  |
//!      +----- heard ------+                                  +--silent: pause is doubled-+  |
//!      +------------------------------------ heard -----------------------------------------+
//! ```
//!
//! One client may be gone, or hostile: so several must be silent, one after the other, and none heard in between.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::routes::Hop;

/// Silent connections in a row, until no more payload is sent there.
const ROW: u32 = 3;
const PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));
/// How long one connection is tried, before another one is.
const TRIAL: Duration = Duration::from_secs(5);
/// With more of them all are forgotten.
const MOST: usize = 1024;

/// Where payload for a peer's clients goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Path {
    pub(super) peer: usize,
    pub(super) hop: Hop,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Counting(u32),
    /// Until then, and how long the next pause is.
    Refusing(Instant, Duration),
    /// One connection has until then.
    Trying(Instant, Duration),
}

/// A change that an operator should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing is sent there for so long.
    Silent(Duration),
    /// There is an answer again.
    Heard,
}

/// All that are known.
#[derive(Default)]
pub(super) struct Silences(HashMap<Path, State>);

impl Silences {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether nothing is to be sent there now. One connection is tried after each pause: the one that is asked for then.
    pub(super) fn refuses(&mut self, path: &Path, now: Instant) -> bool {
        let Some(state) = self.0.get_mut(path) else { return false };
        match *state {
            State::Counting(_) => false,
            State::Refusing(until, _) | State::Trying(until, _) if now < until => true,
            State::Refusing(_, pause) | State::Trying(_, pause) => {
                *state = State::Trying(now + TRIAL, pause);
                false
            }
        }
    }

    /// A new connection there acknowledges something, or nothing.
    pub(super) fn hear(&mut self, path: Path, acknowledges: bool, now: Instant) -> Option<Turn> {
        if acknowledges {
            let was_refused = self.0.remove(&path).is_some_and(|state| !matches!(state, State::Counting(_)));
            return was_refused.then_some(Turn::Heard);
        }
        if self.0.len() >= MOST && !self.0.contains_key(&path) {
            self.0.clear();
        }
        let state = self.0.entry(path).or_insert(State::Counting(0));
        let pause = match *state {
            State::Counting(row) if row + 1 < ROW => {
                *state = State::Counting(row + 1);
                return None;
            }
            State::Counting(_) => PAUSE.0,
            State::Refusing(..) => return None,
            State::Trying(_, pause) => pause,
        };
        *state = State::Refusing(now + pause, (2 * pause).min(PAUSE.1));
        Some(Turn::Silent(pause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(port: u32) -> Path {
        Path { peer: 0, hop: Hop { port, router: None } }
    }

    fn silent(silences: &mut Silences, now: Instant) -> Vec<Option<Turn>> {
        (0..ROW).map(|_| silences.hear(path(1), false, now)).collect()
    }

    #[test]
    fn several_in_a_row_are_a_sign_and_an_answer_in_between_ends_the_row() {
        let (mut silences, now) = (Silences::default(), Instant::now());
        assert_eq!(silences.hear(path(1), false, now), None);
        assert_eq!(silences.hear(path(1), false, now), None);
        assert_eq!(silences.hear(path(1), true, now), None);
        assert!(silences.is_empty());
        assert_eq!(silent(&mut silences, now), [None, None, Some(Turn::Silent(PAUSE.0))]);
        assert!(silences.refuses(&path(1), now) && !silences.refuses(&path(2), now));
        assert_eq!(silences.hear(path(1), false, now), None, "of those that were under way");
    }

    #[test]
    fn one_is_tried_after_each_pause_and_the_pause_grows() {
        let (mut silences, mut now) = (Silences::default(), Instant::now());
        silent(&mut silences, now);
        let mut pause = PAUSE.0;
        for _ in 0..10 {
            now += pause;
            assert!(!silences.refuses(&path(1), now), "one is tried");
            assert!(silences.refuses(&path(1), now), "and no more");
            pause = (2 * pause).min(PAUSE.1);
            assert_eq!(silences.hear(path(1), false, now), Some(Turn::Silent(pause)));
        }
        now += PAUSE.1;
        assert!(!silences.refuses(&path(1), now));
        assert_eq!(silences.hear(path(1), true, now), Some(Turn::Heard));
        assert!(!silences.refuses(&path(1), now));
    }

    #[test]
    fn a_trial_without_an_end_makes_room_for_another() {
        let (mut silences, now) = (Silences::default(), Instant::now());
        silent(&mut silences, now);
        assert!(!silences.refuses(&path(1), now + PAUSE.0));
        assert!(silences.refuses(&path(1), now + PAUSE.0 + TRIAL / 2));
        assert!(!silences.refuses(&path(1), now + PAUSE.0 + TRIAL));
    }
}
