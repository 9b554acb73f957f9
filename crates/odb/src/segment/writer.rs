//! Segment as its program uses it: the program puts payloads there, and refers to files. A segment is memory that the
//! store leases to one program. A *payload* is the bytes of one large write, and a *slot* the segment's entry for one
//! payload. A payload has *come back* when the store has returned its slot: nobody can fetch it any more. The *holder*
//! is the store, by its name. A *reader* is a program that fetches payloads.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

use shunt_sys::shared::SharedMemory;
use siphasher::sip::SipHasher24;

use super::files::{Files, Way};
use super::{
    BORN_MS, DATA_BYTES_FROM, FILE, FREE, LENGTH, NO_FILE, OFFSET, PAGE_BYTES, RETURNED, SECRET, SEEN, SLOTS, STATE,
    STREAM, TOUCHED, UNKNOWN, USED, file_at, now_ms, slot_at,
};
use crate::learnt::{Note, Report};
use crate::place::Version;
use crate::presence;
use crate::reference::{Holder, PayloadId, Reference, Weight};
use crate::touched::Touched;

/// Least interval at which slots of payloads that have come back are reclaimed when a file is to be sent, in
/// milliseconds. Then files to which no slot refers any more can be replaced.
const RECLAIMED_EVERY_MS: u64 = 100;

/// Segment as its program uses it.
#[derive(Debug)]
pub struct Writer {
    memory: SharedMemory,
    holder: Holder,
    segment: u32,
    /// Random key from which the payloads' secrets are made, so that others cannot guess them.
    key: [u8; 16],
    made: u64,
    /// Free pages of the data, as runs: first page of each run, and its number of pages.
    free: BTreeMap<usize, usize>,
    /// By slot: pages or file that the slot's payload takes up.
    taken: Vec<Taken>,
    next_slot: usize,
    files: Files,
    reclaimed_ms: u64,
    /// By slot: length of the payload in bytes, and the note to be returned in the payload's [`Report`].
    notes: Vec<Option<(u32, Note)>>,
    /// Slots with notes, in the order in which they are checked. Some have lost their note meanwhile.
    noted: VecDeque<usize>,
    /// Reports on payloads that have come back.
    reports: Vec<Report>,
}

/// Resource that a slot's payload takes up until the slot is free.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Taken {
    Nothing,
    /// Pages of the data.
    Pages(Range<usize>),
    /// File with this number.
    File(u32),
}

impl Writer {
    /// Uses memory that the store `holder` has leased as `segment`.
    ///
    /// # Errors
    /// Returns an error if the memory is too small for a segment, or the kernel's error of getrandom(2).
    pub fn new(memory: SharedMemory, holder: Holder, segment: u32) -> io::Result<Self> {
        if memory.len() < DATA_BYTES_FROM + PAGE_BYTES {
            return Err(io::Error::other("the store leased a segment that is too small"));
        }
        let mut key = [0; 16];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        let pages = (memory.len() - DATA_BYTES_FROM) / PAGE_BYTES;
        let free = BTreeMap::from([(0, pages)]);
        let (taken, notes) = (vec![Taken::Nothing; SLOTS], vec![None; SLOTS]);
        Ok(Self {
            memory,
            holder,
            segment,
            key,
            made: 0,
            free,
            taken,
            next_slot: 0,
            files: Files::default(),
            reclaimed_ms: 0,
            notes,
            noted: VecDeque::new(),
            reports: Vec::new(),
        })
    }

    /// Store that the segment belongs to.
    #[must_use]
    pub fn holder(&self) -> Holder {
        self.holder
    }

    /// Number of the segment.
    #[must_use]
    pub fn segment(&self) -> u32 {
        self.segment
    }

    /// Whether the store is there, so that payloads put here can be fetched.
    #[must_use]
    pub fn is_served(&self) -> bool {
        presence::is_there(self.memory.long(SEEN))
    }

    /// Stores a copy of some bytes. `None`: there are no bytes, or there is no room now.
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

    /// Stores a copy of a file's bytes from `from` on, at most `length`. `None`: there is no room now, or the file has
    /// no bytes there.
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

