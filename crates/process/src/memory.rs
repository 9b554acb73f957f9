//! The process's absent memory: made absent when a reference is read into it, fetched when somebody needs it.
//!
//! `absent` and the kernel are changed together under one lock, which is never held while bytes are fetched or memory is
//! touched that may be absent. Bytes are fetched into memory of our own, and only then put into place, if the memory
//! still stands for them.
//!
//! Of two kinds: large blocks of malloc are ours ([`blocks`]), so that we know of each page what the kernel has for
//! it ([`block`]); of any other memory only whole pages are absent, and only as long as they stand for something
//! ([`elsewhere`]).

mod block;
pub mod blocks;
mod copy;
mod elsewhere;
pub mod faults;
mod filling;
pub mod outside;
pub mod scratch;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::mm::{MprotectFlags, mprotect};
use shunt_odb::absent::{Absent, Piece, Pieces};
use shunt_odb::fetch::{self, Call, FetchError, Holders, Threads, Wanted};
use shunt_odb::hold::{self, Hold, Returns};
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_odb::segment::now_ms;
use shunt_odb::store::usage::Counted;
use shunt_odb::times::Times;
use shunt_sys::userfaultfd::{PAGE_BYTES, Userfaultfd};

use crate::system::counts::{self, count};
use crate::system::inside::{Held, Lock};
use crate::system::ranks::Rank;
use crate::system::threads;
use scratch::Scratch;

/// The most that is fetched at a time.
const FETCH_BYTES: usize = 1 << 20;
/// What a touch takes besides its fetch, in quarters of a microsecond: the kernel's word to the thread that serves it, and back.
const FAULT_QUARTERS: u32 = 20;
/// Shares that wait to go back before they are sent: few, because what they are of may be long, and its store is small.
const RETURNS_AT_ONCE: usize = 16;

/// Bytes that are absent, for a look without the lock: nearly always, there are none.
static ABSENT_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Whether a page of a block has ever been registered: before that, nothing has to be looked up.
static ANY_BLOCKS: AtomicBool = AtomicBool::new(false);
/// Whether the program has more than one thread.
static THREADS: AtomicBool = AtomicBool::new(false);

/// Forks under way: until they are done nothing becomes absent.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// Whether any memory of the process is absent, or registered.
#[inline]
pub fn any_absent() -> bool {
    any_bytes_absent() || ANY_BLOCKS.load(Ordering::Relaxed)
}

/// Whether any bytes are absent.
#[inline]
pub fn any_bytes_absent() -> bool {
    ABSENT_BYTES.load(Ordering::Acquire) != 0
}

/// From here on: another thread may write beside what this one reads into.
pub fn has_threads() {
    THREADS.store(true, Ordering::Relaxed);
}

pub struct Memory {
    /// /dev/userfaultfd, open.
    device: OwnedFd,
    tend: fn(),
    state: Lock<State>,
    pub holders: Holders,
    times: Times,
    pub scratch: Scratch,
    pub returns: Arc<Returns>,
    recent: Lock<Weak<Hold>>,
}

#[derive(Default)]
struct State {
    absent: Absent,
    /// By page of a block that is missing: what it holds beside what it stands for.
    saved: BTreeMap<usize, Box<[u8; PAGE_BYTES]>>,
    touches: Touches,
    /// Of this process: made when memory first becomes absent, with the threads that serve its faults.
    faults: Option<Arc<Userfaultfd>>,
    /// There will never be one.
    refused: bool,
}

/// Where the program touches absent memory.
#[derive(Default)]
struct Touches {
    /// Behind what was fetched last.
    next: usize,
    window: usize,
}

impl Touches {
    /// How much is fetched for a touch of a page: who looks at a header rarely looks at what follows it, and who goes on
    /// looks at all.
    fn window(&mut self, page: usize) -> usize {
        const MOST_BYTES: usize = 256 << 10;
        self.window = if page == self.next { (self.window * 4).min(MOST_BYTES) } else { PAGE_BYTES };
        self.window
    }
}

/// Memory of ours that holds bytes of the program's for one call.
pub type Copies = Vec<Vec<u8>>;

