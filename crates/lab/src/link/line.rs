//! One direction of a link, without I/O and without a clock: the caller gives the time with each frame that it pushes
//! or pops.
//!
//! ```text
//!  push -> queue of bytes, served at the rate -> lost? -> delay + jitter, after the one before -> pop
//!            full: dropped                                 late? twice?
//! ```
//!
//! The fate of the nth frame (lost, late, twice...) depends on the seed and n alone: every frame draws the same number
//! of random numbers, whatever becomes of it. (A burst of losses also ends by time.) Real servers send at other times
//! in each run, so the same fates may meet other segments.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::Link;
use super::frame::{mark_congestion, pure_ack};
use crate::random::Random;

/// One direction of a link.
#[derive(Debug)]
pub struct Line {
    link: Link,
    random: Random,
    /// Time at which the present burst of losses began; `None` if there is no burst.
    bad: Option<Instant>,
    /// Time at which the last frame in the queue will have left, at the link's rate.
    free: Option<Instant>,
    /// Time of arrival of the last frame that was pushed and not lost. If the frame is late, its lateness is not
    /// included.
    last_due: Option<Instant>,
    /// Beginning of the first slot for pure ACKs.
    first_slot: Option<Instant>,
    number: u64,
    waiting: BinaryHeap<Reverse<Waiting>>,
    counts: Counts,
}

/// Counts of the frames of one direction, by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub pushed: u64,
    /// Frames that arrived, second copies included.
    pub popped: u64,
    pub lost: u64,
    /// Frames that did not fit into the queue.
    pub overflowed: u64,
    pub late: u64,
    pub duplicated: u64,
    /// Frames that got a congestion mark ([`Link::mark`]).
    pub marked: u64,
    /// Pure ACKs that were left out because of a newer one ([`Link::ack_slot`]).
    pub thinned: u64,
}

/// A frame on its way. Frames are ordered by time of arrival, then by the order in which they were pushed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    due: Instant,
    number: u64,
    frame: Vec<u8>,
}

/// Random decisions about one frame.
struct Fate {
    lost: bool,
    jitter: Duration,
    late: bool,
    twice: bool,
    marked: bool,
}

impl Line {
    /// An empty line. With another `stream`, the same seed gives frames other fates.
    #[must_use]
    pub fn new(link: Link, seed: u64, stream: u64) -> Self {
        Self {
            link,
            random: Random::new(seed, stream),
            bad: None,
            free: None,
            last_due: None,
            first_slot: None,
            number: 0,
            waiting: BinaryHeap::new(),
            counts: Counts::default(),
        }
    }

    /// Restarts the random numbers: later frames have the fates of a new line with this seed. Frames on their way are
    /// not affected.
    pub fn reseed(&mut self, seed: u64, stream: u64) {
        self.random = Random::new(seed, stream);
        self.bad = None;
    }

    /// Takes a frame in at one end. Times must not go backwards.
    pub fn push(&mut self, now: Instant, mut frame: Vec<u8>) {
        self.counts.pushed += 1;
        let fate = self.fate(now);
        let Some(left) = self.transmit(now, frame.len()) else {
            self.counts.overflowed += 1;
            return;
        };
        if fate.lost {
            self.counts.lost += 1;
            return;
        }
        if fate.marked && mark_congestion(&mut frame) {
            self.counts.marked += 1;
        }
        let mut due = left + self.link.delay + fate.jitter;
        if !self.link.ack_slot.is_zero() && pure_ack(&frame).is_some() {
            due = self.slot_after(due);
        }
        due = self.last_due.map_or(due, |last| due.max(last));
        self.last_due = Some(due);
        if fate.late {
            self.counts.late += 1;
            due += self.link.lateness;
        }
        if fate.twice {
            self.counts.duplicated += 1;
            self.wait(due, frame.clone());
        }
        self.wait(due, frame);
    }