    /// Takes a slot and pages for `room` bytes, and lets `fill` write the bytes. `fill` returns how many it has
    /// written; `None`: there are none.
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
        self.fill_slot(slot, Taken::Pages(run), at as u64, length as u64)
    }

    fn fill_slot(&mut self, slot: usize, taken: Taken, place: u64, length: u64) -> Option<Reference> {
        let file = if let Taken::File(number) = taken { number } else { NO_FILE };
        self.taken[slot] = taken;
        self.next_slot = (slot + 1) % SLOTS;
        self.made += 1;
        let secret = SipHasher24::new_with_key(&self.key).hash(&self.made.to_le_bytes());
        let slot_at = slot_at(slot);
        let fields = [(SECRET, secret), (OFFSET, place), (LENGTH, length), (BORN_MS, now_ms()), (STREAM, 0)];
        for (field, value) in fields.into_iter().chain(TOUCHED.map(|field| (field, UNKNOWN))) {
            self.memory.long(slot_at + field).store(value, Ordering::Relaxed);
        }
        self.memory.word(slot_at + FILE).store(file, Ordering::Relaxed);
        self.memory.word(slot_at + STATE).store(USED, Ordering::Release);
        let payload = PayloadId { holder: self.holder, segment: self.segment, slot: u32::try_from(slot).ok()?, secret };
        Some(Reference { payload, weight: Weight::WHOLE, offset: 0, length })
    }

    /// Decides how to send `bytes` bytes of a file whose state is `version`.
    pub fn file(&mut self, version: &Version, bytes: u64) -> Way {
        let now = now_ms();
        if now >= self.reclaimed_ms + RECLAIMED_EVERY_MS {
            self.reclaim();
        }
        let is_open = |number| self.memory.word(file_at(number)).load(Ordering::Relaxed) == number;
        self.files.way(version, bytes, now, is_open)
    }

    /// Notes that the store has got a file under the number that [`Self::file`] has returned.
    pub fn has_given(&mut self, number: u32, version: Version) {
        self.files.add(number, version, now_ms());
    }

    /// Notes that the store has refused a file.
    pub fn has_not_given(&mut self) {
        self.files.was_refused(now_ms());
    }

    /// Refers to bytes of a file that the store has. `None`: `length` is 0, there is no free slot, or the store has
    /// closed the file.
    pub fn refer_to_file(&mut self, number: u32, from: u64, length: u64) -> Option<Reference> {
        if length == 0 {
            return None;
        }
        let slot = self.free_slot()?;
        let reference = self.fill_slot(slot, Taken::File(number), from, length)?;
        self.files.refers(number);
        // The store closes a file to which no slot refers. It first says so in the head, and then looks at the slots
        // once more.
        fence(Ordering::SeqCst);
        if self.memory.word(file_at(number)).load(Ordering::SeqCst) == number {
            return Some(reference);
        }
        self.withdraw(&reference);
        None
    }

    /// Slot of a payload, if the payload is in this segment.
    fn own_slot(&self, payload: &PayloadId) -> Option<usize> {
        let slot = payload.slot as usize;
        (payload.segment == self.segment && slot < SLOTS).then_some(slot)
    }

    /// Takes back a payload whose reference has not left this process.
    pub fn withdraw(&mut self, reference: &Reference) {
        if let Some(slot) = self.own_slot(&reference.payload) {
            self.memory.word(slot_at(slot) + STATE).store(RETURNED, Ordering::Release);
        }
    }

    /// Makes a payload a part of a stream. The store keeps all parts of a stream as long as any of them is read.
    pub fn is_part(&self, reference: &Reference, stream: u64) {
        if let Some(slot) = self.own_slot(&reference.payload) {
            self.memory.long(slot_at(slot) + STREAM).store(stream, Ordering::Relaxed);
        }
    }

    /// Asks for a report on what was read of a payload, once the payload has come back ([`Self::reports`]).
    pub fn note(&mut self, reference: &Reference, note: Note) {
        if let Some(slot) = self.own_slot(&reference.payload) {
            self.notes[slot] = Some((u32::try_from(reference.length).unwrap_or(u32::MAX), note));
            self.noted.push_back(slot);
        }
    }

    /// Returns each report on a payload that has come back, once. Each call checks a few of the slots that have notes,
    /// in turn.
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
        if self.next_slot == 0 || self.taken[self.next_slot] != Taken::Nothing {
            self.reclaim();
        }
        let from = self.next_slot;
        (from..SLOTS).chain(0..from).find(|slot| self.taken[*slot] == Taken::Nothing)
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

    /// Reclaims the slots of all payloads that have come back, with their pages.
    fn reclaim(&mut self) {
        self.reclaimed_ms = now_ms();
        for slot in 0..SLOTS {
            self.reclaim_slot(slot);
        }
    }

    /// Reclaims a slot and its pages, if its payload has come back. Returns whether it was reclaimed.
    fn reclaim_slot(&mut self, slot: usize) -> bool {
        let state = self.memory.word(slot_at(slot) + STATE);
        if self.taken[slot] == Taken::Nothing || state.load(Ordering::Acquire) != RETURNED {
            return false;
        }
        let said = TOUCHED.map(|field| self.memory.long(slot_at(slot) + field).load(Ordering::Relaxed));
        if let Some((bytes, note)) = self.notes[slot].take()
            && said != [UNKNOWN; 2]
        {
            self.reports.push(Report { note, bytes, touched: Touched::from_longs(said) });
        }
        state.store(FREE, Ordering::Relaxed);
        // A reader copies pages, and then looks whether the slot has changed (`Mapped::copy`). So this change has to be
        // visible before later writes into the pages are.
        fence(Ordering::Release);
        match std::mem::replace(&mut self.taken[slot], Taken::Nothing) {
            Taken::Nothing => {}
            Taken::Pages(run) => self.give_pages(run),
            Taken::File(number) => self.files.refers_no_more(number),
        }
        true
    }

    /// Number of payloads that may still be fetched.
    #[must_use]
    pub fn payloads(&mut self) -> usize {
        self.reclaim();
        self.taken.iter().filter(|taken| **taken != Taken::Nothing).count()
    }
}