/// What others have these threads do.
pub struct Calls {
    /// In the thread that makes connections: sends back shares.
    pub tick: fn() -> bool,
    /// Several times a second, in a thread that serves faults.
    pub tend: fn(),
}

/// A thread that waits for agents and stores, so that none of the program's has to.
fn start(name: &'static str, work: Box<dyn FnOnce() + Send>) -> bool {
    threads::start(name, work)
}

/// The whole pages of a range.
pub fn whole_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.checked_next_multiple_of(PAGE_BYTES).unwrap_or(range.end / PAGE_BYTES * PAGE_BYTES);
    start..(range.end / PAGE_BYTES * PAGE_BYTES).max(start)
}

/// All pages that a range meets.
pub fn pages_around(range: &Range<usize>) -> Range<usize> {
    let end = range.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX / PAGE_BYTES * PAGE_BYTES);
    range.start / PAGE_BYTES * PAGE_BYTES..end
}

impl Memory {
    pub fn new(device: OwnedFd, store: PathBuf, calls: Calls) -> Self {
        Self {
            device,
            tend: calls.tend,
            state: Lock::new(Rank::Absent, State::default()),
            holders: Holders::with_threads(store, counts::begin, Threads { start, tick: calls.tick }),
            times: Times::default(),
            scratch: Scratch::default(),
            returns: Arc::default(),
            recent: Lock::new(Rank::Recent, Weak::new()),
        }
    }

    fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }

    /// A share of a payload that this process keeps from here on. `from_writer`: see [`Hold::from_writer`].
    pub fn hold(&self, reference: &Reference, share: Weight, from_writer: bool) -> Arc<Hold> {
        let new = if from_writer { Hold::from_writer } else { Hold::new };
        // Of the whole payload up to there: what was taken before came in the same reference.
        let of_bytes = reference.offset + reference.length;
        let hold = Arc::new(new(reference.payload, share, of_bytes, &self.returns));
        if let Some(mut recent) = self.recent.try_lock() {
            *recent = Arc::downgrade(&hold);
        }
        hold
    }

    /// The last share that this process got, if it is of that payload and not given up: a body that is read in parts
    /// takes one.
    pub fn recent_hold(&self, payload: &PayloadId) -> Option<Arc<Hold>> {
        // Not waited for: in the child of a fork, whoever has it may be gone.
        let hold = self.recent.try_lock()?.upgrade()?;
        (hold.payload() == *payload).then_some(hold)
    }

    /// What of a range may be absent. Of a block also parts of pages, where no other thread can write beside them while
    /// they become so.
    pub fn can_be_absent(&self, range: &Range<usize>) -> Range<usize> {
        if blocks::contains(range.start) && !THREADS.load(Ordering::Relaxed) {
            range.clone()
        } else {
            whole_pages(range)
        }
    }

    /// Makes memory stand for a payload's bytes from `offset` on, in place of what it holds: all or a part of what
    /// [`Self::can_be_absent`]. False: this memory cannot be absent, and what it held may be lost.
    pub fn make_absent(&'static self, addresses: Range<usize>, hold: &Arc<Hold>, offset: u64) -> bool {
        let bytes = addresses.len();
        let made = self.stand_for(addresses, hold, offset);
        if made {
            count(Counted::ReceivedAbsent, bytes);
        }
        made
    }

    /// The same, for whatever reason.
    fn stand_for(&'static self, addresses: Range<usize>, hold: &Arc<Hold>, offset: u64) -> bool {
        let mut state = self.lock();
        if FORKING.load(Ordering::Acquire) > 0 {
            return false;
        }
        let Some(faults) = state.faults(self) else { return false };
        // Entered first: whoever touches it from the moment on that it is absent gets these bytes.
        state.absent.insert(Piece { addresses: addresses.clone(), hold: Arc::clone(hold), offset });
        let made = if blocks::contains(addresses.start) {
            ANY_BLOCKS.store(true, Ordering::Relaxed);
            state.empty_block(&faults, &addresses)
        } else {
            elsewhere::discard(&faults, &addresses)
        };
        if !made {
            state.absent.remove(&addresses);
        }
        state.publish();
        made
    }

    /// Whether any of a range is absent, or may not be touched without waiting.
    pub fn meets(&self, range: &Range<usize>) -> bool {
        any_absent()
            && !range.is_empty()
            && (blocks::contains(range.start) && blocks::any(&pages_around(range), blocks::PageState::Missing)
                || any_bytes_absent() && self.lock().absent.meets(range))
    }

    /// What of a range is absent, in order, as the kernel sees it now.
    pub fn absent_within(&self, range: &Range<usize>) -> Pieces {
        if !any_bytes_absent() {
            return Pieces::new();
        }
        let state = self.lock();
        let Some(faults) = &state.faults else { return Pieces::new() };
        let mut pieces = state.absent.within(range);
        pieces.retain(|piece| blocks::contains(piece.addresses.start) || elsewhere::is_absent(faults, piece));
        pieces
    }

    /// A range without what of it is in pages that stand for something else beside it: that comes as a copy, because a touch
    /// would have the page fetched. In order.
    pub fn readable(&self, range: &Range<usize>, copies: &mut Copies, mut each: impl FnMut(Range<usize>)) {
        let mut at = range.start;
        if ANY_BLOCKS.load(Ordering::Relaxed)
            && blocks::contains(range.start)
            && blocks::any(&pages_around(range), blocks::PageState::Missing)
        {
            // Not in the loop's head, where the lock would be held while a page is touched whose fault needs it.
            let saved = self.lock().saved_within(range);
            for (place, bytes) in saved {
                each(at..place.start);
                at = place.end;
                let start = bytes.as_ptr() as usize;
                each(start..start + bytes.len());
                copies.push(bytes);
            }
        }
        each(at..range.end);
    }

    /// The program has no more use for what a range holds.
    pub fn forget(&self, range: &Range<usize>) {
        if !any_bytes_absent() {
            return;
        }
        let mut state = self.lock();
        let removed =
            if blocks::contains(range.start) { state.forget_block(range) } else { state.forget_elsewhere(range) };
        state.publish();
        drop(state);
        drop(removed);
        self.return_shares();
    }

    /// The kernel is about to write somewhere in a range: what was absent need not be fetched first.
    pub fn overwriting(&self, range: &Range<usize>) {
        if !self.meets(range) {
            return;
        }
        if !blocks::contains(range.start) {
            return self.forget(range);
        }
        let mut state = self.lock();
        let removed = state.make_ordinary(range);
        state.publish();
        drop(state);
        drop(removed);
        self.return_shares();
    }

    /// How many bytes from an address on are in a page that stands for something before it; they can be written
    /// ([`Self::write`]), but not touched.
    pub fn behind_absent(&self, address: usize) -> usize {
        let inside = address % PAGE_BYTES;
        let is_shared = inside > 0
            && ANY_BLOCKS.load(Ordering::Relaxed)
            && blocks::contains(address)
            && blocks::state(address) == blocks::PageState::Missing;
        if is_shared { PAGE_BYTES - inside } else { 0 }
    }

    /// Puts bytes into the program's memory, in place of what it stands for.
    ///
    /// # Safety
    /// As for a write of these bytes there, but that memory may be absent.
    pub unsafe fn write(&self, at: usize, bytes: &[u8]) {
        let range = at..at + bytes.len();
        if blocks::contains(at) && blocks::any(&pages_around(&range), blocks::PageState::Missing) {
            let mut state = self.lock();
            let block::Placed { removed, rest } = state.place(at, bytes);
            state.publish();
            drop(state);
            drop(removed);
            for part in rest {
                let from = bytes[part.start - at..part.end - at].as_ptr();
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(from, part.start as *mut u8, part.len()) };
            }
            self.return_shares();
        } else {
            if !blocks::contains(at) {
                self.forget(&range);
            }
            // SAFETY: the caller's promise; a bad address faults as memcpy would where the kernel would say EFAULT.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        }
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
        self.fetch_all(ranges, true)
    }

    /// Has the absent bytes of a range in place, or the first of them, where the call has taken long and may end: whether all are.
    ///
    /// # Errors
    /// As [`Self::fetch_range`].
    pub fn fetch_within(&self, range: &Range<usize>, call: &Call<'_>) -> Result<bool, FetchError> {
        while let Some(mut piece) = self.some_within(std::slice::from_ref(range)).into_iter().next() {
            let (payload, length) = (piece.hold.payload(), piece.addresses.len());
            let reference = Reference { payload, weight: Weight::WHOLE, offset: piece.offset, length: length as u64 };
            let mut bytes = self.scratch.buffer(length);
            let is_block = blocks::contains(piece.addresses.start);
            let fetched = self.fetch_some(&reference, &mut bytes, call).and_then(|(got, waited)| match is_block {
                true => Ok((got, waited)),
                false => Ok((self.fetch_page_end(&reference, got, &mut bytes)?, waited)),
            });
            let (got, waited) = match fetched {
                Ok(fetched) => fetched,
                // Gone meanwhile: then nobody needs it.
                Err(_) if !self.lock().absent.meets(&piece.addresses) => continue,
                Err(error) => return Err(error),
            };
            if got > 0 {
                piece.addresses.end = piece.addresses.start + got;
                count(Counted::Fetched, got);
                piece.hold.touch(piece.offset, got as u64);
                piece.hold.waited(waited);
                self.fill(std::slice::from_ref(&piece), &bytes[..got]);
            }
            drop(piece);
            self.return_shares();
            if got < length || (self.meets(range) && call.ends()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Of the first bytes of a reference, `got` are there: fetches up to the end of a page, and says how many are there of whole ones.
    /// Elsewhere than in blocks pages come as a whole. Where there is none yet that takes as long as it takes.
    fn fetch_page_end(&self, reference: &Reference, got: usize, bytes: &mut [u8]) -> Result<usize, FetchError> {
        let (whole, end) = (got / PAGE_BYTES * PAGE_BYTES, got.next_multiple_of(PAGE_BYTES).min(bytes.len()));
        if end == got {
            return Ok(got);
        }
        let rest = Reference { offset: reference.offset + got as u64, length: (end - got) as u64, ..*reference };
        let may_end = || whole > 0;
        match self.fetch_some(&rest, &mut bytes[got..end], &Call::new(&may_end)) {
            Ok((more, _)) if got + more == end => Ok(end),
            Err(error) if whole == 0 => Err(error),
            // Those are asked for again.
            _ => Ok(whole),
        }
    }

    /// `needed`: by somebody who looks at it.
    fn fetch_all(&self, ranges: &[Range<usize>], needed: bool) -> Result<(), FetchError> {
        if !any_bytes_absent() {
            return Ok(());
        }
        loop {
            let pieces = self.some_within(ranges);
            if pieces.is_empty() {
                return Ok(());
            }
            count(Counted::Fetched, pieces.iter().map(|piece| piece.addresses.len()).sum());
            if needed {
                pieces.iter().for_each(|piece| piece.hold.touch(piece.offset, piece.addresses.len() as u64));
            }
            let waited = self.fetch_pieces(&pieces, &|| ())?;
            if needed {
                pieces.iter().for_each(|piece| piece.hold.waited(waited));
            }
            drop(pieces);
            self.return_shares();
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
    fn some_within(&self, ranges: &[Range<usize>]) -> Pieces {
        let state = self.lock();
        let mut room = FETCH_BYTES;
        let mut some = Pieces::new();
        for range in ranges {
            // Pages come as a whole. Ranges that follow each other may share one.
            let Range { start: first, end } = pages_around(range);
            let before = some.last().map(|piece| &piece.addresses).filter(|before| before.contains(&first));
            let around = before.map_or(first, |before| before.end)..end;
            for mut piece in state.absent.within(&around) {
                let Range { start, end } = piece.addresses;
                let mut now = end.min(start + room);
                if now < end && !blocks::contains(start) {
                    now = now / PAGE_BYTES * PAGE_BYTES;
                }
                if now <= start {
                    return some;
                }
                piece.addresses.end = now;
                room -= now - start;
                some.push(piece);
                if now < end {
                    return some;
                }
            }
        }
        some
    }

    /// Fetches the bytes of a reference into memory of ours: how long that took ([`Times`]).
    ///
    /// # Errors
    /// They cannot be had.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<u32, FetchError> {
        let began = Instant::now();
        self.holders.fetch(reference, into)?;
        Ok(self.times.took(&reference.payload.holder, began.elapsed(), reference.length))
    }

    /// The same of the first bytes of a reference, fewer than all only where the call may end ([`Holders::fetch_some`]): how many, and
    /// how long that took.
    ///
    /// # Errors
    /// As above.
    pub fn fetch_some(
        &self,
        reference: &Reference,
        into: &mut [u8],
        call: &Call<'_>,
    ) -> Result<(usize, u32), FetchError> {
        let began = Instant::now();
        let got = self.holders.fetch_some(reference, into, call)?;
        if got == 0 {
            return Ok((0, 0));
        }
        Ok((got, self.times.took(&reference.payload.holder, began.elapsed(), got as u64)))
    }

    /// Fetches what pieces stand for, and fills their addresses, where they still stand for it: how long that takes for each of
    /// them ([`Times`]). `tell` hears that it takes long.
    fn fetch_pieces(&self, pieces: &[Piece], tell: &dyn Fn()) -> Result<u32, FetchError> {
        let mut bytes = self.scratch.buffer(FETCH_BYTES);
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
        let began = Instant::now();
        let fetched = self.holders.fetch_all(&mut wanted, tell);
        let each = began.elapsed() / u32::try_from(pieces.len()).unwrap_or(1).max(1);
        let needed = match &fetched {
            Ok(()) => self.fill(pieces, &bytes),
            // Gone meanwhile: then nobody needs it.
            Err(_) => pieces.iter().any(|piece| self.lock().absent.meets(&piece.addresses)),
        };
        match (fetched, pieces.first()) {
            (Ok(()), Some(first)) => {
                Ok(self.times.took(&first.hold.payload().holder, each, (total / pieces.len()) as u64))
            }
            (Err(error), _) if needed => Err(error),
            _ => Ok(0),
        }
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
                    let bytes = &bytes[from + at..from + at + now.addresses.len()];
                    if blocks::contains(now.addresses.start) {
                        let placed = state.place(now.addresses.start, bytes);
                        debug_assert!(placed.rest.is_empty(), "pages that stand for something are missing");
                    } else {
                        // Where it fails, the memory has been unmapped, and the event about it is on its way.
                        let _ = filling::fill(&faults, now.addresses.start, bytes);
                        state.absent.remove(&now.addresses);
                    }
                    needed = true;
                }
            }
            from += piece.addresses.len();
        }
        state.publish();
        needed
    }

    /// Whose bytes the page of an address stands for: the first of them.
    pub fn holder_at(&self, address: usize) -> Option<Holder> {
        let page = address / PAGE_BYTES * PAGE_BYTES;
        Some(self.lock().absent.within(&(page..page + PAGE_BYTES)).first()?.hold.payload().holder)
    }

    /// Serves a fault: the page, and where touches go on from page to page, ever more of what is absent behind it. `tell` hears
    /// that it takes long.
    ///
    /// # Errors
    /// The bytes cannot be had.
    pub fn serve_fault(&self, faults: &Userfaultfd, address: usize, tell: &dyn Fn()) -> Result<(), FetchError> {
        let page = address / PAGE_BYTES * PAGE_BYTES;
        let whole = page..page + PAGE_BYTES;
        let window = self.lock().touches.window(page);
        loop {
            let piece = {
                let mut state = self.lock();
                let Some(piece) = state.absent.within(&whole).into_iter().next() else {
                    if blocks::contains(page) {
                        state.fill_meaningless(faults, page);
                    } else {
                        // Registered memory that stands for nothing, or that was filled a moment ago.
                        let _ = filling::fill_zeros(faults, whole.clone());
                    }
                    // Whoever waits looks again, whatever has become of the page.
                    let _ = faults.wake(whole);
                    return Ok(());
                };
                let behind = state.absent.around(piece.addresses.start).map_or(page, |all| all.addresses.end);
                let end = behind.min(page + window);
                state.touches.next = end.next_multiple_of(PAGE_BYTES);
                Piece { addresses: piece.addresses.start..end, ..piece }
            };
            count(Counted::Faults, 1);
            count(Counted::FetchedByFault, piece.addresses.len());
            piece.hold.touch(piece.offset, piece.addresses.len() as u64);
            let pieces = [piece];
            let served = self.fetch_pieces(&pieces, tell);
            let served = served.map(|waited| pieces[0].hold.waited(waited + FAULT_QUARTERS));
            drop(pieces);
            // Once the page is there, whoever waited goes on, and may wait for us to read what it does to its memory.
            if served.is_err() || !blocks::contains(page) || blocks::state(page) != blocks::PageState::Missing {
                let _ = faults.wake(whole);
                self.return_shares();
                return served;
            }
        }
    }

    /// The kernel says that memory was unmapped. Only where it is not there again, absent, by now.
    pub fn unmapped(&self, faults: &Userfaultfd, range: &Range<usize>) {
        let mut state = self.lock();
        let gone: Vec<Range<usize>> = (state.absent.within(range).into_iter())
            .filter(|piece| !elsewhere::is_absent(faults, piece))
            .map(|piece| piece.addresses)
            .collect();
        let dropped: Pieces = gone.iter().flat_map(|addresses| state.absent.remove(addresses)).collect();
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

    /// Before a fork, and before locks are held for it: all is fetched, because a child would read zeros, and from here on
    /// nothing else becomes absent. What cannot be had stays absent here.
    pub fn fetch_for_fork(&self) {
        FORKING.fetch_add(1, Ordering::AcqRel);
        if self.fetch_range(&(0..usize::MAX - PAGE_BYTES)).is_err() {
            let left: Vec<Range<usize>> = self.lock().absent.all().map(|piece| piece.addresses.clone()).collect();
            left.iter().for_each(|addresses| drop(self.fetch_range(addresses)));
        }
    }

    /// Then, until the value is dropped nothing changes.
    pub fn hold_still(&'static self) -> Still {
        // In this order: whoever makes memory absent may have threads started.
        let mut state = self.lock();
        state.fill_saved();
        let holders = self.holders.hold_still();
        Still { state, returns: self.returns.hold_still(), holders }
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
            let _ = self.fetch_all(std::slice::from_ref(&addresses), false);
        }
    }

    /// Has shares sent back that nobody has a use for, if there are many. Waits for nothing: it is a part of free(3).
    pub fn return_shares(&self) {
        if self.returns.waiting() >= RETURNS_AT_ONCE {
            self.holders.wake();
        }
    }
}

