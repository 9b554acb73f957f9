//! A segment: memory of the store that one program writes payloads into (the paper's odb_buff).
//!
//! ```text
//!   head      one page: whether the store that leased it is still there
//!   slots     SLOTS times 64 bytes: which payloads there are
//!   data      their bytes, each payload from a page's start on
//! ```
//!
//! A slot is the program's while FREE, and the store's from USED to RETURNED. So neither waits for the other, and
//! neither has to tell the other anything: the store looks into a slot when somebody asks for it by reference.
//!
//! The store believes nothing that is written here but the payload's own place, which it checks: a program can only
//! spoil its own payloads.
//!
//! A store that ends says so in the head; one that is killed no longer says that it is there. Either way the program
//! soon writes no more payloads that nobody could have.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use shunt_sys::shared::SharedMemory;
use siphasher::sip::SipHasher24;

use crate::learnt::{Note, Report};
use crate::reference::{Holder, PayloadId, Reference, Weight};
use crate::touched::Touched;

/// Payloads of a segment.
pub const SLOTS: usize = 1024;
const SLOT_BYTES: usize = 64;
const PAGE_BYTES: usize = 4096;
/// Where data begins.
pub const DATA_BYTES_FROM: usize = PAGE_BYTES + SLOTS * SLOT_BYTES;

/// In the head: when the store was last there ([`now_ms`]); [`ENDED`] once it is not.
const SEEN_MS: usize = 0;
const ENDED: u64 = 0;
/// A store that was not seen for so long is taken for lost. It says that it is there four times a second.
const LOST_AFTER_MS: u64 = 2_000;

const STATE: usize = 0;
const SECRET: usize = 8;
const OFFSET: usize = 16;
const LENGTH: usize = 24;
const BORN_MS: usize = 32;
/// What was needed of the payload: written by the store before RETURNED. [`UNKNOWN`]: not said.
const TOUCHED: [usize; 2] = [40, 48];
const UNKNOWN: u64 = u64::MAX;

const FREE: u32 = 0;
const USED: u32 = 1;
const RETURNED: u32 = 2;

/// Milliseconds of a clock that all processes of a machine share.
#[must_use]
pub fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let now = Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn slot_at(slot: usize) -> usize {
    PAGE_BYTES + slot * SLOT_BYTES
}

/// The program's end of a segment.
#[derive(Debug)]
pub struct Writer {
    memory: SharedMemory,
    holder: Holder,
    segment: u32,
    /// Makes secrets that others cannot guess.
    key: [u8; 16],
    made: u64,
    /// First page to pages, of data that no payload has.
    free: BTreeMap<usize, usize>,
    /// Pages of each slot's payload; empty: the slot is free.
    runs: Vec<Range<usize>>,
    next_slot: usize,
    /// Of each slot's payload: its bytes, and what to tell with what has become of it.
    notes: Vec<Option<(u32, Note)>>,
    /// Slots with notes, in the order in which they are looked at; some have none any more.
    noted: VecDeque<usize>,
    /// Of payloads that have come back.
    reports: Vec<Report>,
}

impl Writer {
    /// For memory that the store at `holder` has leased as `segment`.
    ///
    /// # Errors
    /// Where the memory is too small for a segment, or the kernel has no random bytes.
    pub fn new(memory: SharedMemory, holder: Holder, segment: u32) -> io::Result<Self> {
        if memory.len() < DATA_BYTES_FROM + PAGE_BYTES {
            return Err(io::Error::other("the store leased a segment that is too small"));
        }
        let mut key = [0; 16];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        let pages = (memory.len() - DATA_BYTES_FROM) / PAGE_BYTES;
        let free = BTreeMap::from([(0, pages)]);
        let (runs, notes) = (vec![0..0; SLOTS], vec![None; SLOTS]);
        let (noted, reports) = (VecDeque::new(), Vec::new());
        Ok(Self { memory, holder, segment, key, made: 0, free, runs, next_slot: 0, notes, noted, reports })
    }

    /// Whether anybody could have what is put here now.
    #[must_use]
    pub fn is_served(&self) -> bool {
        let seen_ms = self.memory.long(SEEN_MS).load(Ordering::Relaxed);
        seen_ms != ENDED && now_ms().saturating_sub(seen_ms) < LOST_AFTER_MS
    }

