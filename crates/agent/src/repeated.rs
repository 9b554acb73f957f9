//! Words that a peer may say again and again. It is heard so often in a second, because an agent settles much by each.

use std::time::{Duration, Instant};

/// A peer's words of one kind are counted for so long.
pub(crate) const EVERY: Duration = Duration::from_secs(1);

/// How often a peer was heard in a session, and its newest word where that was too often.
#[derive(Debug)]
pub(crate) struct Repeated<T> {
    /// So often in each of these times.
    most: u32,
    since: Option<Instant>,
    heard: u32,
    waiting: Option<T>,
}

impl<T> Repeated<T> {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, since: None, heard: 0, waiting: None }
    }

    fn may_be_heard(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now >= since + EVERY) {
            (self.since, self.heard) = (Some(now), 0);
        }
        let may_be = self.heard < self.most;
        self.heard += u32::from(may_be);
        may_be
    }

    /// The word, where it is heard now. Else it waits, in place of the one before.
    pub(crate) fn hear(&mut self, word: T, now: Instant) -> Option<T> {
        if self.may_be_heard(now) {
            self.waiting = None;
            return Some(word);
        }
        self.waiting = Some(word);
        None
    }

    /// The word that has waited, where it is heard now.
    pub(crate) fn hear_again(&mut self, now: Instant) -> Option<T> {
        let is_heard = self.waiting.is_some() && self.may_be_heard(now);
        if is_heard { self.waiting.take() } else { None }
    }
}
