//! Contents of a client's stream. Bytes are not stored, but named by their source and their place in that source.

use std::collections::BTreeMap;

/// Source of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Bytes that a frontend's server itself writes for a response: the header, and the bytes that follow the payload.
    /// In this source they lie one behind the other, without the payload. The number is that of the response.
    Header(u64),
    /// Contents of the file that a response's payload is read from, or the TLS records with these contents. The number
    /// is that of the contents: it changes when the file is written over.
    File(u64),
}

/// A run of consecutive bytes of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Source of the bytes.
    pub source: Source,
    /// Place of the first byte in the source.
    pub from: u64,
    /// Number of bytes.
    pub length: u64,
}

impl Run {
    /// Returns a part of the run: `length` bytes after the first `skip`.
    pub fn part(&self, skip: u64, length: u64) -> Self {
        debug_assert!(skip + length <= self.length);
        Self { from: self.from + skip, length, ..*self }
    }
}

/// A stream of bytes, as a sequence of runs.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    runs: BTreeMap<u64, Run>,
    end: u64,
}

impl Stream {
    /// Returns the place of the next byte that is appended.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Appends a run.
    pub fn push(&mut self, run: Run) {
        if run.length > 0 {
            self.runs.insert(self.end, run);
            self.end += run.length;
        }
    }

    /// Returns the part, from `place` on, of the run that contains `place`. Returns `None` if the stream has no byte
    /// there.
    pub fn at(&self, place: u64) -> Option<Run> {
        let (start, run) = self.runs.range(..=place).next_back()?;
        let skip = place - start;
        (skip < run.length).then(|| run.part(skip, run.length - skip))
    }

    /// Forgets the runs that lie wholly before a place.
    pub fn forget(&mut self, before: u64) {
        while let Some(first) = self.runs.first_entry() {
            if first.key() + first.get().length > before {
                return;
            }
            first.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_the_byte_that_was_put_there() {
        let mut stream = Stream::default();
        stream.push(Run { source: Source::Header(1), from: 0, length: 10 });
        stream.push(Run { source: Source::File(2), from: 500, length: 100 });
        assert_eq!(stream.at(9), Some(Run { source: Source::Header(1), from: 9, length: 1 }));
        assert_eq!(stream.at(10), Some(Run { source: Source::File(2), from: 500, length: 100 }));
        assert_eq!(stream.at(60), Some(Run { source: Source::File(2), from: 550, length: 50 }));
        assert_eq!((stream.at(110), stream.end()), (None, 110));
        stream.forget(10);
        assert_eq!((stream.at(5), stream.at(10).map(|run| run.from)), (None, Some(500)));
    }
}