    /// Keeps a copy of some bytes. `None`: there is no room now.
    pub fn put(&mut self, bytes: &[IoSlice<'_>]) -> Option<Reference> {
        let length = bytes.iter().map(|slice| slice.len()).sum();
        self.place(length, |memory, mut at| {
            for slice in bytes {
                memory.write(at, slice);
                at += slice.len();
            }
            Some(length)
        })
    }

    /// Keeps a copy of a file's bytes from `from` on, at most `length`. `None`: there is no room now, or the file has
    /// nothing there.
    pub fn put_file(&mut self, file: BorrowedFd<'_>, from: u64, length: usize) -> Option<Reference> {
        self.place(length, |memory, at| {
            let mut got = 0;
            while got < length {
                match memory.read_file(at + got, length - got, file, from + got as u64) {
                    Ok(0) | Err(_) => break,
                    Ok(more) => got += more,
                }
            }
            (got > 0).then_some(got)
        })
    }

    /// Takes a slot and pages and has `fill` write there; it returns how many bytes there are.
    fn place(&mut self, room: usize, fill: impl FnOnce(&SharedMemory, usize) -> Option<usize>) -> Option<Reference> {
        if room == 0 {
            return None;
        }
        let slot = self.free_slot()?;
        let run = self.take_pages(room.div_ceil(PAGE_BYTES))?;
        let at = DATA_BYTES_FROM + run.start * PAGE_BYTES;
        let Some(length) = fill(&self.memory, at) else {
            self.give_pages(run);
            return None;
        };
        self.runs[slot] = run;
        self.next_slot = (slot + 1) % SLOTS;
        self.made += 1;
        let secret = SipHasher24::new_with_key(&self.key).hash(&self.made.to_le_bytes());
        let slot_at = slot_at(slot);
        let fields = [(SECRET, secret), (OFFSET, at as u64), (LENGTH, length as u64), (BORN_MS, now_ms())];
        for (field, value) in fields.into_iter().chain(TOUCHED.map(|field| (field, UNKNOWN))) {
            self.memory.long(slot_at + field).store(value, Ordering::Relaxed);
        }
        self.memory.word(slot_at + STATE).store(USED, Ordering::Release);
        let payload = PayloadId { holder: self.holder, segment: self.segment, slot: u32::try_from(slot).ok()?, secret };
        Some(Reference { payload, weight: Weight::WHOLE, offset: 0, length: length as u64 })
    }

    /// Takes back what never left this process.
    pub fn withdraw(&mut self, reference: &Reference) {
        let slot = reference.payload.slot as usize;
        if reference.payload.segment == self.segment && slot < SLOTS {
            self.memory.word(slot_at(slot) + STATE).store(RETURNED, Ordering::Release);
        }
    }

    /// Asks to be told what becomes of a payload ([`Self::reports`]).
    pub fn note(&mut self, reference: &Reference, note: Note) {
        let slot = reference.payload.slot as usize;
        if reference.payload.segment == self.segment && slot < SLOTS {
            self.notes[slot] = Some((u32::try_from(reference.length).unwrap_or(u32::MAX), note));
            self.noted.push_back(slot);
        }
    }

    /// What has become of some payloads, each once. Looks at a few at a time, the oldest first.
    pub fn reports(&mut self) -> impl Iterator<Item = Report> {
        const AT_ONCE: usize = 4;
        for slot in self.noted.drain(..AT_ONCE.min(self.noted.len())).collect::<Vec<_>>() {
            if self.notes[slot].is_some() && !self.reclaim_slot(slot) {
                self.noted.push_back(slot);
            }
        }
        self.reports.drain(..)
    }

    fn free_slot(&mut self) -> Option<usize> {
        if self.next_slot == 0 || !self.runs[self.next_slot].is_empty() {
            self.reclaim();
        }
        let from = self.next_slot;
        (from..SLOTS).chain(0..from).find(|slot| self.runs[*slot].is_empty())
    }

    fn take_pages(&mut self, pages: usize) -> Option<Range<usize>> {
        let fits = |free: &BTreeMap<usize, usize>| free.iter().find(|(_, have)| **have >= pages).map(|(at, _)| *at);
        let at = fits(&self.free).or_else(|| {
            self.reclaim();
            fits(&self.free)
        })?;
        let have = self.free.remove(&at)?;
        if have > pages {
            self.free.insert(at + pages, have - pages);
        }
        Some(at..at + pages)
    }

    fn give_pages(&mut self, run: Range<usize>) {
        let (mut start, mut end) = (run.start, run.end);
        if let Some((before, pages)) = self.free.range(..start).next_back().map(|(at, pages)| (*at, *pages))
            && before + pages == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(pages) = self.free.remove(&end) {
            end += pages;
        }
        self.free.insert(start, end - start);
    }

    /// Takes back the pages of payloads that nobody has a reference to any more.
    fn reclaim(&mut self) {
        for slot in 0..SLOTS {
            self.reclaim_slot(slot);
        }
    }

    /// False: its payload is still out.
    fn reclaim_slot(&mut self, slot: usize) -> bool {
        let state = self.memory.word(slot_at(slot) + STATE);
        if self.runs[slot].is_empty() || state.load(Ordering::Acquire) != RETURNED {
            return false;
        }
        let said = TOUCHED.map(|field| self.memory.long(slot_at(slot) + field).load(Ordering::Relaxed));
        if let Some((bytes, note)) = self.notes[slot].take()
            && said != [UNKNOWN; 2]
        {
            self.reports.push(Report { note, bytes, touched: Touched::from_longs(said) });
        }
        state.store(FREE, Ordering::Relaxed);
        // What is put there from now on is written after that: see `Mapped::copy`.
        fence(Ordering::Release);
        let run = std::mem::take(&mut self.runs[slot]);
        self.give_pages(run);
        true
    }

    /// Payloads that somebody may still ask for.
    #[must_use]
    pub fn payloads(&mut self) -> usize {
        self.reclaim();
        self.runs.iter().filter(|run| !run.is_empty()).count()
    }
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

    /// Where in the memory the bytes of a reference are. `None`: there is no such payload, or not so many bytes of it.
    #[must_use]
    pub fn find(&self, reference: &Reference) -> Option<Range<usize>> {
        let slot = usize::try_from(reference.payload.slot).ok().filter(|slot| *slot < SLOTS)?;
        let at = slot_at(slot);
        if self.0.word(at + STATE).load(Ordering::Acquire) != USED {
            return None;
        }
        let field = |field: usize| self.0.long(at + field).load(Ordering::Relaxed);
        let (secret, place, length) = (field(SECRET), field(OFFSET), field(LENGTH));
        let end = reference.offset.checked_add(reference.length)?;
        if secret != reference.payload.secret || end > length || place < DATA_BYTES_FROM as u64 {
            return None;
        }
        let (start, end) = (place.checked_add(reference.offset)?, place.checked_add(end)?);
        let (start, end) = (usize::try_from(start).ok()?, usize::try_from(end).ok()?);
        (end <= self.0.len()).then_some(start..end)
    }

    /// The store is there, at `now_ms`, and the program may go on.
    pub fn seen(&self, now_ms: u64) {
        self.0.long(SEEN_MS).store(now_ms.max(1), Ordering::Relaxed);
    }

    /// The store ends.
    pub fn end(&self) {
        self.0.long(SEEN_MS).store(ENDED, Ordering::Relaxed);
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

    /// Slots in use, with their secrets and when they came into use ([`now_ms`]).
    pub fn used(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        (0..SLOTS).filter_map(|slot| {
            let at = slot_at(slot);
            let used = self.0.word(at + STATE).load(Ordering::Acquire) == USED;
            let field = |field: usize| self.0.long(at + field).load(Ordering::Relaxed);
            used.then(|| (slot as u32, field(SECRET), field(BORN_MS)))
        })
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

    /// Copies the bytes of a reference. False: they are not here, or not any more, and `into` holds anything.
    #[must_use]
    pub fn copy(&self, reference: &Reference, into: &mut [u8]) -> bool {
        let Some(place) = self.0.find(reference).filter(|place| place.len() == into.len()) else { return false };
        self.0.memory().read(place.start, into);
        // Had the lease ended meanwhile, and the pages been used again, then that came before whatever was copied of it.
        fence(Ordering::Acquire);
        self.0.find(reference).is_some()
    }

    /// Whether the store may still lease its pages out: a reader that maps it longer keeps them from everybody.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.0.long(SEEN_MS).load(Ordering::Relaxed) != ENDED
    }
}

impl AsFd for Mapped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}
