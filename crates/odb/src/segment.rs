//! A segment (odb_buff in the paper on on-demand buffers): memory of the store, into which one program writes its
//! *payloads*. A payload is the bytes of one large write.
//!
//! ```text
//!   head      one page: whether the store is still there, and which of the program's files it has open
//!   slots     SLOTS times 64 bytes: the payloads of the segment
//!   data      their bytes; each payload begins at the start of a page
//! ```
//!
//! The *store* is the part of the agent that has the payloads of a machine's programs. A *reader* is a program that
//! fetches bytes of a payload, which a *reference* names. The payload's *lease* is the time for which the store keeps
//! it.
//!
//! A slot belongs to the store while its state is USED; else it belongs to the program. The program makes it USED, and
//! the store makes it RETURNED. Two things the program may write even then: that the payload's stream goes on, and, if
//! the payload's reference was never sent, RETURNED. So neither waits for the other, and neither has to tell the other
//! anything. The store looks into a slot when a reader asks for the slot's payload, and in its search for leases that
//! have ended.
//!
//! A payload may also be in a file that the program has given to the store ([`crate::place`]). Then its slot has the
//! file's number and the offset in that file.
//!
//! The program can write anything here. The store checks a payload's place before it reads bytes there. So a program
//! can spoil only its own payloads.
//!
//! A store that ends says so in the head; one that is killed stops updating the head. In both cases the program soon
//! notices this, and writes no more payloads here: nobody could fetch them.

mod files;
mod writer;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use shunt_sys::shared::SharedMemory;

use crate::presence;
pub use crate::presence::now_ms;
use crate::reference::Reference;
use crate::touched::Touched;

pub use files::Way;
pub use writer::Writer;

/// Number of slots in a segment: as many payloads can be in it at a time.
pub const SLOTS: usize = 1024;
const SLOT_BYTES: usize = 64;
const PAGE_BYTES: usize = 4096;
/// Offset at which the data begins in a segment.
pub const DATA_BYTES_FROM: usize = PAGE_BYTES + SLOTS * SLOT_BYTES;

/// Head: offset of the word that tells programs whether the store is alive ([`crate::presence`]).
const SEEN: usize = 0;

/// Head: offset of the table of files. It has one word for each place of a file: the number of the open file there.
const FILES_AT: usize = 64;
/// Number of places for files in a segment. A file's place is its number modulo this. A number is never used for
/// another file.
pub const FILES: u32 = 256;
/// Value of a place's word in the table of files: the store has no file open there.
const CLOSED: u32 = 0;
/// Value of [`FILE`] in a slot whose payload is in the segment itself.
const NO_FILE: u32 = 0;

fn file_at(file: u32) -> usize {
    FILES_AT + (file % FILES) as usize * 4
}

/// Slot: offset of the slot's state: [`FREE`], [`USED`] or [`RETURNED`].
const STATE: usize = 0;
/// Slot: offset of the number of the file that has the payload's bytes, or [`NO_FILE`].
const FILE: usize = 4;
/// Slot: offset of the payload's secret, without which the store gives no bytes of the payload.
const SECRET: usize = 8;
/// Slot: offset of the place of the payload's first byte. The place is an offset in the segment or in the file.
const OFFSET: usize = 16;
/// Slot: offset of the payload's length in bytes.
const LENGTH: usize = 24;
/// Slot: offset of the time at which the payload was made, in milliseconds of [`now_ms`].
const BORN_MS: usize = 32;
/// Slot: offsets of the two words that say which bytes of the payload were needed. The store writes them, if it knows
/// that, before it makes the slot RETURNED. Otherwise both are [`UNKNOWN`].
const TOUCHED: [usize; 2] = [40, 48];
const UNKNOWN: u64 = u64::MAX;
/// Slot: offset of the number of the payload's stream; 0: none. A *stream* is all payloads that their writer sends on
/// one connection. While a slow reader fetches some of them, the store keeps the others.
const STREAM: usize = 56;

const FREE: u32 = 0;
const USED: u32 = 1;
const RETURNED: u32 = 2;

fn slot_at(slot: usize) -> usize {
    PAGE_BYTES + slot * SLOT_BYTES
}

/// Place of a reference's bytes, as the slot of their payload says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// In the segment, at these offsets.
    Here(Range<usize>),
    /// In the file with this number, at these offsets.
    InFile { number: u32, bytes: Range<u64> },
}

/// Contents of a slot in use.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    pub slot: u32,
    /// Secret of the payload.
    pub secret: u64,
    /// Time at which the slot came into use, in milliseconds of [`now_ms`].
    pub born_ms: u64,
    /// Number of the file that the payload is in.
    pub file: Option<u32>,
    /// Stream that the payload is a part of; 0: none.
    pub stream: u64,
}

/// Segment as the store uses it.
#[derive(Debug)]
pub struct Reader(Arc<SharedMemory>);

impl Reader {
    /// Uses memory that the store leases to a program.
    #[must_use]
    pub fn new(memory: SharedMemory) -> Self {
        Self(Arc::new(memory))
    }

