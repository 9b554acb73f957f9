//! Sequential and strided reads of an open file, and what to read ahead for them.
//!
//! A *stream* is a row of reads, each one where the one before ended (a sequential stream), or each one the same number
//! of pages behind the one before (a strided one). A file can have several streams, for example of threads that read
//! different parts. Once a stream is certain, pages before the reader are read ahead, in batches. The *window* is the
//! distance up to which this is done. It doubles with each batch, up to a limit. The limit falls when pages are wasted,
//! and rises again when pages are used.
//!
//! A stride that is no whole number of pages is not found.

use std::iter;
use std::ops::Range;

/// Most streams of one open file, of each kind. A further one replaces the stream that was read least recently.
const STREAMS: usize = 4;
/// Steps that make a stream certain. Reads of some sequential streams in turn look like a few steps of a strided one.
const CERTAIN: u32 = 2;
const CERTAIN_STRIDED: u32 = 3;
/// Steps that make a stream certain after pages were wasted at the smallest limit.
const CERTAIN_AFTER_WASTE: u32 = 8;
/// First window and smallest limit, in pages.
const LEAST_WINDOW: u64 = 16;
/// Distance behind a sequential reader within which a read belongs to the stream, in pages. The kernel's requests for
/// neighbouring pages may be served in another order.
const BEHIND: u64 = 512;
/// Greatest distance between two reads of a strided stream, in pages (64 MiB).
const MOST_STEP: u64 = 1 << 14;

/// Streams of an open file.
#[derive(Debug)]
pub struct Streams {
    /// The stream that was read last is the last one, in both lists.
    sequential: Vec<Stream>,
    strided: Vec<Stream>,
    /// Greatest window, in pages.
    most: u64,
    /// Greatest window at present. It is at most `most`, and less after waste.
    limit: u64,
    /// Pages that were used since the limit changed.
    used: u64,
    /// Whether pages were wasted at the smallest limit, and none used since.
    only_wastes: bool,
}

#[derive(Debug)]
struct Stream {
    /// Pages of the last read.
    last: Range<u64>,
    /// Distance between the beginnings of two reads of a strided stream. `None`: the stream is sequential.
    step: Option<u64>,
    /// Steps so far.
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
        let firsts = iter::successors(Some(self.first), move |first| first.checked_add(self.step));
        firsts.take(self.pieces as usize).map(move |first| first..first.saturating_add(self.count))
    }
}

impl Streams {
    /// Makes the streams of a file that was just opened. `most` is the greatest window, in pages; 0: nothing is read
    /// ahead.
    pub fn new(most: u64) -> Self {
        Self { sequential: Vec::new(), strided: Vec::new(), most, limit: most, used: 0, only_wastes: false }
    }

    /// Notes a read, and returns what to read ahead. `end` is the number of pages in the file.
    pub fn read(&mut self, pages: Range<u64>, end: u64) -> Option<Batch> {
        if pages.is_empty() || self.most == 0 {
            return None;
        }
        for (streams, certain) in [(&mut self.sequential, CERTAIN), (&mut self.strided, CERTAIN_STRIDED)] {
            if let Some(stream) = continued(streams, &pages) {
                let certain = if self.only_wastes { CERTAIN_AFTER_WASTE } else { certain };
                return if stream.steps >= certain { stream.batch(end, self.limit) } else { None };
            }
        }
        if self.sequential.iter().any(|stream| stream.has_passed(&pages)) {
            return None;
        }
        // The read may be the first one of a sequential stream, and the second one of a strided stream.
        let strided = self.sequential.iter().rev().find_map(|stream| stream.strided(&pages));
        strided.into_iter().for_each(|stream| add(&mut self.strided, stream));
        add(&mut self.sequential, Stream::new(pages));
        None
    }

    /// Notes that pages were read which had been read ahead.
    pub fn used(&mut self, pages: u64) {
        self.used = self.used.saturating_add(pages);
        if self.used >= self.limit {
            self.used = 0;
            self.limit = self.limit.saturating_mul(2).min(self.most);
            self.only_wastes = false;
        }
    }

    /// Notes that pages of a batch were dropped before anybody read them. To be called once for each such batch.
    pub fn wasted(&mut self) {
        if self.limit <= LEAST_WINDOW {
            self.only_wastes = true;
            self.sequential.iter_mut().chain(&mut self.strided).for_each(|stream| stream.steps = 0);
        }
        self.limit = (self.limit / 2).max(LEAST_WINDOW).min(self.most);
        self.used = 0;
    }
}

/// Returns the stream that the read continues, after this step.
fn continued<'a>(streams: &'a mut Vec<Stream>, pages: &Range<u64>) -> Option<&'a mut Stream> {
    let at = streams.iter().position(|stream| stream.continues(pages))?;
    let mut stream = streams.remove(at);
    stream.steps = stream.steps.saturating_add(1);
    stream.last = pages.clone();
    streams.push(stream);
    streams.last_mut()
}

fn add(streams: &mut Vec<Stream>, stream: Stream) {
    if streams.len() >= STREAMS {
        streams.remove(0);
    }
    streams.push(stream);
}

