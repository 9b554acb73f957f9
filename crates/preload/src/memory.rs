//! The process's absent memory: made absent when a reference is read into it, fetched when somebody needs it.
//!
//! `absent` and the kernel are changed together under one lock, which is never held while bytes are fetched or program
//! memory is touched. Bytes are fetched into memory of our own, and only then put into place, if the memory still
//! stands for them.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{MprotectFlags, mprotect};
use shunt_odb::absent::{Absent, Piece};
use shunt_odb::fetch::{self, FetchError, Holders, Wanted};
use shunt_odb::hold::{self, Hold, Returns};
use shunt_odb::reference::{Reference, Weight};
use shunt_odb::segment::now_ms;
use shunt_odb::store::usage::Counted;
use shunt_sys::userfaultfd::{PAGE_BYTES, Userfaultfd};

use crate::counts::{self, count};
use crate::faults;

/// The most that is fetched at a time.
const FETCH_BYTES: usize = 1 << 20;
/// Shares that wait to go back before they are sent.
const RETURNS_AT_ONCE: usize = 64;

/// Bytes that are absent, for a look without the lock: nearly always, there are none.
static ABSENT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Forks under way: until they are done nothing becomes absent.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// Whether any memory of the process is absent.
#[inline]
pub fn any_absent() -> bool {
    ABSENT_BYTES.load(Ordering::Acquire) != 0
}

pub struct Memory {
    /// /dev/userfaultfd, open.
    device: OwnedFd,
    state: Mutex<State>,
    /// Of [`FETCH_BYTES`].
    spare: Mutex<Option<Box<[u8]>>>,
    pub holders: Holders,
    pub returns: Arc<Returns>,
}

#[derive(Default)]
struct State {
    absent: Absent,
    /// Of this process: made when memory first becomes absent, with the thread that serves its faults.
    faults: Option<Arc<Userfaultfd>>,
    /// There will never be one.
    refused: bool,
}

/// The whole pages of a range.
pub fn whole_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.next_multiple_of(PAGE_BYTES);
    start..(range.end / PAGE_BYTES * PAGE_BYTES).max(start)
}

