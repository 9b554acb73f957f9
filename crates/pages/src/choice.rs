//! Which of member and source answers faster.
//!
//! Both are measured as they are used, by size of the read. A read goes to the faster one, and sometimes to the other
//! one, so that its times stay true: the rarer, the slower it is. So these trials cost less than a hundredth of all
//! time, whatever the two need.
//!
//! A member that fails is left alone. Then readers do not wait for it, and trials in the background say when it can be
//! used again.

use std::time::{Duration, Instant};

/// Sizes that are measured apart: 1 page, 2 to 3, 4 to 7, and so on up to 2,048 and more.
const SIZES: usize = 12;
/// Reciprocal weight of a new time in the mean.
const MEMORY: f64 = 8.0;
/// A time counts at most as this many times the mean, so that a single pause of the machine says little.
const MOST_TIMES_MEAN: f64 = 4.0;
/// First pause of a member that fails, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Shortest and longest time that a reader waits for a member before it turns to the source as well.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(1);
const LONGEST_PATIENCE: Duration = Duration::from_millis(10);

/// Measured times of a source and of a pool's members.
#[derive(Debug)]
pub struct Choice {
    source: Times,
    members: Vec<Member>,
}

#[derive(Debug, Default)]
struct Times {
    /// Mean time by size, in nanoseconds.
    mean: [Option<f64>; SIZES],
}

#[derive(Debug, Default)]
struct Member {
    times: Times,
    /// Decisions by size since the slower one of member and source was last tried.
    decided: [u32; SIZES],
    failed: Option<Failed>,
}

/// Pause of a member that has failed.
#[derive(Clone, Copy, Debug)]
struct Failed {
    until: Instant,
    pause: Duration,
}

