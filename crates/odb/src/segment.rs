//! A segment: memory of the store that one program writes payloads into (the paper's odb_buff).
//!
//! ```text
//!   head      one page: whether the store that leased it is still there, and which files it has open
//!   slots     SLOTS times 64 bytes: which payloads there are
//!   data      their bytes, each payload from a page's start on
//! ```
//!
//! A slot is the program's while FREE, and the store's from USED to RETURNED. So neither waits for the other, and
//! neither has to tell the other anything: the store looks into a slot when somebody asks for it by reference.
//!
//! A payload may also be in a file that the program has given to the store ([`crate::place`]): then its slot has the file's
//! number, and the place is one in that file.
//!
//! The store believes nothing that is written here but the payload's own place, which it checks: a program can only
//! spoil its own payloads.
//!
//! A store that ends says so in the head; one that is killed no longer says that it is there. Either way the program
//! soon writes no more payloads that nobody could have.

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

/// Payloads of a segment.
pub const SLOTS: usize = 1024;
const SLOT_BYTES: usize = 64;
const PAGE_BYTES: usize = 4096;
/// Where data begins.
pub const DATA_BYTES_FROM: usize = PAGE_BYTES + SLOTS * SLOT_BYTES;

/// In the head: a word of [`crate::presence`].
const SEEN: usize = 0;

/// In the head: a word for each place of a file.
const FILES_AT: usize = 64;
/// Files of one segment. A file's number tells its place, and is never another's again.
pub const FILES: u32 = 256;
/// In place of a file's number: the store has closed it.
const CLOSED: u32 = 0;
/// In a slot: the payload is in the segment.
const NO_FILE: u32 = 0;

fn file_at(file: u32) -> usize {
    FILES_AT + (file % FILES) as usize * 4
}

const STATE: usize = 0;
const FILE: usize = 4;
const SECRET: usize = 8;
const OFFSET: usize = 16;
const LENGTH: usize = 24;
const BORN_MS: usize = 32;
/// What was needed of the payload: written by the store before RETURNED. [`UNKNOWN`]: not said.
const TOUCHED: [usize; 2] = [40, 48];
const UNKNOWN: u64 = u64::MAX;
/// The stream that the payload is a part of, as a number of its writer's: who reads a stream slowly shows that by its other parts.
/// 0: it is a part of none.
const STREAM: usize = 56;

const FREE: u32 = 0;
const USED: u32 = 1;
const RETURNED: u32 = 2;

fn slot_at(slot: usize) -> usize {
    PAGE_BYTES + slot * SLOT_BYTES
}

/// Where a payload's bytes are, as its slot says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// In the segment.
    Here(Range<usize>),
    /// In the file of that number.
    InFile { number: u32, bytes: Range<u64> },
}

/// A slot in use.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    pub slot: u32,
    /// The payload's.
    pub secret: u64,
    /// When it came into use ([`now_ms`]).
    pub born_ms: u64,
    /// The file that the payload is in.
    pub file: Option<u32>,
    /// The stream that it is a part of; 0: none.
    pub stream: u64,
}

/// The store's end of a segment.
#[derive(Debug)]
pub struct Reader(Arc<SharedMemory>);

impl Reader {
    /// Of memory that the store leases to a program.
    #[must_use]
    pub fn new(memory: SharedMemory) -> Self {
        Self(Arc::new(memory))
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.0
    }

    /// Where the bytes of a reference are. `None`: there is no such payload, or not so many bytes of it.
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

    /// The stream that the payload in a slot is a part of; 0: none.
    #[must_use]
    pub fn stream(&self, slot: u32) -> u64 {
        self.slot(slot).map_or(0, |used| used.stream)
    }

    /// When the payload of a reference came into use.
    #[must_use]
    pub fn born_ms(&self, reference: &Reference) -> Option<u64> {
        self.slot(reference.payload.slot).map(|used| used.born_ms)
    }

    /// The store has a file under that number: the program may refer to it.
    pub fn open_file(&self, number: u32) {
        self.0.word(file_at(number)).store(number, Ordering::SeqCst);
    }

    /// Has the program refer no more to a file that no slot refers to. False: one does by now, and it stays open.
    pub fn close_file(&self, number: u32) -> bool {
        let word = self.0.word(file_at(number));
        word.store(CLOSED, Ordering::SeqCst);
        // A slot that was filled before the program could see that is seen here: see `Writer::refer_to_file`.
        fence(Ordering::SeqCst);
        let is_used = self.used().any(|used| used.file == Some(number));
        if is_used {
            word.store(number, Ordering::SeqCst);
        }
        !is_used
    }

    /// The store is there, at `now_ms`, and the program may go on.
    pub fn seen(&self, now_ms: u64) {
        presence::seen(self.0.long(SEEN), now_ms);
    }

    /// The store ends.
    pub fn end(&self) {
        presence::end(self.0.long(SEEN));
    }

    /// What was needed of a payload, before its slot is free.
    pub fn report(&self, slot: u32, touched: Touched) {
        let slot = slot as usize;
        if slot < SLOTS {
            let values = TOUCHED.into_iter().zip(touched.to_longs());
            values.for_each(|(field, value)| self.0.long(slot_at(slot) + field).store(value, Ordering::Relaxed));
        }
    }

    /// The program may use the slot again.
    pub fn free(&self, slot: u32) {
        let slot = slot as usize;
        if slot < SLOTS {
            self.0.word(slot_at(slot) + STATE).store(RETURNED, Ordering::Release);
        }
    }

    /// Slots in use.
    pub fn used(&self) -> impl Iterator<Item = Used> {
        (0..SLOTS as u32).filter_map(|slot| self.slot(slot))
    }
}

/// A reader's end of a segment of its own machine: nothing here can be written.
#[derive(Debug)]
pub struct Mapped(Reader);

impl Mapped {
    /// Of memory that the store has given for reading.
    #[must_use]
    pub fn new(memory: SharedMemory) -> Self {
        Self(Reader::new(memory))
    }

    /// Copies the bytes of a reference that are in the segment. False: they are not here, or not any more, and `into`
    /// holds anything.
    #[must_use]
    pub fn copy(&self, reference: &Reference, into: &mut [u8]) -> bool {
        let Some(Found::Here(place)) = self.0.find(reference) else { return false };
        if place.len() != into.len() {
            return false;
        }
        self.0.memory().read(place.start, into);
        self.is_still_there(reference)
    }

    /// Whether what was read meanwhile, here or in a file, is the payload's. Had the lease ended meanwhile, and the pages
    /// been used again, then that came before whatever was copied of it.
    #[must_use]
    pub fn is_still_there(&self, reference: &Reference) -> bool {
        fence(Ordering::Acquire);
        self.0.find(reference).is_some()
    }

    /// The file that the bytes of a reference are in, and where, if the payload is not older than `age_ms`.
    #[must_use]
    pub fn in_file(&self, reference: &Reference, age_ms: u64) -> Option<(u32, u64)> {
        match self.0.find(reference)? {
            Found::InFile { number, bytes } if now_ms().saturating_sub(self.0.born_ms(reference)?) < age_ms => {
                Some((number, bytes.start))
            }
            _ => None,
        }
    }

    /// Whether the store may still lease its pages out: a reader that maps it longer keeps them from everybody.
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