/// [`Memory::hold_still`].
pub struct Still {
    state: Held<'static, State>,
    returns: hold::Still<'static>,
    holders: fetch::Still<'static>,
}

impl Still {
    /// In the child, which has no absent memory, no threads that serve faults, and none of the parent's connections.
    /// What could not be fetched before nobody reads as zeros.
    pub fn forget(&mut self) {
        for piece in self.state.absent.all() {
            let pages = pages_around(&piece.addresses);
            // SAFETY: memory that the program has read into, and whose bytes are lost.
            let _ = unsafe { mprotect(pages.start as *mut _, pages.len(), MprotectFlags::empty()) };
        }
        // The parent's, with their shares.
        let parents = std::mem::ManuallyDrop::new(std::mem::take(&mut *self.state));
        if let Some(faults) = &parents.faults {
            // SAFETY: whoever else has it is a thread of the parent's.
            unsafe { faults.close_parents() };
        }
        self.returns.forget();
        self.holders.forget();
        ABSENT_BYTES.store(0, Ordering::Release);
        ANY_BLOCKS.store(false, Ordering::Relaxed);
        THREADS.store(false, Ordering::Relaxed);
        blocks::after_fork();
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
            // SAFETY: `Memory` discards only what a program has given a read to overwrite, and what it has saved.
            let made = unsafe { Userfaultfd::new(memory.device.as_fd()) };
            let starts = |faults: &Arc<_>| memory.holders.start() && faults::start(memory, Arc::clone(faults));
            self.faults = made.ok().map(Arc::new).filter(starts);
            self.refused = self.faults.is_none();
        }
        self.faults.clone()
    }
}