    /// Memory of the segment.
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.0
    }

    /// Returns the place of a reference's bytes. `None`: the payload is gone, it is shorter than the reference says, or
    /// its slot names a place outside the data.
    #[must_use]
    pub fn find(&self, reference: &Reference) -> Option<Found> {
        let used = self.slot(reference.payload.slot)?;
        let field = |field: usize| self.0.long(slot_at(used.slot as usize) + field).load(Ordering::Relaxed);
        let (place, length) = (field(OFFSET), field(LENGTH));
        let end = reference.offset.checked_add(reference.length)?;
        if used.secret != reference.payload.secret || end > length {
            return None;
        }
        let bytes = place.checked_add(reference.offset)?..place.checked_add(end)?;
        if let Some(number) = used.file {
            return Some(Found::InFile { number, bytes });
        }
        let (start, end) = (usize::try_from(bytes.start).ok()?, usize::try_from(bytes.end).ok()?);
        (start >= DATA_BYTES_FROM && end <= self.0.len()).then_some(Found::Here(start..end))
    }

    fn slot(&self, slot: u32) -> Option<Used> {
        let at = slot_at(usize::try_from(slot).ok().filter(|slot| *slot < SLOTS)?);
        if self.0.word(at + STATE).load(Ordering::Acquire) != USED {
            return None;
        }
        let field = |field: usize| self.0.long(at + field).load(Ordering::Relaxed);
        let file = self.0.word(at + FILE).load(Ordering::Relaxed);
        let file = (file != NO_FILE).then_some(file);
        Some(Used { slot, secret: field(SECRET), born_ms: field(BORN_MS), file, stream: field(STREAM) })
    }

    /// Stream that the payload in a slot is a part of; 0: none.
    #[must_use]
    pub fn stream(&self, slot: u32) -> u64 {
        self.slot(slot).map_or(0, |used| used.stream)
    }

    /// Time at which a reference's payload came into use, in milliseconds of [`now_ms`].
    #[must_use]
    pub fn born_ms(&self, reference: &Reference) -> Option<u64> {
        self.slot(reference.payload.slot).map(|used| used.born_ms)
    }

    /// Announces that the store has a file under this number, so that the program may refer to it.
    pub fn open_file(&self, number: u32) {
        self.0.word(file_at(number)).store(number, Ordering::SeqCst);
    }

    /// Closes a file to which no slot refers, and tells the program so in the segment's head. Returns false if a slot
    /// does refer to the file; then the file stays open.
    pub fn close_file(&self, number: u32) -> bool {
        let word = self.0.word(file_at(number));
        word.store(CLOSED, Ordering::SeqCst);
        // The program first fills a slot, and then looks at the word above. The store first writes that word, and then
        // looks at the slots. With a fence between the two steps on each side (`Writer::refer_to_file`), at least one
        // side sees what the other has written.
        fence(Ordering::SeqCst);
        let is_used = self.used().any(|used| used.file == Some(number));
        if is_used {
            word.store(number, Ordering::SeqCst);
        }
        !is_used
    }

    /// Tells the program that the store was there at `now_ms`, so that the program may go on writing payloads.
    pub fn seen(&self, now_ms: u64) {
        presence::seen(self.0.long(SEEN), now_ms);
    }

    /// Tells the program that it must write no more payloads here, because the store ends, is closed, or frees the
    /// segment.
    pub fn end(&self) {
        presence::end(self.0.long(SEEN));
    }

    /// Writes into a slot which bytes of its payload were needed. Called before [`Self::free`].
    pub fn report(&self, slot: u32, touched: Touched) {
        let slot = slot as usize;
        if slot < SLOTS {
            let values = TOUCHED.into_iter().zip(touched.to_longs());
            values.for_each(|(field, value)| self.0.long(slot_at(slot) + field).store(value, Ordering::Relaxed));
        }
    }

    /// Returns a slot to the program.
    pub fn free(&self, slot: u32) {
        let slot = slot as usize;
        if slot < SLOTS {
            self.0.word(slot_at(slot) + STATE).store(RETURNED, Ordering::Release);
        }
    }

    /// All slots in use.
    pub fn used(&self) -> impl Iterator<Item = Used> {
        (0..SLOTS as u32).filter_map(|slot| self.slot(slot))
    }
}

/// Segment of this machine as a reader uses it. The memory is read-only.
#[derive(Debug)]
pub struct Mapped(Reader);

impl Mapped {
    /// Uses memory that the store has given for reading.
    #[must_use]
    pub fn new(memory: SharedMemory) -> Self {
        Self(Reader::new(memory))
    }

    /// Copies the bytes of a reference from the segment. Returns false if they are not in the segment, or were replaced
    /// during the copy; then `into` has unspecified contents.
    #[must_use]
    pub fn copy(&self, reference: &Reference, into: &mut [u8]) -> bool {
        let Some(Found::Here(place)) = self.0.find(reference) else { return false };
        if place.len() != into.len() {
            return false;
        }
        self.0.memory().read(place.start, into);
        self.is_still_there(reference)
    }

    /// Whether the payload is still in its slot. If so, bytes that were read from the payload's pages before this call
    /// are the payload's: the slot changes before its pages are used again.
    #[must_use]
    pub fn is_still_there(&self, reference: &Reference) -> bool {
        fence(Ordering::Acquire);
        self.0.find(reference).is_some()
    }

    /// File number and offset of a reference's bytes, if they are in a file and the payload is younger than `age_ms`.
    #[must_use]
    pub fn in_file(&self, reference: &Reference, age_ms: u64) -> Option<(u32, u64)> {
        match self.0.find(reference)? {
            Found::InFile { number, bytes } if now_ms().saturating_sub(self.0.born_ms(reference)?) < age_ms => {
                Some((number, bytes.start))
            }
            _ => None,
        }
    }

    /// Whether the store has not ended the segment ([`Reader::end`]). A reader that kept an ended segment mapped would
    /// keep its pages from being freed.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !presence::has_ended(self.0.0.long(SEEN))
    }
}

impl AsFd for Mapped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}
