//! Files that a program has given to the store, to refer to them in the slots of the program's segment. A file stays
//! open while the program refers to it, and a while longer, because files are often sent again. A *segment* is memory
//! that the store leases to a program, and a *slot* its entry for one payload.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::place::{Place, SentFile};
use crate::segment::{FILES, Reader};

/// Time after which a file without references is closed, in milliseconds.
const IDLE_MS: u64 = 5_000;

#[derive(Debug)]
struct Open {
    number: u32,
    file: Arc<SentFile>,
    /// Time at which some of the file was last asked for.
    used_ms: u64,
    /// Time at which a slot was last seen to refer to the file.
    referred_ms: u64,
}

/// Open files by place, a file's number modulo [`FILES`].
#[derive(Debug, Default)]
pub(super) struct Files(BTreeMap<u32, Open>);

impl Files {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps a file open under this number, and announces that in the segment. An earlier file in the same place is
    /// closed.
    pub(super) fn open(&mut self, reader: &Reader, number: u32, file: SentFile, now_ms: u64) -> Arc<SentFile> {
        let file = Arc::new(file);
        let open = Open { number, file: Arc::clone(&file), used_ms: now_ms, referred_ms: now_ms };
        self.0.insert(number % FILES, open);
        reader.open_file(number);
        file
    }

    pub(super) fn file(&self, number: u32) -> Option<&Arc<SentFile>> {
        self.0.get(&(number % FILES)).filter(|open| open.number == number).map(|open| &open.file)
    }

    /// Returns the place of some bytes of a file, for a reader that asks for them now. `None`: the file is not open
    /// under this number, is shorter, or has changed.
    pub(super) fn place(&mut self, number: u32, bytes: Range<u64>, now_ms: u64) -> Option<Place> {
        let open = self.0.get_mut(&(number % FILES)).filter(|open| open.number == number)?;
        if bytes.end > open.file.version().size() || !open.file.is_unchanged() {
            return None;
        }
        open.used_ms = now_ms;
        Some(Place::of_file(&open.file, bytes.start, bytes.end - bytes.start))
    }

    /// Time at which some of a file was last asked for.
    pub(super) fn used_ms(&self, number: u32) -> Option<u64> {
        self.0.get(&(number % FILES)).filter(|open| open.number == number).map(|open| open.used_ms)
    }

    /// Closes files to which no slot has referred for a while.
    pub(super) fn close_idle(&mut self, reader: &Reader, now_ms: u64) {
        if self.0.is_empty() {
            return;
        }
        let in_use: BTreeSet<u32> = reader.used().filter_map(|used| used.file).collect();
        self.0.retain(|_, open| {
            if in_use.contains(&open.number) {
                open.referred_ms = now_ms;
            }
            now_ms < open.referred_ms + IDLE_MS || !reader.close_file(open.number)
        });
    }
}
