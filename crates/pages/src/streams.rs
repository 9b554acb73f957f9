//! Sequential and strided reads of an open file, and what to read ahead for them.
//!
//! A *stream* is a row of reads, each one the same distance behind the one before (a strided stream), or where the one
//! before ended (a sequential one). A file can have several streams, for example of threads that read different parts.
//! Once a stream is certain, pages before the reader are read ahead, in batches. The *window* is the distance up to
//! which this is done. It doubles with each batch as long as the pages are used, and shrinks when pages are wasted.

use std::iter;
use std::ops::Range;

/// Most streams of one open file. A further one replaces the stream that was read least recently.
const STREAMS: usize = 4;
/// Steps of equal distance that make a stream certain.
const CERTAIN: u32 = 2;
/// Steps of equal distance that make a stream certain after pages were wasted at the smallest window.
const CERTAIN_AFTER_WASTE: u32 = 8;
/// First and smallest window, in pages.
const LEAST_WINDOW: u64 = 16;
/// Greatest distance between two reads of a strided stream, in pages (64 MiB).
const MOST_STEP: u64 = 1 << 14;

/// Streams of an open file.
#[derive(Debug)]
pub struct Streams {
    streams: Vec<Stream>,
    /// Greatest window, in pages.
    most: u64,
    /// Greatest window at present. It is at most `most`, and less after waste.
    limit: u64,
    /// Pages that were used since the limit changed.
    used: u64,
    certain: u32,
}

#[derive(Debug)]
struct Stream {
    /// Pages of the last read.
    last: Range<u64>,
    /// Distance between the beginnings of two reads. It is 0 before the second one.
    step: u64,
    /// Steps of this distance in a row.
    steps: u32,
    /// First page that has not been read ahead.
    ahead: u64,
    window: u64,
}

/// Pages to read ahead: `pieces` ranges of `count` pages, whose beginnings are `step` pages apart. Each range begins
/// within the file, and the last one may end beyond it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Batch {
    pub first: u64,
    pub count: u64,
    pub step: u64,
    pub pieces: u64,
}

impl Batch {
    /// Returns the ranges of pages, in the order of their use.
    pub fn ranges(self) -> impl Iterator<Item = Range<u64>> {
        iter::successors(Some(self.first), move |first| Some(first + self.step))
            .map(move |first| first..first + self.count)
            .take(self.pieces as usize)
    }
}

impl Streams {
    /// Makes the streams of a file that was just opened. `most` is the greatest window, in pages.
    pub fn new(most: u64) -> Self {
        Self { streams: Vec::new(), most, limit: most, used: 0, certain: CERTAIN }
    }

    /// Notes a read, and returns what to read ahead. `end` is the number of pages in the file.
    pub fn read(&mut self, pages: Range<u64>, end: u64) -> Option<Batch> {
        if pages.is_empty() {
            return None;
        }
        let found = self.streams.iter().position(|stream| stream.continues(&pages));
        let at = found.or_else(|| self.streams.iter().position(|stream| stream.may_begin(&pages)));
        let mut stream = match at {
            Some(at) => self.streams.remove(at),
            None => Stream::new(&pages),
        };
        if at.is_some() {
            stream.step_to(pages, found.is_some());
        }
        let batch = if stream.steps >= self.certain { stream.batch(end, self.limit) } else { None };
        // The stream that was read last is the last one.
        self.streams.push(stream);
        if self.streams.len() > STREAMS {
            self.streams.remove(0);
        }
        batch
    }

    /// Notes that pages were read which had been read ahead.
    pub fn used(&mut self, pages: u64) {
        self.used += pages;
        if self.used >= self.limit {
            self.used = 0;
            self.limit = (self.limit * 2).min(self.most);
            self.certain = CERTAIN;
        }
    }

    /// Notes that pages were read ahead and dropped before anybody read them.
    pub fn wasted(&mut self) {
        if self.limit <= LEAST_WINDOW {
            self.certain = CERTAIN_AFTER_WASTE;
            self.streams.iter_mut().for_each(|stream| stream.steps = 0);
        }
        self.limit = (self.limit / 2).max(LEAST_WINDOW.min(self.most));
        self.used = 0;
    }
}

