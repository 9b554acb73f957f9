//! Files that a program has given to the store, as the program remembers them. The program gives each file once, and
//! then refers to it by a number. The *store* has the payloads of a machine's programs, and leases each program a
//! *segment* of memory. A *slot* is the segment's entry for one payload, which may be a range of a file.

use siphasher::sip::SipHasher24;
use zerocopy::IntoBytes;

use super::{FILES, SLOTS};
use crate::place::Version;

/// Shortest range for which a file is given to the store at once, in bytes. Shorter ranges are copied, unless the file
/// is remembered as sent before, because giving a file takes two messages.
const GIVEN_AT_ONCE_BYTES: u64 = 256 << 10;
/// Time since a file's last use after which another file may take its place, in milliseconds. If more files are in use
/// than there are places, those without a place are copied: replacing files at every send would cost more.
const KEPT_MS: u64 = 1000;
/// Time after the store has refused a file in which no file is given to it, in milliseconds.
const RETRY_MS: u64 = 1000;
/// Number of files that are remembered as sent. Each is remembered by a digest of its state, until another file takes
/// its place.
const NOTES: usize = 256;
/// Most slots that refer to files. The other slots are kept for payloads that are in no file.
const SLOTS_OF_FILES: usize = SLOTS / 2;

/// Ways to send a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By reference to the file with this number, which the store has.
    Given(u32),
    /// By reference, once the store has got the file under this number.
    Give(u32),
    /// The file's bytes are copied into the segment.
    Copy,
}

#[derive(Debug)]
struct Given {
    number: u32,
    version: Version,
    /// Number of slots that refer to the file.
    slots: usize,
    used_ms: u64,
}

#[derive(Debug)]
pub(super) struct Files {
    given: Vec<Given>,
    slots: usize,
    /// Digests of the states of files that were sent; 0 where there is none.
    notes: [u64; NOTES],
    /// Time of the store's last refusal.
    refused_ms: Option<u64>,
}

impl Default for Files {
    fn default() -> Self {
        Self { given: Vec::new(), slots: 0, notes: [0; NOTES], refused_ms: None }
    }
}

impl Files {
    /// Whether one more slot may refer to a file.
    pub(super) fn has_room(&self) -> bool {
        self.slots < SLOTS_OF_FILES
    }

    /// Decides how to send `bytes` bytes of a file ([`super::Writer::file`]). `is_open` says whether the store still
    /// has the file with a number.
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
            // The numbers of place `n` are FILES + n, 2 * FILES + n, and so on: not n itself, because 0 means no file.
            return Way::Give(FILES + self.given.len() as u32);
        }
        let idle = self.given.iter().filter(|given| given.slots == 0 && given.used_ms + KEPT_MS <= now_ms);
        idle.min_by_key(|given| given.used_ms).map_or(Way::Copy, Self::anew)
    }

    /// Whether the file is remembered as sent before. Remembers from now on that it was sent.
    fn was_noted(&mut self, version: &Version) -> bool {
        let digest = SipHasher24::new().hash(version.as_bytes());
        std::mem::replace(&mut self.notes[digest as usize % NOTES], digest) == digest
    }

    /// Returns the way to send a file that is to take the place of `given`: another file, or the same one after the
    /// store has closed it. It is given under the place's next number. If slots still refer to `given`, it is copied.
    fn anew(given: &Given) -> Way {
        match given.number.checked_add(FILES) {
            Some(number) if given.slots == 0 => Way::Give(number),
            _ => Way::Copy,
        }
    }

    /// Notes that the store has a file.
    pub(super) fn add(&mut self, number: u32, version: Version, now_ms: u64) {
        let new = Given { number, version, slots: 0, used_ms: now_ms };
        match self.of(number) {
            Some(before) => *before = new,
            None => self.given.push(new),
        }
    }

    /// Notes that the store has refused a file.
    pub(super) fn was_refused(&mut self, now_ms: u64) {
        self.refused_ms = Some(now_ms);
    }

    /// File in the place that belongs to a number.
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
