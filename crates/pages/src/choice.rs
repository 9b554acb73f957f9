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
/// The least of so many first times is the first mean, since a first read may have to connect.
const FIRST_TIMES: u32 = 3;
/// The slower one of member and source is tried once in TRIAL * ratio^2 reads. The ratio is its time by the time of the
/// faster one, and counts at most MOST_RATIO.
const TRIAL: f64 = 32.0;
const MOST_RATIO: f64 = 64.0;
/// One in this many reads of which members have only parts is made the other way.
const TRIAL_OF_PARTS: u32 = 256;
/// First pause of a member that fails, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Shortest time that a reader waits for a member before it turns to the source as well, and the longest one for a
/// member that usually answers within half of it.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(1);
const LONGEST_PATIENCE: Duration = Duration::from_millis(10);

/// Measured times of a source and of a pool's members.
#[derive(Debug)]
pub struct Choice {
    source: Times,
    members: Vec<Member>,
    /// Decisions on reads of which members have only parts, since the last trial.
    parts_decided: u32,
}

#[derive(Debug, Default)]
struct Times([Option<Mean>; SIZES]);

/// Mean of the reads of one size.
#[derive(Clone, Copy, Debug)]
struct Mean {
    nanoseconds: f64,
    pages: f64,
    /// Number of times, up to FIRST_TIMES.
    times: u32,
}

#[derive(Debug, Default)]
struct Member {
    times: Times,
    /// Decisions by size since the slower one of member and source was last tried.
    decided: [u32; SIZES],
    /// End of the pause of a member that has failed.
    left_until: Option<Instant>,
    /// Last pause, and when it began.
    last_pause: Option<(Duration, Instant)>,
}