impl Stream {
    fn new(pages: &Range<u64>) -> Self {
        // Most files are read from their beginning to their end, so the first page counts as a step.
        let steps = u32::from(pages.start == 0);
        Self { last: pages.clone(), step: 0, steps, ahead: pages.end, window: LEAST_WINDOW }
    }

    fn is_sequential(&self) -> bool {
        self.step <= self.last.end - self.last.start
    }

    /// Returns whether the read is the next one of this stream. The kernel may ask for the pages that follow each other
    /// in another order, so all pages that were read ahead belong to a sequential stream.
    fn continues(&self, pages: &Range<u64>) -> bool {
        if self.is_sequential() {
            pages.start == self.last.end || (self.last.end..self.ahead).contains(&pages.start)
        } else {
            pages.start == self.last.start + self.step && pages.end - pages.start == self.last.end - self.last.start
        }
    }

    /// Returns whether the read may be the second one of a strided stream.
    fn may_begin(&self, pages: &Range<u64>) -> bool {
        let same = pages.end - pages.start == self.last.end - self.last.start;
        self.steps <= 1 && same && pages.start > self.last.end && pages.start - self.last.start <= MOST_STEP
    }

    fn step_to(&mut self, pages: Range<u64>, continues: bool) {
        if continues {
            self.steps += 1;
        } else {
            self.steps = 1;
            self.step = pages.start - self.last.start;
            self.ahead = pages.start + self.step;
        }
        self.last = pages;
    }

