//! Ranges of a stream's bytes that have arrived.

use std::collections::BTreeMap;

/// Disjoint ranges of offsets: a map from the start of each to its end. Adjacent ranges are joined.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range. Returns how many of its bytes are new.
    pub(super) fn add(&mut self, start: u64, end: u64) -> u64 {
        let (mut from, mut to, mut known) = (start, end, 0);
        let touching: Vec<(u64, u64)> = self
            .0
            .range(..=end)
            .rev()
            .take_while(|(_, known_end)| **known_end >= start)
            .map(|(a, b)| (*a, *b))
            .collect();
        for (a, b) in touching {
            known += b.min(end).saturating_sub(a.max(start));
            (from, to) = (from.min(a), to.max(b));
            self.0.remove(&a);
        }
        self.0.insert(from, to);
        end - start - known
    }

    pub(super) fn holes_below(&self, limit: u64) -> Vec<(u64, u64)> {
        let (mut holes, mut at) = (Vec::new(), 0);
        for (start, end) in &self.0 {
            if *start >= limit {
                break;
            }
            if *start > at {
                holes.push((at, *start));
            }
            at = *end;
        }
        if at < limit {
            holes.push((at, limit));
        }
        holes
    }

    pub(super) fn last_end(&self) -> u64 {
        self.0.last_key_value().map_or(0, |(_, end)| *end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_tell_what_is_new() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.add(10, 20), 10);
        assert_eq!(ranges.add(30, 40), 10);
        assert_eq!(ranges.holes_below(40), [(0, 10), (20, 30)]);
        assert_eq!(ranges.add(15, 35), 10);
        assert_eq!(ranges.add(15, 35), 0);
        assert_eq!(ranges.add(0, 10), 10);
        assert_eq!(ranges.0.len(), 1);
        assert_eq!(ranges.holes_below(50), [(40, 50)]);
    }
}
