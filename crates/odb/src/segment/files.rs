//! The files that a program has given to the store, as the program remembers them: it gives each once, and then refers to it
//! by a number.

use siphasher::sip::SipHasher24;
use zerocopy::IntoBytes;

use super::{FILES, SLOTS};
use crate::place::Version;

/// A range that is shorter is copied where its file is not given yet, and was not sent a moment ago: to give a file takes
/// two messages.
const GIVEN_AT_ONCE_BYTES: u64 = 256 << 10;
/// Where more files are in use than there may be, those go on being copied that are not given: to change them with every
/// send would cost more than to copy.
const KEPT_MS: u64 = 1000;
/// After the store has refused a file: how long until it is given another one.
const RETRY_MS: u64 = 1000;
/// Files that were sent once are remembered in so many places.
const NOTES: usize = 256;
/// Slots that files may have: the others are for what has no other way.
const SLOTS_OF_FILES: usize = SLOTS / 2;

/// How bytes of a file are to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By reference to the file of that number.
    Given(u32),
    /// By reference, once the store has it under that number.
    Give(u32),
    /// Copied.
    Copy,
}

#[derive(Debug)]
struct Given {
    number: u32,
    version: Version,
    /// That refer to it.
    slots: usize,
    used_ms: u64,
}

#[derive(Debug)]
pub(super) struct Files {
    given: Vec<Given>,
    slots: usize,
    /// Digests of files that were sent once.
    notes: [u64; NOTES],
    /// When the store has last taken none.
    refused_ms: Option<u64>,
}

impl Default for Files {
    fn default() -> Self {
        Self { given: Vec::new(), slots: 0, notes: [0; NOTES], refused_ms: None }
    }
}

impl Files {
    /// Whether there is a slot for one more reference.
    pub(super) fn has_room(&self) -> bool {
        self.slots < SLOTS_OF_FILES
    }

    /// See [`super::Writer::file`]. `is_open` says whether the store still has the file of a number.
    pub(super) fn way(&mut self, version: &Version, bytes: u64, now_ms: u64, is_open: impl Fn(u32) -> bool) -> Way {
        if !self.has_room() || !version.is_settled() {
            return Way::Copy;
        }
        if let Some(given) = self.given.iter_mut().find(|given| given.version == *version) {
            given.used_ms = now_ms;
            return if is_open(given.number) { Way::Given(given.number) } else { Self::anew(given) };
        }
        let is_worth_it = bytes >= GIVEN_AT_ONCE_BYTES || self.was_noted(version);
        if !is_worth_it || self.refused_ms.is_some_and(|refused_ms| now_ms < refused_ms + RETRY_MS) {
            return Way::Copy;
        }
        if self.given.len() < FILES as usize {
            // No file has number 0.
            return Way::Give(FILES + self.given.len() as u32);
        }
        let idle = self.given.iter().filter(|given| given.slots == 0 && given.used_ms + KEPT_MS <= now_ms);
        idle.min_by_key(|given| given.used_ms).map_or(Way::Copy, Self::anew)
    }

    /// Whether it was sent a moment ago; notes that it is now.
    fn was_noted(&mut self, version: &Version) -> bool {
        let digest = SipHasher24::new().hash(version.as_bytes());
        std::mem::replace(&mut self.notes[digest as usize % NOTES], digest) == digest
    }

    /// In the same place, under another number.
    fn anew(given: &Given) -> Way {
        match given.number.checked_add(FILES) {
            Some(number) if given.slots == 0 => Way::Give(number),
            _ => Way::Copy,
        }
    }

    /// The store has it.
    pub(super) fn add(&mut self, number: u32, version: Version, now_ms: u64) {
        let new = Given { number, version, slots: 0, used_ms: now_ms };
        match self.of(number) {
            Some(before) => *before = new,
            None => self.given.push(new),
        }
    }

    /// The store has not taken one.
    pub(super) fn was_refused(&mut self, now_ms: u64) {
        self.refused_ms = Some(now_ms);
    }

    /// The one in the place of a number.
    fn of(&mut self, number: u32) -> Option<&mut Given> {
        self.given.get_mut((number % FILES) as usize)
    }

    pub(super) fn refers(&mut self, number: u32) {
        self.slots += 1;
        if let Some(given) = self.of(number) {
            given.slots += 1;
        }
    }

    pub(super) fn refers_no_more(&mut self, number: u32) {
        self.slots -= 1;
        if let Some(given) = self.of(number) {
            given.slots -= 1;
        }
    }
}