    /// Returns the next frame, if it has arrived at the other end by now.
    pub fn pop(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.next_due().filter(|due| *due <= now)?;
        let mut next = self.waiting.pop()?.0;
        while self.is_needless(&next) {
            self.counts.thinned += 1;
            next = self.waiting.pop()?.0;
        }
        self.counts.popped += 1;
        Some(next.frame)
    }

    /// Returns whether `frame` is a pure ACK that is needless: the next frame leaves at the same time, and is a pure
    /// ACK of the same connection that acknowledges more.
    fn is_needless(&self, frame: &Waiting) -> bool {
        let Some(Reverse(after)) = self.waiting.peek() else { return false };
        !self.link.ack_slot.is_zero()
            && after.due == frame.due
            && pure_ack(&frame.frame).is_some_and(|ack| pure_ack(&after.frame).is_some_and(|newer| newer.covers(&ack)))
    }

    /// Beginning of the first slot that is not before `due`.
    fn slot_after(&mut self, due: Instant) -> Instant {
        let (first, slot) = (*self.first_slot.get_or_insert(due), self.link.ack_slot);
        let slots = (due.saturating_duration_since(first)).as_nanos().div_ceil(slot.as_nanos());
        first + slot * u32::try_from(slots).unwrap_or(u32::MAX)
    }

