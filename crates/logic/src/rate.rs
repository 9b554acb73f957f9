//! Limits on how often something may happen, such as log lines and peers' messages.

use std::time::{Duration, Instant};

/// Allows at most `MOST` events in each second that begins with an event. So up to twice as many may come close
/// together.
#[derive(Clone, Copy, Debug, Default)]
pub struct PerSecond<const MOST: u32>(Option<(Instant, u32)>);

/// Allows one event a second.
pub type OncePerSecond = PerSecond<1>;

impl<const MOST: u32> PerSecond<MOST> {
    /// Counts an event. Returns whether it is allowed.
    pub fn allows(&mut self, now: Instant) -> bool {
        let begun = self.0.filter(|(begun, _)| now.duration_since(*begun) < Duration::from_secs(1));
        let (begun, before) = begun.unwrap_or((now, 0));
        self.0 = Some((begun, before.saturating_add(1)));
        before < MOST
    }
}

/// Shortest time between two lines of the log about a condition that lasts.
pub const SELDOM: Duration = Duration::from_secs(60);

/// Allows one event in [`SELDOM`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Seldom(Option<Instant>);

impl Seldom {
    /// Returns whether the event is allowed. An event that is not allowed does not delay the next allowed one.
    pub fn allows(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|last| now.duration_since(last) >= SELDOM);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

/// Period over which [`Throttle`] counts.
pub const THROTTLE_PERIOD: Duration = Duration::from_secs(1);

/// Delays messages that come too often. The newest of them is kept until one more message is allowed, and the older
/// ones are dropped.
#[derive(Debug)]
pub struct Throttle<T> {
    most: u32,
    period: Option<Instant>,
    count: u32,
    kept: Option<T>,
}

impl<T> Throttle<T> {
    /// Returns a throttle that allows `most` messages in each [`THROTTLE_PERIOD`].
    pub fn new(most: u32) -> Self {
        Self { most, period: None, count: 0, kept: None }
    }

    fn allows(&mut self, now: Instant) -> bool {
        if self.period.is_none_or(|begun| now >= begun + THROTTLE_PERIOD) {
            (self.period, self.count) = (Some(now), 0);
        }
        let is_allowed = self.count < self.most;
        self.count += u32::from(is_allowed);
        is_allowed
    }

    /// Returns the message if it is allowed now, and keeps it otherwise. In both cases, a message that was kept before
    /// is dropped.
    pub fn take(&mut self, message: T, now: Instant) -> Option<T> {
        if self.allows(now) {
            self.kept = None;
            return Some(message);
        }
        self.kept = Some(message);
        None
    }

    /// Returns the kept message, if there is one and it is allowed now.
    pub fn take_kept(&mut self, now: Instant) -> Option<T> {
        let is_allowed = self.kept.is_some() && self.allows(now);
        if is_allowed { self.kept.take() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_per_second_are_limited() {
        let (mut once, now) = (OncePerSecond::default(), Instant::now());
        assert!(once.allows(now) && !once.allows(now));
        assert!(once.allows(now + Duration::from_secs(1)));
        let mut thrice = PerSecond::<3>::default();
        let allowed = (0..10).filter(|step| thrice.allows(now + Duration::from_millis(300) * *step)).count();
        assert_eq!(allowed, 8, "three, three and two in 2.7 seconds");
    }

    #[test]
    fn a_lasting_condition_is_told_again_after_a_while() {
        let (mut seldom, now) = (Seldom::default(), Instant::now());
        assert!(seldom.allows(now) && !seldom.allows(now + SELDOM - Duration::from_millis(1)));
        assert!(seldom.allows(now + SELDOM));
    }

    #[test]
    fn the_newest_message_is_kept() {
        let (mut throttle, now) = (Throttle::new(2), Instant::now());
        let taken = [1, 2, 3, 4].map(|message| throttle.take(message, now));
        assert_eq!(taken, [Some(1), Some(2), None, None]);
        assert_eq!(throttle.take_kept(now), None);
        assert_eq!(throttle.take_kept(now + THROTTLE_PERIOD), Some(4));
        assert_eq!(throttle.take_kept(now + THROTTLE_PERIOD), None);
    }
}
