//! Hit ratios of `Kept` beside LRU, S3-FIFO as its paper has it, and the optimum of Belady (1966), which knows the
//! future. The mixes are generated from fixed seeds: Zipf of several exponents, with and without scans, and loops.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use shunt_pages::kept::{Kept, Put};
use shunt_pages::name::PageName;
use shunt_testbed::random::Random;

const PAGES: u64 = 20_000;
const GETS: usize = 200_000;

/// Draws pages of which the k-th is read in proportion to k^-exponent.
fn zipf(seed: u64, exponent: f64) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=PAGES).map(|rank| (sum += (rank as f64).powf(-exponent), sum).1).collect();
    let mut random = Random::new(seed, 0);
    (0..GETS).map(|_| random.part() * sum).map(|drawn| sums.partition_point(|sum| *sum < drawn) as u64).collect()
}

/// Puts scans of 2,000 pages that nobody reads again between the reads.
fn with_scans(reads: Vec<u64>) -> Vec<u64> {
    let mut next = PAGES;
    let mut mixed = Vec::new();
    for part in reads.chunks(10_000) {
        mixed.extend_from_slice(part);
        mixed.extend(next..next + 2_000);
        next += 2_000;
    }
    mixed
}

/// Reads the same pages in the same order again and again, between random reads.
fn with_loops(reads: Vec<u64>, pages: u64) -> Vec<u64> {
    reads.into_iter().enumerate().flat_map(|(at, page)| [page, PAGES + at as u64 % pages]).collect()
}

/// Each of these returns the number of hits of a cache of `capacity` pages.
fn kept(reads: &[u64], capacity: usize) -> usize {
    hits(&mut Kept::new(capacity as u32), reads)
}

fn hits(kept: &mut Kept, reads: &[u64]) -> usize {
    reads
        .iter()
        .map(|page| PageName { high: *page, low: *page })
        .filter(|page| kept.get(*page).is_some() || (kept.put(*page, |_| ()) == Put::Already))
        .count()
}

fn lru(reads: &[u64], capacity: usize) -> usize {
    let (mut last, mut order, mut hits) = (HashMap::new(), BTreeMap::new(), 0);
    for (at, page) in reads.iter().enumerate() {
        if let Some(before) = last.insert(*page, at) {
            order.remove(&before);
            hits += 1;
        } else if last.len() > capacity {
            let (_, oldest) = order.pop_first().expect("the cache is full");
            last.remove(&oldest);
        }
        order.insert(at, *page);
    }
    hits
}

fn belady(reads: &[u64], capacity: usize) -> usize {
    let mut next_read = vec![usize::MAX; reads.len()];
    let mut seen = HashMap::new();
    for (at, page) in reads.iter().enumerate().rev() {
        next_read[at] = seen.insert(*page, at).unwrap_or(usize::MAX);
    }
    // Pages by their next read. Each read's position is unique, but for the end.
    let (mut order, mut cached, mut hits) = (BTreeSet::new(), HashMap::new(), 0);
    for (at, page) in reads.iter().enumerate() {
        if let Some(expected) = cached.remove(page) {
            order.remove(&(expected, *page));
            hits += 1;
        }
        order.insert((next_read[at], *page));
        cached.insert(*page, next_read[at]);
        if cached.len() > capacity {
            let (_, latest) = order.pop_last().expect("the cache is full");
            cached.remove(&latest);
        }
    }
    hits
}

/// S3-FIFO, figure 5 of its paper: a small queue of a tenth, a main queue, and a queue of ghosts as long as this one.
#[derive(Default)]
struct S3Fifo {
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghosts: VecDeque<u64>,
    ghost: HashSet<u64>,
    frequency: HashMap<u64, u8>,
}

impl S3Fifo {
    fn hits(reads: &[u64], capacity: usize) -> usize {
        let mut cache = Self::default();
        reads.iter().filter(|page| cache.read(**page, capacity)).count()
    }

    fn read(&mut self, page: u64, capacity: usize) -> bool {
        if let Some(frequency) = self.frequency.get_mut(&page) {
            *frequency = (*frequency + 1).min(3);
            return true;
        }
        while self.frequency.len() >= capacity {
            if self.small.len() >= capacity / 10 { self.evict_small(capacity) } else { self.evict_main() }
        }
        if self.ghost.remove(&page) {
            self.main.push_back(page)
        } else {
            self.small.push_back(page)
        }
        self.frequency.insert(page, 0);
        false
    }

    fn evict_small(&mut self, capacity: usize) {
        let Some(page) = self.small.pop_front() else { return };
        if self.frequency[&page] > 1 {
            self.main.push_back(page);
            self.frequency.insert(page, 0);
            return;
        }
        self.frequency.remove(&page);
        self.ghost.insert(page);
        self.ghosts.push_back(page);
        if self.ghosts.len() > capacity * 9 / 10 {
            let oldest = self.ghosts.pop_front().expect("not empty");
            self.ghost.remove(&oldest);
        }
    }

    fn evict_main(&mut self) {
        while let Some(page) = self.main.pop_front() {
            let frequency = self.frequency.get_mut(&page).expect("pages of a queue have one");
            if *frequency == 0 {
                self.frequency.remove(&page);
                return;
            }
            *frequency -= 1;
            self.main.push_back(page);
        }
    }
}

#[test]
fn pages_are_kept_better_than_by_lru_and_as_well_as_by_s3_fifo() {
    let mut mixes = Vec::new();
    for exponent in [0.6, 0.8, 1.0] {
        mixes.push((format!("zipf {exponent}"), zipf(1, exponent)));
        mixes.push((format!("zipf {exponent}, scans"), with_scans(zipf(2, exponent))));
        mixes.push((format!("zipf {exponent}, loops"), with_loops(zipf(3, exponent), 1_500)));
    }
    for (name, reads) in mixes {
        for capacity in [500, 2_000] {
            let ratio = |hits: usize| hits as f64 / reads.len() as f64;
            let [ours, lru, s3_fifo, optimum] =
                [kept, lru, S3Fifo::hits, belady].map(|hits| ratio(hits(&reads, capacity)));
            println!(
                "{name:20} {capacity:5} pages: {ours:.3}, LRU {lru:.3}, S3-FIFO {s3_fifo:.3}, optimum {optimum:.3}"
            );
            assert!(ours >= lru, "{name}, {capacity} pages: {ours:.3}, LRU {lru:.3}");
            assert!(ours >= s3_fifo * 0.99, "{name}, {capacity} pages: {ours:.3}, S3-FIFO {s3_fifo:.3}");
            assert!(ours <= optimum, "{name}, {capacity} pages: {ours:.3}, optimum {optimum:.3}");
        }
    }
}

#[test]
fn a_memory_that_was_smaller_keeps_as_well_as_a_new_one() {
    let reads = with_loops(zipf(3, 0.8), 1_500);
    let expected = kept(&reads, 2_000) as f64;
    let mut random = Random::new(1, 0);
    let histories: [Vec<u32>; 4] =
        [vec![0], vec![1], vec![2], (0..300).map(|_| 1_800 + random.below(400) as u32).collect()];
    for history in histories {
        let mut kept = Kept::new(2_000);
        history.iter().chain(&[2_000]).for_each(|capacity| kept.set_capacity(*capacity, |_| ()));
        let found = hits(&mut kept, &reads) as f64;
        assert!(
            found >= 0.98 * expected,
            "{found} hits after {} changes from {}, {expected} without",
            history.len(),
            history[0]
        );
    }
}