    /// Returns the next batch if less than half of the window is left before the reader.
    fn batch(&mut self, end: u64, limit: u64) -> Option<Batch> {
        self.window = self.window.min(limit);
        let sequential = self.is_sequential();
        let count = if sequential { 1 } else { self.last.end - self.last.start };
        let step = if sequential { 1 } else { self.step };
        let next = if sequential { self.last.end } else { self.last.start + step };
        // A strided stream has at least one piece before the reader, however far away that is.
        let pieces = (self.window / count).max(1);
        let from = self.ahead.max(next);
        let left = (from - next) / step;
        let in_file = end.saturating_sub(from).div_ceil(step);
        let missing = pieces.saturating_sub(left).min(in_file);
        if left > pieces / 2 || missing == 0 {
            return None;
        }
        self.ahead = from + missing * step;
        self.window = (self.window * 2).min(limit);
        Some(if sequential {
            Batch { first: from, count: missing, step: missing, pieces: 1 }
        } else {
            Batch { first: from, count, step, pieces: missing }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: u64 = 1 << 20;
    const MOST: u64 = 512;

    /// Reads with the given streams, and returns all pages that were read ahead.
    fn pages_ahead(streams: &mut Streams, reads: impl IntoIterator<Item = Range<u64>>) -> Vec<u64> {
        let batches = reads.into_iter().filter_map(|pages| streams.read(pages, END));
        batches.flat_map(|batch| batch.ranges().flatten().collect::<Vec<_>>()).collect()
    }

    fn sequential(first: u64, count: u64, reads: u64) -> impl Iterator<Item = Range<u64>> {
        (0..reads).map(move |at| first + at * count..first + (at + 1) * count)
    }

    fn strided(first: u64, count: u64, step: u64, reads: u64) -> impl Iterator<Item = Range<u64>> {
        (0..reads).map(move |at| first + at * step..first + at * step + count)
    }

    #[test]
    fn a_file_read_from_its_beginning_is_read_ahead_at_the_second_read() {
        let mut streams = Streams::new(MOST);
        assert_eq!(streams.read(0..1, END), None);
        assert_eq!(streams.read(1..2, END), Some(Batch { first: 2, count: 16, step: 16, pieces: 1 }));
    }

    #[test]
    fn the_window_doubles_up_to_the_greatest() {
        let mut streams = Streams::new(MOST);
        let batches: Vec<_> = sequential(0, 4, 1000).filter_map(|pages| streams.read(pages, END)).collect();
        assert!(batches.windows(2).all(|pair| pair[0].first + pair[0].count == pair[1].first), "{batches:?}");
        let greatest = batches.iter().map(|batch| batch.count).max();
        assert!(greatest >= Some(MOST / 2) && greatest <= Some(MOST), "{greatest:?}");
    }

    #[test]
    fn waste_shrinks_the_window_and_use_opens_it() {
        let mut streams = Streams::new(MOST);
        pages_ahead(&mut streams, sequential(0, 4, 1000));
        (0..3).for_each(|_| streams.wasted());
        let ahead = |streams: &mut Streams, first| {
            sequential(first, 4, 200).filter_map(|pages| streams.read(pages, END)).map(|batch| batch.count).max()
        };
        assert!(ahead(&mut streams, 4000) <= Some(MOST / 8));
        (0..10).for_each(|_| streams.used(MOST));
        assert!(ahead(&mut streams, 4800) > Some(MOST / 4));
    }

    #[test]
    fn a_reader_that_only_wastes_must_prove_its_stream_longer() {
        let mut streams = Streams::new(MOST);
        (0..20).for_each(|_| streams.wasted());
        assert!(pages_ahead(&mut streams, sequential(1000, 1, 5)).is_empty());
        assert!(!pages_ahead(&mut streams, sequential(1005, 1, 10)).is_empty());
    }

    proptest! {
        #[test]
        fn a_stream_is_read_ahead_in_order_and_within_the_window(
            first in 0u64..1 << 18, count in 1u64..64, gap in 0u64..1000, most in 1u64..2048,
        ) {
            let step = count + gap;
            let mut streams = Streams::new(most);
            let mut expected = None;
            for pages in strided(first, count, step, 300) {
                let batch = streams.read(pages.clone(), END);
                for range in batch.into_iter().flat_map(Batch::ranges) {
                    prop_assert!(range.start >= pages.end);
                    let distance = (range.start - pages.start) / step;
                    prop_assert!(distance <= most.max(LEAST_WINDOW) + count, "{:?} for {:?}", range, pages);
                    // A window that is smaller than a read leaves out what the reader has read by itself.
                    let next = expected.map(|page: u64| page.max(pages.start + step));
                    prop_assert!(next.is_none_or(|page| page == range.start), "{:?} after {:?}", range, expected);
                    expected = Some(if gap == 0 { range.end } else { range.start + step });
                }
            }
            prop_assert!(expected.is_some());
        }

        #[test]
        fn streams_of_one_file_do_not_disturb_each_other(
            firsts in prop::collection::vec(0u64..64, 1..=STREAMS), count in 1u64..16,
        ) {
            let apart = |(at, first): (usize, &u64)| at as u64 * (1 << 17) + first * 17 + 1;
            let firsts: Vec<_> = firsts.iter().enumerate().map(apart).collect();
            let mut streams = Streams::new(MOST);
            let mut ahead = vec![0; firsts.len()];
            for turn in 0..200 {
                for (at, first) in firsts.iter().enumerate() {
                    let start = first + turn * count;
                    ahead[at] += streams.read(start..start + count, END).map_or(0, |batch| batch.count);
                }
            }
            for pages in ahead {
                prop_assert!(pages >= 190 * count, "{} pages of {}", pages, 200 * count);
            }
        }

        #[test]
        fn nothing_is_read_ahead_beyond_the_file(
            reads in prop::collection::vec((0u64..3000, 1u64..50), 1..200), end in 0u64..3000,
        ) {
            let mut streams = Streams::new(MOST);
            for (first, count) in reads {
                for range in streams.read(first..first + count, end).into_iter().flat_map(Batch::ranges) {
                    prop_assert!(range.start < end);
                }
            }
        }

        #[test]
        fn random_reads_are_hardly_read_ahead(reads in prop::collection::vec(0u64..END, 1000)) {
            let mut streams = Streams::new(MOST);
            let pages = pages_ahead(&mut streams, reads.into_iter().map(|first| first..first + 1));
            prop_assert!(pages.len() <= 64, "{} pages", pages.len());
        }
    }
}