/// Returns the index of a read's size.
fn size(pages: u64) -> usize {
    (pages.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Times {
    fn add(&mut self, pages: u64, took: Duration) {
        let took = took.as_nanos() as f64;
        let mean = &mut self.mean[size(pages)];
        *mean = Some(match *mean {
            Some(mean) => mean + (took.min(mean * MOST_TIMES_MEAN) - mean) / MEMORY,
            None => took,
        });
    }

    fn of(&self, pages: u64) -> Option<f64> {
        self.mean[size(pages)]
    }

    /// Returns the time by the nearest size that was measured, in proportion to the number of pages.
    fn guess(&self, pages: u64) -> Option<f64> {
        let wanted = size(pages);
        let nearest = (0..SIZES).filter(|at| self.mean[*at].is_some()).min_by_key(|at| at.abs_diff(wanted))?;
        Some(self.mean[nearest]? * libm::exp2(wanted as f64 - nearest as f64))
    }
}

impl Choice {
    /// Makes a choice between a source and that many members, of which nothing is known.
    pub fn new(members: usize) -> Self {
        Self { source: Times::default(), members: (0..members).map(|_| Member::default()).collect() }
    }

    /// Notes how long the source took for a read.
    pub fn source_took(&mut self, pages: u64, took: Duration) {
        self.source.add(pages, took);
    }

    /// Notes how long the member took for a read. A member that had failed is used again.
    ///
    /// # Panics
    /// If there is no such member, here and in all functions that take a member.
    pub fn member_took(&mut self, member: usize, pages: u64, took: Duration) {
        let member = &mut self.members[member];
        member.times.add(pages, took);
        member.failed = None;
    }

    /// Notes that the member did not answer in time, or that its connection was lost.
    pub fn member_failed(&mut self, member: usize, now: Instant) {
        let failed = &mut self.members[member].failed;
        let pause = failed.map_or(FIRST_PAUSE, |failed| (failed.pause * 2).min(LONGEST_PAUSE));
        *failed = Some(Failed { until: now + pause, pause });
    }

    /// Decides whether a read of pages that the member may have goes to the member, and not to the source. What was not
    /// measured yet is tried: the source first.
    pub fn member_is_faster(&mut self, member: usize, pages: u64) -> bool {
        let member = &mut self.members[member];
        if member.failed.is_some() {
            return false;
        }
        let (Some(source), Some(times)) = (self.source.of(pages), member.times.of(pages)) else {
            return self.source.of(pages).is_some();
        };
        let faster = times <= source;
        let ratio = if faster { source / times.max(1.0) } else { times / source.max(1.0) };
        let decided = &mut member.decided[size(pages)];
        *decided += 1;
        // Trials cost (ratio - 1) / (32 ratio^2) of the time, at most a 128th.
        if f64::from(*decided) < 32.0 * ratio * ratio {
            return faster;
        }
        *decided = 0;
        !faster
    }

    /// Decides whether a read that the members have only parts of takes these parts from them: `parts` are members and
    /// numbers of pages, `rest` is what only the source has. All are read at the same time, and the last answer counts.
    pub fn parts_are_faster(&self, parts: &[(usize, u64)], rest: u64) -> bool {
        let pages = rest + parts.iter().map(|(_, pages)| pages).sum::<u64>();
        let Some(whole) = self.source.guess(pages) else { return false };
        let mut times = parts.iter().map(|(member, pages)| match &self.members[*member] {
            Member { failed: Some(_), .. } => f64::INFINITY,
            Member { times, .. } => times.guess(*pages).unwrap_or(0.0),
        });
        self.source.guess(rest).is_some_and(|rest| rest < whole) && times.all(|time| time < whole)
    }

    /// Returns how long a reader waits for the member before it turns to the source as well.
    pub fn patience(&self, member: usize, pages: u64) -> Duration {
        let usual = self.members[member].times.guess(pages).unwrap_or(0.0);
        Duration::from_nanos((usual * MOST_TIMES_MEAN) as u64).clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE)
    }

    /// Returns a member that has failed and whose pause is over. It is to be asked for a page that nobody waits for.
    /// Its next pause begins now, and ends with `member_took`.
    pub fn to_try(&mut self, now: Instant) -> Option<usize> {
        let over = |member: &Member| member.failed.is_some_and(|failed| failed.until <= now);
        let member = self.members.iter().position(over)?;
        self.member_failed(member, now);
        Some(member)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    /// Reads `reads` times, and returns how often the member was asked and how long all took together.
    fn run(choice: &mut Choice, pages: u64, reads: u32, source: Duration, member: Duration) -> (u32, Duration) {
        let (mut asked, mut took) = (0, Duration::ZERO);
        for _ in 0..reads {
            if choice.member_is_faster(0, pages) {
                choice.member_took(0, pages, member);
                (asked, took) = (asked + 1, took + member);
            } else {
                choice.source_took(pages, source);
                took += source;
            }
        }
        (asked, took)
    }

    proptest! {
        #[test]
        fn the_faster_one_is_used_and_trials_cost_little(
            source in 1u64..100_000, member in 1u64..100_000, pages in 1u64..5000,
        ) {
            let mut choice = Choice::new(1);
            let (_, took) = run(&mut choice, pages, 10_000, us(source), us(member));
            let best = us(source.min(member)) * 10_000;
            let first = us(source + member) * 2;
            prop_assert!(took <= best + best / 64 + first, "{:?}, at best {:?}", took, best);
        }

        #[test]
        fn a_change_is_noticed(fast in 1u64..1000, ratio in 2u64..20) {
            let (fast, slow) = (us(fast), us(fast * ratio));
            let mut choice = Choice::new(1);
            run(&mut choice, 1, 1000, slow, fast);
            let (asked, _) = run(&mut choice, 1, 100_000, fast, slow);
            prop_assert!(asked < 5_000, "the slow member was asked {} times", asked);
            let (asked, _) = run(&mut choice, 1, 200_000, slow, fast);
            prop_assert!(asked > 100_000, "the fast member was asked {} times", asked);
        }
    }

    #[test]
    fn sizes_are_decided_apart() {
        let mut choice = Choice::new(1);
        run(&mut choice, 1, 1000, us(80), us(30));
        run(&mut choice, 256, 1000, us(300), us(900));
        assert!(run(&mut choice, 1, 100, us(80), us(30)).0 > 90);
        assert!(run(&mut choice, 256, 100, us(300), us(900)).0 < 10);
    }

    #[test]
    fn a_member_that_fails_is_tried_in_the_background_with_growing_pauses() {
        let start = Instant::now();
        let mut choice = Choice::new(2);
        choice.source_took(1, us(80));
        choice.member_took(0, 1, us(30));
        choice.member_failed(0, start);
        assert!(!choice.member_is_faster(0, 1));

        let trials: Vec<_> = (0..60_000)
            .map(|ms| start + Duration::from_millis(ms))
            .filter(|now| choice.to_try(*now).is_some())
            .collect();
        let pauses: Vec<_> = trials.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(trials[0], start + FIRST_PAUSE);
        assert!(pauses.is_sorted() && pauses.last() == Some(&LONGEST_PAUSE), "{pauses:?}");

        choice.member_took(0, 1, us(30));
        assert!(choice.member_is_faster(0, 1));
        assert_eq!(choice.to_try(start + Duration::from_secs(1000)), None);
    }

    #[test]
    fn parts_are_read_at_the_same_time() {
        let mut choice = Choice::new(2);
        assert!(!choice.parts_are_faster(&[(0, 10)], 10), "nothing is known");
        choice.source_took(16, us(160));
        choice.member_took(0, 16, us(50));
        choice.member_took(1, 16, us(500));
        assert!(choice.parts_are_faster(&[(0, 16)], 16));
        assert!(!choice.parts_are_faster(&[(0, 16), (1, 16)], 16));
        choice.member_failed(0, Instant::now());
        assert!(!choice.parts_are_faster(&[(0, 16)], 16));
    }

    #[test]
    fn patience_has_bounds() {
        let mut choice = Choice::new(1);
        assert_eq!(choice.patience(0, 1), SHORTEST_PATIENCE);
        choice.member_took(0, 1, us(1_000));
        assert_eq!(choice.patience(0, 1), us(4_000));
        choice.member_took(0, 64, us(100_000));
        assert_eq!(choice.patience(0, 64), LONGEST_PATIENCE);
    }
}