impl Memory {
    pub fn new(device: OwnedFd, store: PathBuf) -> Self {
        Self {
            device,
            state: Mutex::default(),
            spare: Mutex::default(),
            holders: Holders::new(store, counts::begin),
            returns: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A share of a payload that this process keeps from here on.
    pub fn hold(&self, reference: &Reference, share: Weight) -> Arc<Hold> {
        Arc::new(Hold::new(reference.payload, share, &self.returns))
    }

    /// Makes whole pages stand for a payload's bytes from `offset` on, in place of what they hold. False: this memory
    /// cannot be absent, and its contents are lost.
    pub fn make_absent(&'static self, pages: Range<usize>, hold: &Arc<Hold>, offset: u64) -> bool {
        let mut state = self.lock();
        if FORKING.load(Ordering::Acquire) > 0 {
            return false;
        }
        let Some(faults) = state.faults(self) else { return false };
        // Entered first: whoever touches it from the moment on that it is absent gets these bytes.
        state.absent.insert(Piece { addresses: pages.clone(), hold: Arc::clone(hold), offset });
        let made = faults.discard(pages.clone()).is_ok();
        if !made {
            state.absent.remove(&pages);
            let _ = faults.unregister(pages.clone());
        }
        state.publish();
        drop(state);
        if made {
            count(Counted::ReceivedAbsent, pages.len());
        }
        made
    }

    /// Whether any of a range is absent.
    pub fn meets(&self, range: &Range<usize>) -> bool {
        any_absent() && self.lock().absent.meets(range)
    }

    /// What of a range is absent, in order, as the kernel sees it now.
    pub fn absent_within(&self, range: &Range<usize>) -> Vec<Piece> {
        if !any_absent() {
            return Vec::new();
        }
        let state = self.lock();
        let Some(faults) = &state.faults else { return Vec::new() };
        let mut pieces = state.absent.within(range);
        // What another thread has unmapped may be somebody else's memory before the event about it is here.
        pieces.retain(|piece| faults.is_absent(piece.addresses.start / PAGE_BYTES * PAGE_BYTES));
        pieces
    }

    /// The program will overwrite a range, or has no more use for it.
    pub fn forget(&self, range: &Range<usize>) {
        if !any_absent() {
            return;
        }
        let pages = whole_pages(range);
        let mut state = self.lock();
        if state.absent.meets(&pages) {
            let removed = state.absent.remove(&pages);
            if let (Some(faults), Some(first), Some(last)) = (&state.faults, removed.first(), removed.last()) {
                // Ordinary memory from here on: the kernel fills it with zeros by itself.
                let _ = faults.unregister(first.addresses.start..last.addresses.end);
            }
            state.publish();
            drop(state);
            drop(removed);
        }
        self.send_returns_if_many();
    }

    /// Has all absent bytes of a range fetched and in place.
    ///
    /// # Errors
    /// They cannot be had.
    pub fn fetch_range(&self, range: &Range<usize>) -> Result<(), FetchError> {
        self.fetch_ranges(std::slice::from_ref(range))
    }

    /// The same for several ranges: what they stand for is asked for together.
    ///
    /// # Errors
    /// As [`Self::fetch_range`].
    pub fn fetch_ranges(&self, ranges: &[Range<usize>]) -> Result<(), FetchError> {
        if !any_absent() {
            return Ok(());
        }
        loop {
            let pieces = self.some_within(ranges);
            if pieces.is_empty() {
                return Ok(());
            }
            count(Counted::Fetched, pieces.iter().map(|piece| piece.addresses.len()).sum());
            self.fetch_pieces(&pieces)?;
        }
    }

    /// Has all of a range in place, in as few mappings as the program has made: the kernel splits one where a part of it
    /// may be absent.
    ///
    /// # Errors
    /// The bytes cannot be had.
    pub fn make_ordinary(&self, range: &Range<usize>) -> Result<(), FetchError> {
        let Some(faults) = self.lock().faults.clone() else { return Ok(()) };
        self.fetch_range(range)?;
        let _ = faults.unregister(whole_pages(range));
        Ok(())
    }

    /// What of some ranges is absent, as much of it as is fetched at a time.
    fn some_within(&self, ranges: &[Range<usize>]) -> Vec<Piece> {
        let state = self.lock();
        let mut room = FETCH_BYTES;
        let mut some: Vec<Piece> = Vec::new();
        for range in ranges {
            // Whole pages: only such are ever absent. Ranges that follow each other may share one.
            let first = range.start / PAGE_BYTES * PAGE_BYTES;
            let before = some.last().map(|piece| &piece.addresses).filter(|before| before.contains(&first));
            let around = before.map_or(first, |before| before.end)..range.end.next_multiple_of(PAGE_BYTES);
            for mut piece in state.absent.within(&around) {
                piece.addresses.end = piece.addresses.end.min(piece.addresses.start + room);
                room -= piece.addresses.len();
                some.push(piece);
                if room == 0 {
                    return some;
                }
            }
        }
        some
    }

    /// Fetches what pieces stand for, and fills their addresses, where they still stand for it.
    fn fetch_pieces(&self, pieces: &[Piece]) -> Result<(), FetchError> {
        let mut bytes = self.spare_bytes();
        let total: usize = pieces.iter().map(|piece| piece.addresses.len()).sum();
        let mut rest = &mut bytes[..total];
        let mut wanted = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (into, after) = rest.split_at_mut(piece.addresses.len());
            let (payload, length) = (piece.hold.payload(), into.len() as u64);
            let reference = Reference { payload, weight: Weight::WHOLE, offset: piece.offset, length };
            wanted.push(Wanted { reference, into });
            rest = after;
        }
        let fetched = self.holders.fetch_all(&mut wanted);
        let needed = match &fetched {
            Ok(()) => self.fill(pieces, &bytes),
            // Gone meanwhile: then nobody needs it.
            Err(_) => pieces.iter().any(|piece| self.lock().absent.meets(&piece.addresses)),
        };
        self.keep_bytes(bytes);
        if needed { fetched } else { Ok(()) }
    }

    /// Puts bytes where pieces still stand for them: whether any did.
    fn fill(&self, pieces: &[Piece], bytes: &[u8]) -> bool {
        let mut state = self.lock();
        let Some(faults) = state.faults.clone() else { return false };
        let (mut from, mut needed) = (0, false);
        for piece in pieces {
            for now in state.absent.within(&piece.addresses) {
                let at = now.addresses.start - piece.addresses.start;
                if now.hold.payload() == piece.hold.payload() && now.offset == piece.offset + at as u64 {
                    // Where it fails, the memory has been unmapped, and the event about it is on its way.
                    let _ = faults.fill(now.addresses.start, &bytes[from + at..from + at + now.addresses.len()]);
                    state.absent.remove(&now.addresses);
                    needed = true;
                }
            }
            from += piece.addresses.len();
        }
        state.publish();
        needed
    }

    /// Memory to fetch into. It is used again: new memory of that size would be faulted in page by page each time.
    fn spare_bytes(&self) -> Box<[u8]> {
        let spare = self.spare.try_lock().ok().and_then(|mut spare| spare.take());
        spare.unwrap_or_else(|| vec![0; FETCH_BYTES].into_boxed_slice())
    }

    fn keep_bytes(&self, bytes: Box<[u8]>) {
        if let Ok(mut spare) = self.spare.try_lock() {
            *spare = Some(bytes);
        }
    }

    /// Serves a fault: the page, and what is absent behind it up to a bound, because touches go on.
    ///
    /// # Errors
    /// The bytes cannot be had.
    pub fn serve_fault(&self, faults: &Userfaultfd, address: usize) -> Result<(), FetchError> {
        const AHEAD_BYTES: usize = 64 << 10;
        let page = address / PAGE_BYTES * PAGE_BYTES;
        let piece = {
            let state = self.lock();
            match state.absent.around(page) {
                Some(piece) => piece.clone(),
                // Registered memory that stands for nothing, or that was filled a moment ago.
                None => {
                    let _ = faults.fill_zeros(page..page + PAGE_BYTES);
                    return Ok(());
                }
            }
        };
        let from = page - piece.addresses.start;
        let addresses = page..piece.addresses.end.min(page + AHEAD_BYTES);
        let part = Piece { addresses, offset: piece.offset + from as u64, hold: piece.hold };
        count(Counted::Faults, 1);
        count(Counted::FetchedByFault, part.addresses.len());
        let served = self.fetch_pieces(&[part]);
        // Whoever waits looks again, whatever has become of the page.
        let _ = faults.wake(page..page + PAGE_BYTES);
        served
    }

    /// The kernel says that memory was unmapped. Only where it is not there again, absent, by now.
    pub fn unmapped(&self, faults: &Userfaultfd, range: &Range<usize>) {
        let mut state = self.lock();
        let gone: Vec<Range<usize>> = (state.absent.within(range).into_iter())
            .map(|piece| piece.addresses)
            .filter(|addresses| !faults.is_absent(addresses.start))
            .collect();
        let dropped: Vec<Piece> = gone.iter().flat_map(|addresses| state.absent.remove(addresses)).collect();
        state.publish();
        drop(state);
        drop(dropped);
    }

    /// The kernel says that memory was moved.
    pub fn moved(&self, from: usize, to: usize, bytes: usize) {
        let mut state = self.lock();
        state.absent.moved(from, to, bytes);
        state.publish();
    }

    /// Before a fork: all is fetched, because a child would read zeros, and until the value is dropped nothing else
    /// becomes absent.
    pub fn hold_still(&'static self) -> Still {
        FORKING.fetch_add(1, Ordering::AcqRel);
        // What cannot be had stays absent here.
        let _ = self.fetch_range(&(0..usize::MAX - PAGE_BYTES));
        let holders = self.holders.hold_still();
        Still { state: self.lock(), returns: self.returns.hold_still(), holders }
    }

    /// Fetches what has been absent for long: its holder keeps it only for so long, and a program that uses a buffer again
    /// which it read minutes ago must not end by that.
    pub fn fetch_old(&self) {
        /// A quarter of what stores keep payloads for, if they are not told otherwise.
        const OLD_MS: u64 = 30_000;
        const TRIED_FOR_MS: u64 = 10_000;
        if !any_absent() {
            return;
        }
        let now = now_ms();
        let is_old =
            |piece: &&Piece| (OLD_MS..OLD_MS + TRIED_FOR_MS).contains(&now.saturating_sub(piece.hold.since_ms()));
        let old: Vec<Range<usize>> =
            self.lock().absent.all().filter(is_old).map(|piece| piece.addresses.clone()).collect();
        for addresses in old {
            // Where it cannot be had now, a touch may still find it.
            let _ = self.fetch_range(&addresses);
        }
    }

    fn send_returns_if_many(&self) {
        if self.returns.waiting() >= RETURNS_AT_ONCE {
            self.holders.send_returns(&self.returns);
        }
    }
}

/// [`Memory::hold_still`].
pub struct Still {
    state: MutexGuard<'static, State>,
    returns: hold::Still<'static>,
    holders: fetch::Still<'static>,
}

impl Still {
    /// In the child, which has no absent memory, no thread that serves faults, and none of the parent's connections.
    /// What could not be fetched before nobody reads as zeros.
    pub fn forget(&mut self) {
        for piece in self.state.absent.all() {
            let at = piece.addresses.start as *mut std::ffi::c_void;
            // SAFETY: memory that the program has read into, and whose bytes are lost.
            let _ = unsafe { mprotect(at, piece.addresses.len(), MprotectFlags::empty()) };
        }
        // The parent's, with their shares.
        std::mem::forget(std::mem::take(&mut *self.state));
        self.returns.forget();
        self.holders.forget();
        ABSENT_BYTES.store(0, Ordering::Release);
        // Forks of other threads are not this process's.
        FORKING.store(1, Ordering::Release);
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        FORKING.fetch_sub(1, Ordering::AcqRel);
    }
}

impl State {
    fn publish(&self) {
        ABSENT_BYTES.store(self.absent.bytes(), Ordering::Release);
    }

    fn faults(&mut self, memory: &'static Memory) -> Option<Arc<Userfaultfd>> {
        if self.faults.is_none() && !self.refused {
            // SAFETY: `Memory` discards only what a program has given a read to overwrite.
            let made = unsafe { Userfaultfd::new(memory.device.as_fd()) };
            self.faults = made.ok().map(Arc::new).filter(|faults| faults::start(memory, Arc::clone(faults)));
            self.refused = self.faults.is_none();
        }
        self.faults.clone()
    }
}