    /// Time at which the next frame arrives.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.peek().map(|Reverse(waiting)| waiting.due)
    }

    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn wait(&mut self, due: Instant, frame: Vec<u8>) {
        self.waiting.push(Reverse(Waiting { due, number: self.number, frame }));
        self.number += 1;
    }

    /// Time at which a frame of `bytes` bytes will have left, at the link's rate; `None` if the queue has no room for
    /// it.
    fn transmit(&mut self, now: Instant, bytes: usize) -> Option<Instant> {
        let Some(rate) = self.link.rate else { return Some(now) };
        let begin = self.free.map_or(now, |free| free.max(now));
        let queued = (begin - now).as_nanos() * u128::from(rate) / (8 * 1_000_000_000);
        // A frame that finds the queue empty is sent whatever its size.
        if queued > 0 && queued + bytes as u128 > self.link.queue as u128 {
            return None;
        }
        let left = begin + Duration::from_nanos((bytes as u64 * 8 * 1_000_000_000).div_ceil(rate));
        self.free = Some(left);
        Some(left)
    }

    fn fate(&mut self, now: Instant) -> Fate {
        let [lost, turned, lost_in_burst, jitter, late, twice, marked] = std::array::from_fn(|_| self.random.part());
        let burst = self.link.burst.is_some_and(|burst| {
            let still = self.bad.filter(|since| now - *since <= burst.longest);
            let (goes_on, begins) = (turned >= burst.end, turned < burst.begin);
            self.bad = still.filter(|_| goes_on).or((still.is_none() && begins).then_some(now));
            self.bad.is_some() && lost_in_burst < burst.loss
        });
        Fate {
            lost: lost < self.link.loss || burst,
            jitter: self.link.jitter.mul_f64(jitter),
            late: late < self.link.reorder,
            twice: twice < self.link.duplicate,
            marked: marked < self.link.mark,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Burst;

    /// Number of random links that a test tries, each with its own random numbers.
    const LINKS: u64 = 300;
    const FRAMES: u32 = 400;

    /// Frames that came out: time of arrival, and the number that the frame carries.
    type Arrivals = Vec<(Instant, u32)>;

    fn any_link(random: &mut Random) -> Link {
        let mut often = |most: f64| if random.next().is_multiple_of(2) { 0.0 } else { random.part() * most };
        let mut link = Link::wan(Duration::from_secs_f64(often(0.2)))
            .jitter(Duration::from_secs_f64(often(0.05)))
            .loss(often(0.05))
            .reorder(often(0.1), Duration::from_secs_f64(often(0.02)))
            .duplicate(often(0.1));
        if often(1.0) > 0.0 {
            link = link.burst_loss(often(0.05), 1.0 + often(8.0));
        }
        if often(1.0) > 0.0 {
            link = link.rate(100_000 + often(1e8) as u64, 2000 + often(200_000.0) as usize);
        }
        link
    }

    /// Pushes numbered frames at random times, pops those that have arrived, and pops the rest at the end.
    fn run(line: &mut Line, start: Instant, random: &mut Random) -> Arrivals {
        let (mut now, mut arrivals) = (start, Vec::new());
        let pop_all = |line: &mut Line, now: Instant, arrivals: &mut Arrivals| {
            while let Some(due) = line.next_due().filter(|due| *due <= now) {
                let frame = line.pop(now).expect("it was due");
                arrivals.push((due, u32::from_be_bytes(frame[..4].try_into().unwrap())));
            }
            assert!(line.pop(now).is_none());
        };
        for number in 0..FRAMES {
            if random.part() < 0.3 {
                now += Duration::from_secs_f64(random.part() * 0.01);
            }
            pop_all(line, now, &mut arrivals);
            let mut frame = number.to_be_bytes().to_vec();
            frame.resize(60 + (random.next() % 1455) as usize, 0);
            line.push(now, frame);
        }
        pop_all(line, now + Duration::from_secs(3600), &mut arrivals);
        assert_eq!(line.next_due(), None);
        arrivals
    }

    /// Calls `check` with many random links, and with the frames that arrived over each.
    fn for_links(check: impl Fn(Link, &Line, &Arrivals)) {
        let base = Link::default().seed_or_random();
        println!("SHUNT_SEED={base}");
        for case in 0..LINKS {
            let mut random = Random::new(base, case);
            let link = any_link(&mut random);
            let mut line = Line::new(link, base, case);
            let arrivals = run(&mut line, Instant::now(), &mut random);
            check(link, &line, &arrivals);
        }
    }

    #[test]
    fn everything_that_is_not_lost_arrives() {
        for_links(|link, line, arrivals| {
            let counts = line.counts();
            let gone = counts.lost + counts.overflowed;
            assert_eq!(counts.pushed + counts.duplicated, counts.popped + gone, "{link:?}");
            assert_eq!(counts.popped, arrivals.len() as u64);
            assert!(link.loss > 0.0 || link.burst.is_some() || counts.lost == 0);
            assert!(link.rate.is_some() || counts.overflowed == 0);
            let numbers: std::collections::BTreeSet<_> = arrivals.iter().map(|(_, number)| number).collect();
            assert_eq!(numbers.len() as u64, counts.pushed - gone, "{link:?}");
        });
    }

    #[test]
    fn order_is_kept_where_nothing_is_late() {
        for_links(|link, line, arrivals| {
            assert!(arrivals.is_sorted_by_key(|(due, _)| *due));
            let sorted = arrivals.is_sorted_by_key(|(_, number)| *number);
            assert!(sorted || line.counts().late > 0, "{link:?}");
        });
    }

    #[test]
    fn late_frames_are_overtaken() {
        let link = Link::wan(Duration::from_millis(10)).reorder(0.1, Duration::from_millis(5));
        let mut line = Line::new(link, 1, 0);
        let arrivals = run(&mut line, Instant::now(), &mut Random::new(1, 1));
        assert!(!arrivals.is_sorted_by_key(|(_, number)| *number));
        assert_eq!(arrivals.len(), FRAMES as usize);
    }

    #[test]
    fn no_frame_comes_before_the_delay_and_none_after_the_jitter() {
        let start = Instant::now();
        let link = Link::wan(Duration::from_millis(50)).jitter(Duration::from_millis(10));
        let mut line = Line::new(link, 3, 0);
        for number in 0..1000_u64 {
            let now = start + Duration::from_millis(number * 20); // no frame waits for the one before
            line.push(now, vec![0; 60]);
            let took = line.next_due().unwrap() - now;
            assert!((50..60).contains(&took.as_millis()), "{took:?}");
            assert!(line.pop(now + took - Duration::from_nanos(1)).is_none() && line.pop(now + took).is_some());
        }
    }

    #[test]
    fn the_rate_is_kept_and_used() {
        const BYTES: usize = 1000;
        let start = Instant::now();
        let link = Link::default().rate(8_000_000, 20 * BYTES); // one frame per millisecond
        let mut line = Line::new(link, 5, 0);
        let mut arrivals = Vec::new();
        for turn in 0..2000_u64 {
            let now = start + Duration::from_micros(turn * 500); // frames come at twice the rate
            line.push(now, vec![0; BYTES]);
            while line.pop(now).is_some() {
                arrivals.push(now);
            }
        }
        let window = |count: usize| arrivals.windows(count + 1).map(|w| w[count] - w[0]).min().unwrap();
        assert!(window(100) >= Duration::from_millis(99), "{:?}", window(100));
        assert!((990..=1000).contains(&arrivals.len()), "{} of 1000", arrivals.len());
        let counts = line.counts();
        assert!(counts.overflowed > 900 && line.next_due().unwrap() > arrivals[0], "{counts:?}");
        // The last frame waits no longer than a full queue takes at the rate.
        let last = line.last_due.unwrap() - (start + Duration::from_micros(1999 * 500));
        assert!(last <= Duration::from_millis(20), "{last:?}");
    }

    #[test]
    fn losses_come_as_often_and_as_long_as_asked() {
        let count = |link: Link| {
            let mut line = Line::new(link, 11, 0);
            let now = Instant::now();
            let lost: Vec<bool> = (0..200_000)
                .map(|_| {
                    line.push(now, Vec::new());
                    line.pop(now).is_none()
                })
                .collect();
            let part = lost.iter().filter(|lost| **lost).count() as f64 / lost.len() as f64;
            let bursts = lost.windows(2).filter(|pair| !pair[0] && pair[1]).count();
            (part, part * lost.len() as f64 / bursts as f64)
        };
        let (part, length) = count(Link::default().loss(0.05));
        assert!((0.047..0.053).contains(&part) && (1.0..1.1).contains(&length), "{part} in bursts of {length}");
        let (part, length) = count(Link::default().burst_loss(0.03, 5.0));
        assert!((0.026..0.034).contains(&part) && (4.5..5.5).contains(&length), "{part} in bursts of {length}");
    }

    #[test]
    fn a_burst_ends_by_time_too() {
        let burst = Burst { begin: 1e-3, end: 0.0, loss: 1.0, longest: Duration::from_millis(100) };
        let mut line = Line::new(Link { burst: Some(burst), ..Link::default() }, 13, 0);
        let mut now = Instant::now();
        let mut arrives = |line: &mut Line, later| {
            now += Duration::from_millis(later);
            line.push(now, Vec::new());
            line.pop(now).is_some()
        };
        while arrives(&mut line, 1) {}
        for _ in 0..100 {
            assert!(!arrives(&mut line, 1));
        }
        assert!(arrives(&mut line, 1));
    }

    #[test]
    fn the_same_seed_has_the_same_fate_and_another_has_not() {
        let link = Link::wan(Duration::from_millis(20)).jitter(Duration::from_millis(5)).loss(0.05).duplicate(0.05);
        let start = Instant::now();
        let arrivals = |seed, stream| run(&mut Line::new(link, seed, stream), start, &mut Random::new(9, 9));
        assert_eq!(arrivals(1, 0), arrivals(1, 0));
        assert_ne!(arrivals(1, 0), arrivals(2, 0));
        assert_ne!(arrivals(1, 0), arrivals(1, 1));
        let reseeded = |line: &mut Line| {
            line.reseed(1, 0);
            run(line, start, &mut Random::new(9, 9))
        };
        let mut used = Line::new(link, 5, 0);
        run(&mut used, start, &mut Random::new(9, 9));
        used.last_due = None;
        assert_eq!(reseeded(&mut used), arrivals(1, 0));
    }
}