/// Returns the index of a read's size.
fn size(pages: u64) -> usize {
    (pages.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Times {
    fn add(&mut self, pages: u64, took: Duration) {
        let took = (took.as_nanos() as f64).max(1.0);
        let mean = self.0[size(pages)].get_or_insert(Mean { nanoseconds: took, pages: pages as f64, times: 0 });
        mean.pages += (pages as f64 - mean.pages) / MEMORY;
        if mean.times < FIRST_TIMES {
            mean.times += 1;
            mean.nanoseconds = mean.nanoseconds.min(took);
        } else {
            mean.nanoseconds += (took.min(mean.nanoseconds * MOST_TIMES_MEAN) - mean.nanoseconds) / MEMORY;
        }
    }

    fn of(&self, pages: u64) -> Option<f64> {
        self.0[size(pages)].map(|mean| mean.nanoseconds)
    }

    /// Returns the expected time, from the means of the sizes next to this one. A size below all measured ones is
    /// expected to take as long as the smallest, and one above in proportion to its pages.
    fn guess(&self, pages: u64) -> Option<f64> {
        let pages = pages as f64;
        let below = self.0.iter().flatten().rfind(|mean| mean.pages <= pages);
        let above = self.0.iter().flatten().find(|mean| mean.pages > pages);
        match (below, above) {
            (Some(low), Some(high)) => {
                let share = (pages - low.pages) / (high.pages - low.pages);
                Some(low.nanoseconds + share * (high.nanoseconds - low.nanoseconds))
            }
            (Some(low), None) => Some(low.nanoseconds * pages / low.pages),
            (None, above) => above.map(|mean| mean.nanoseconds),
        }
    }
}

impl Choice {
    /// Makes a choice between a source and that many members, of which nothing is known.
    pub fn new(members: usize) -> Self {
        let members = (0..members).map(|_| Member::default()).collect();
        Self { source: Times::default(), members, parts_decided: 0 }
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
        member.left_until = None;
    }

    /// Notes that the member did not answer in time, or that its connection was lost. Of reads that fail together, the
    /// first one counts.
    pub fn member_failed(&mut self, member: usize, now: Instant) {
        let member = &mut self.members[member];
        if member.left_until.is_none_or(|until| until <= now) {
            member.leave(now);
        }
    }

    /// Decides whether a read of pages that the member may have goes to the member, and not to the source. What was not
    /// measured yet is tried: the source first.
    pub fn member_is_faster(&mut self, member: usize, pages: u64) -> bool {
        let member = &mut self.members[member];
        if member.left_until.is_some() {
            return false;
        }
        let (Some(source), Some(times)) = (self.source.of(pages), member.times.of(pages)) else {
            return self.source.of(pages).is_some();
        };
        let faster = times <= source;
        let ratio = if faster { source / times } else { times / source }.min(MOST_RATIO);
        let decided = &mut member.decided[size(pages)];
        *decided = decided.saturating_add(1);
        // Trials cost (ratio - 1) / (TRIAL * ratio^2) of the time, at most a 128th.
        if f64::from(*decided) < TRIAL * ratio * ratio {
            return faster;
        }
        *decided = 0;
        !faster
    }

    /// Decides whether a read that the members have only parts of takes these parts from them: `parts` are members and
    /// numbers of pages, `rest` is what only the source has. All are read at the same time, and the last answer counts.
    pub fn parts_are_faster(&mut self, parts: &[(usize, u64)], rest: u64) -> bool {
        if parts.iter().any(|(member, _)| self.members[*member].left_until.is_some()) {
            return false;
        }
        let pages = rest + parts.iter().map(|(_, pages)| pages).sum::<u64>();
        let Some(whole) = self.source.guess(pages) else { return false };
        let rest = if rest == 0 { Some(0.0) } else { self.source.guess(rest) };
        let mut times = parts.iter().map(|(member, pages)| self.members[*member].times.guess(*pages).unwrap_or(0.0));
        let faster = rest.is_some_and(|rest| rest < whole) && times.all(|time| time < whole);
        self.parts_decided = (self.parts_decided + 1) % TRIAL_OF_PARTS;
        faster != (self.parts_decided == 0)
    }

    /// Returns how long a reader waits for the member before it turns to the source as well.
    pub fn patience(&self, member: usize, pages: u64) -> Duration {
        let usual = Duration::from_nanos(self.members[member].times.guess(pages).unwrap_or(0.0) as u64);
        usual.saturating_mul(MOST_TIMES_MEAN as u32).min(LONGEST_PATIENCE).max(usual * 2).max(SHORTEST_PATIENCE)
    }

    /// Returns a member that has failed and whose pause is over. It is to be asked for a page that nobody waits for.
    /// Its next pause begins now. It ends with `member_took`; a trial that fails need not be reported.
    pub fn to_try(&mut self, now: Instant) -> Option<usize> {
        let member = self.members.iter().position(|member| member.left_until.is_some_and(|until| until <= now))?;
        self.members[member].leave(now);
        Some(member)
    }
}

impl Member {
    /// Begins a pause: twice as long as the last one, if this one has begun not long ago.
    fn leave(&mut self, now: Instant) {
        let pause = match self.last_pause {
            Some((pause, began)) if now < began + LONGEST_PAUSE * 2 => (pause * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.last_pause = Some((pause, now));
        self.left_until = Some(now + pause);
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
    fn reads_that_fail_together_are_one_failure() {
        let start = Instant::now();
        let mut choice = Choice::new(1);
        (0..16).for_each(|_| choice.member_failed(0, start));
        assert_eq!(choice.to_try(start + FIRST_PAUSE), Some(0));
    }

    #[test]
    fn a_member_that_fails_again_soon_has_a_longer_pause() {
        let start = Instant::now();
        let mut choice = Choice::new(1);
        choice.member_failed(0, start);
        choice.member_took(0, 1, us(30));
        choice.member_failed(0, start + FIRST_PAUSE);
        assert_eq!(choice.to_try(start + FIRST_PAUSE * 2), None);
        assert_eq!(choice.to_try(start + FIRST_PAUSE * 3), Some(0));
        choice.member_took(0, 1, us(30));
        choice.member_failed(0, start + Duration::from_secs(100));
        assert_eq!(choice.to_try(start + Duration::from_secs(100) + FIRST_PAUSE), Some(0));
    }

    #[test]
    fn a_first_read_that_connects_does_not_count_for_long() {
        let mut choice = Choice::new(1);
        run(&mut choice, 1, 1, us(100), us(50));
        choice.member_took(0, 1, Duration::from_secs(1));
        let (asked, _) = run(&mut choice, 1, 1_000_000, us(100), us(50));
        assert!(asked > 800_000, "asked {asked} times");
    }

    #[test]
    fn a_time_of_zero_does_no_harm() {
        let mut choice = Choice::new(1);
        choice.source_took(1, Duration::ZERO);
        let (asked, _) = run(&mut choice, 1, 1_000_000, us(500), us(30));
        assert!(asked > 900_000, "asked {asked} times");
    }

    #[test]
    fn parts_are_read_at_the_same_time() {
        let mut choice = Choice::new(2);
        assert!(!choice.parts_are_faster(&[(0, 10)], 10), "nothing is known");
        choice.source_took(16, us(160));
        choice.source_took(64, us(400));
        choice.member_took(0, 16, us(50));
        choice.member_took(1, 16, us(500));
        assert!(choice.parts_are_faster(&[(0, 16)], 16));
        assert!(choice.parts_are_faster(&[(0, 16)], 0), "the source is not needed");
        assert!(choice.parts_are_faster(&[(0, 16)], 40), "both numbers are of one size");
        assert!(!choice.parts_are_faster(&[(0, 16), (1, 16)], 16));
        let tried = (0..TRIAL_OF_PARTS).filter(|_| choice.parts_are_faster(&[(1, 16)], 16)).count();
        assert_eq!(tried, 1, "what is slower is tried");
        choice.member_failed(0, Instant::now());
        assert!(!choice.parts_are_faster(&[(0, 16)], 16));
    }

    #[test]
    fn patience_has_bounds() {
        let mut choice = Choice::new(1);
        assert_eq!(choice.patience(0, 1), SHORTEST_PATIENCE);
        choice.member_took(0, 1, us(1_000));
        assert_eq!(choice.patience(0, 1), us(4_000));
        choice.member_took(0, 64, us(4_000));
        assert_eq!(choice.patience(0, 64), LONGEST_PATIENCE);
        choice.member_took(0, 1024, us(15_000));
        assert_eq!(choice.patience(0, 1024), us(30_000), "a member that is always slow is not given up each time");
    }
}