impl Stream {
    /// Makes a sequential stream of one read.
    fn new(pages: Range<u64>) -> Self {
        // Most files are read from their beginning to their end, so the first page counts as a step.
        let steps = u32::from(pages.start == 0);
        Self { ahead: pages.end, last: pages, step: None, steps, window: LEAST_WINDOW }
    }

    /// Returns the strided stream of the last read and of this one, if there may be one.
    fn strided(&self, pages: &Range<u64>) -> Option<Self> {
        let step = pages.start.checked_sub(self.last.start)?;
        let fits = pages.start > self.last.end && step <= MOST_STEP && length(pages) == length(&self.last);
        let ahead = pages.start.saturating_add(step);
        fits.then(|| Self { last: pages.clone(), step: Some(step), steps: 1, ahead, window: LEAST_WINDOW })
    }

    /// Returns whether the read is the next one of this stream. All pages that were read ahead belong to a sequential
    /// stream, since the kernel may ask for them in another order.
    fn continues(&self, pages: &Range<u64>) -> bool {
        match self.step {
            None => pages.start == self.last.end || (self.last.end..self.ahead).contains(&pages.start),
            Some(step) => Some(pages.start) == self.last.start.checked_add(step) && length(pages) == length(&self.last),
        }
    }

    /// Returns whether the read belongs to this sequential stream and has been overtaken by a later one.
    fn has_passed(&self, pages: &Range<u64>) -> bool {
        self.steps >= CERTAIN && pages.start < self.last.end && self.last.end - pages.start <= BEHIND
    }

    /// Returns the next batch if less than half of the window is left before the reader.
    fn batch(&mut self, end: u64, limit: u64) -> Option<Batch> {
        self.window = self.window.min(limit);
        // A sequential stream is read ahead page by page, and a strided one piece by piece.
        let (count, step) = self.step.map_or((1, 1), |step| (length(&self.last), step));
        let next = self.step.map_or(self.last.end, |step| self.last.start.saturating_add(step));
        // A strided stream has at least one piece before the reader, however far away that is.
        let pieces = (self.window / count).max(1);
        let from = self.ahead.max(next);
        let left = (from - next) / step;
        let in_file = end.saturating_sub(from).div_ceil(step);
        let missing = pieces.saturating_sub(left).min(in_file);
        if left > pieces / 2 || missing == 0 {
            return None;
        }
        self.ahead = from.saturating_add(missing.saturating_mul(step));
        self.window = self.window.saturating_mul(2).min(limit);
        Some(match self.step {
            None => Batch { first: from, count: missing, step: missing, pieces: 1 },
            Some(step) => Batch { first: from, count, step, pieces: missing },
        })
    }
}

fn length(pages: &Range<u64>) -> u64 {
    pages.end - pages.start
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

    #[test]
    fn a_reader_without_a_window_gets_nothing() {
        assert!(pages_ahead(&mut Streams::new(0), sequential(0, 1, 100)).is_empty());
    }

    #[test]
    fn a_batch_that_was_read_in_another_order_ends_no_stream() {
        let mut streams = Streams::new(MOST);
        pages_ahead(&mut streams, sequential(0, 4, 100));
        let exchanged = (100..200).map(|at| (at ^ 1) * 4).map(|first| first..first + 4);
        let ahead = pages_ahead(&mut streams, exchanged).len();
        assert!(ahead >= 300, "{ahead} pages of 400");
    }

    #[test]
    fn numbers_at_the_end_of_their_range_do_no_harm() {
        let mut streams = Streams::new(u64::MAX);
        for first in (u64::MAX - 100..u64::MAX - 1).chain((u64::MAX - 90..u64::MAX - 1).step_by(7)) {
            streams.read(first..first + 1, u64::MAX).into_iter().flat_map(Batch::ranges).for_each(drop);
            streams.used(u64::MAX);
        }
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
        fn sequential_streams_of_one_file_do_not_disturb_each_other(
            gaps in prop::collection::vec(1u64..1 << 17, 1..=STREAMS), count in 1u64..16, equal in any::<bool>(),
        ) {
            let place = |at: usize| if equal { at as u64 * gaps[0] } else { gaps[..at].iter().sum() };
            let firsts: Vec<_> = (0..gaps.len()).map(|at| place(at) + at as u64 * 200 * count + 1).collect();
            let mut streams = Streams::new(MOST);
            let (mut ahead, mut useless) = (vec![0; firsts.len()], 0);
            for turn in 0..200 {
                for (at, first) in firsts.iter().enumerate() {
                    let start = first + turn * count;
                    match streams.read(start..start + count, END) {
                        Some(Batch { pieces: 1, count, .. }) => ahead[at] += count,
                        Some(batch) => useless += batch.count * batch.pieces,
                        None => {}
                    }
                }
            }
            prop_assert!(ahead.iter().all(|pages| *pages >= 190 * count), "{:?} of {}", ahead, 200 * count);
            // The first reads of four streams at equal distances are four reads of a strided one.
            prop_assert!(useless <= LEAST_WINDOW, "{} useless pages", useless);
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
