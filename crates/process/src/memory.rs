//! Absent memory of the process. When a program reads a reference from a connection, its memory becomes absent: the
//! memory *stands for* bytes of a payload (a body in a store), and does not contain them. The payload's *holder* has
//! them: a store on this or another machine. With the reference came a *share* of the payload. The share keeps the
//! payload in the store until it is sent back, or until the payload's *lease*, a limited time, ends. The library
//! fetches the bytes when a thread touches the memory, or when a call needs them. Bytes that are in memory are called
//! *real*. A *piece* is a range of addresses that stand for contiguous bytes.
//!
//! `State::absent` and the registration of memory with userfaultfd change together under one lock. That lock is never
//! held while bytes are fetched, or while memory is touched that may be absent. Bytes are fetched into memory of the
//! library's own. They are put into place afterwards, if the program's memory still stands for them.
//!
//! There are two kinds of absent memory. The library allocates large blocks of malloc itself ([`blocks`]), so it knows
//! what the kernel has for each of their pages ([`block`]). A page of a block is *missing* if the kernel has no memory
//! for it: a thread that touches it waits until the library fills it. In all other memory, only whole pages can be
//! absent, and they are registered only as long as they stand for something ([`elsewhere`]).

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

/// Most bytes that one fetch asks for.
const FETCH_BYTES: usize = 1 << 20;
/// Cost of a touch of absent memory besides the fetch, in quarters of a microsecond. The kernel tells the thread that
/// serves faults, and later wakes the thread that touched the memory.
const FAULT_QUARTERS: u32 = 20;
/// Number of unused shares of payloads at which the library begins to send them back to the holders. It is small
/// because each share keeps a payload in a store. The payload may be long, and the store small.
const RETURNS_AT_ONCE: usize = 16;

/// Number of absent bytes in the process, as `State::absent` has it, for readers without the lock. It is nearly always
/// 0.
static ABSENT_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Whether a page of a block has ever been registered with userfaultfd. Before that, no page state has to be looked up.
static ANY_BLOCKS: AtomicBool = AtomicBool::new(false);
/// Whether the program has ever started a second thread.
static THREADS: AtomicBool = AtomicBool::new(false);

/// Number of forks under way. While it is not 0, no memory becomes absent.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// Whether any memory of the process is absent, or may be registered with userfaultfd.
#[inline]
pub fn any_absent() -> bool {
    any_bytes_absent() || ANY_BLOCKS.load(Ordering::Relaxed)
}

/// Whether any bytes are absent.
#[inline]
pub fn any_bytes_absent() -> bool {
    ABSENT_BYTES.load(Ordering::Acquire) != 0
}

/// Notes that the program has several threads. While one reads into memory, another may write beside it in the same
/// page.
pub fn has_threads() {
    THREADS.store(true, Ordering::Relaxed);
}

pub struct Memory {
    /// Open descriptor of /dev/userfaultfd.
    device: OwnedFd,
    tend: fn(),
    state: Lock<State>,
    pub holders: Holders,
    times: Times,
    pub scratch: Scratch,
    pub returns: Arc<Returns>,
    /// Share that this process got last.
    recent: Lock<Weak<Hold>>,
}

#[derive(Default)]
struct State {
    absent: Absent,
    /// By address of a missing page in a block: a copy of the page. The page's real bytes are right in the copy. The
    /// copy's other bytes mean nothing.
    saved: BTreeMap<usize, Box<[u8; PAGE_BYTES]>>,
    touches: Touches,
    /// This process's userfaultfd. It is made when memory first becomes absent, with the threads that serve its faults.
    faults: Option<Arc<Userfaultfd>>,
    /// Whether making `faults` has failed; it is not tried again.
    refused: bool,
}

/// Where the program last touched absent memory. The next fetch's length depends on it.
#[derive(Default)]
struct Touches {
    /// Address behind the last page that was fetched for a touch.
    next: usize,
    /// Number of bytes that were to be fetched for the last touch.
    window: usize,
}

impl Touches {
    /// Number of bytes to fetch for a touch of a page. A program that looks at a header rarely looks at the bytes
    /// behind it. A program that continues with the next page usually looks at everything.
    fn window(&mut self, page: usize) -> usize {
        const MOST_BYTES: usize = 256 << 10;
        self.window = if page == self.next { (self.window * 4).min(MOST_BYTES) } else { PAGE_BYTES };
        self.window
    }
}

/// Copies of the program's bytes in the library's own memory, for one call.
pub type Copies = Vec<Vec<u8>>;

/// Functions of upper layers of the library (lib.rs). Threads of this layer call them.
pub struct Calls {
    /// Sends back unused shares. The thread that makes connections to holders calls it. Returns true if it is to be
    /// called again soon.
    pub tick: fn() -> bool,
    /// Does regular work of upper layers. One of the threads that serve faults calls it several times a second.
    pub tend: fn(),
}

/// Starts a thread of the library that waits for agents and stores, so that no thread of the program has to.
fn start(name: &'static str, work: Box<dyn FnOnce() + Send>) -> bool {
    threads::start(name, work)
}

/// The pages that lie wholly in a range.
pub fn whole_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.checked_next_multiple_of(PAGE_BYTES).unwrap_or(range.end / PAGE_BYTES * PAGE_BYTES);
    start..(range.end / PAGE_BYTES * PAGE_BYTES).max(start)
}

/// All pages that overlap a range.
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

    /// Keeps a share of a payload for this process. `from_writer`: the share came straight from the payload's writer,
    /// so the share records which bytes are needed.
    pub fn hold(&self, reference: &Reference, share: Weight, from_writer: bool) -> Arc<Hold> {
        let new = if from_writer { Hold::from_writer } else { Hold::new };
        // Number of the payload's bytes up to the reference's end. Bytes before `offset` count, too: the program took
        // them earlier, from the same reference.
        let of_bytes = reference.offset + reference.length;
        let hold = Arc::new(new(reference.payload, share, of_bytes, &self.returns));
        if let Some(mut recent) = self.recent.try_lock() {
            *recent = Arc::downgrade(&hold);
        }
        hold
    }

    /// The share that this process got last, if it is of `payload` and not given up yet. So a body that is read in
    /// parts takes only one share.
    pub fn recent_hold(&self, payload: &PayloadId) -> Option<Arc<Hold>> {
        // Does not wait for the lock: in the child of a fork, the thread that holds the lock may not exist.
        let hold = self.recent.try_lock()?.upgrade()?;
        (hold.payload() == *payload).then_some(hold)
    }

    /// The part of a range that may be made absent. In a block this includes parts of pages, if no other thread can
    /// write beside them while they become absent.
    pub fn can_be_absent(&self, range: &Range<usize>) -> Range<usize> {
        if blocks::contains(range.start) && !THREADS.load(Ordering::Relaxed) {
            range.clone()
        } else {
            whole_pages(range)
        }
    }

    /// Makes memory stand for a payload's bytes from `offset` on, in place of its contents. `addresses` lies in what
    /// [`Self::can_be_absent`] returned. Returns false if this memory cannot become absent now; its contents may be
    /// lost then.
    pub fn make_absent(&'static self, addresses: Range<usize>, hold: &Arc<Hold>, offset: u64) -> bool {
        let bytes = addresses.len();
        let made = self.stand_for(addresses, hold, offset);
        if made {
            count(Counted::ReceivedAbsent, bytes);
        }
        made
    }

    /// Does the work of [`Self::make_absent`], without counting received bytes.
    fn stand_for(&'static self, addresses: Range<usize>, hold: &Arc<Hold>, offset: u64) -> bool {
        let mut state = self.lock();
        if FORKING.load(Ordering::Acquire) > 0 {
            return false;
        }
        let Some(faults) = state.faults(self) else { return false };
        // The piece is entered before its memory becomes absent: a thread that touches the memory at once then gets
        // these bytes.
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

    /// Whether a byte of a range is absent, or lies in a missing page of a block: a thread that touches the page waits.
    pub fn meets(&self, range: &Range<usize>) -> bool {
        any_absent()
            && !range.is_empty()
            && (blocks::contains(range.start) && blocks::any(&pages_around(range), blocks::PageState::Missing)
                || any_bytes_absent() && self.lock().absent.meets(range))
    }

    /// The absent pieces of a range, in order. Outside blocks, a piece that the kernel no longer has absent is left
    /// out.
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

    /// Calls `each` with memory that has the bytes of a range, in order. The caller knows that no byte of the range is
    /// absent. If a page of the range is missing, because it stands for other bytes, `each` gets a copy of its real
    /// bytes: a touch would cause a fetch of the page.
    pub fn readable(&self, range: &Range<usize>, copies: &mut Copies, mut each: impl FnMut(Range<usize>)) {
        let mut at = range.start;
        if ANY_BLOCKS.load(Ordering::Relaxed)
            && blocks::contains(range.start)
            && blocks::any(&pages_around(range), blocks::PageState::Missing)
        {
            // The lock is not taken in the head of the loop, where it would be held during the loop. In the loop,
            // `each` may touch a missing page, and the thread that serves the fault needs the lock.
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

    /// Forgets what a range stands for: the program has no more use for its contents.
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

    /// Prepares a range that the kernel is about to write into: absent bytes there need not be fetched first.
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

    /// Number of bytes from an address to the end of its page, if the page is missing and does not begin at the
    /// address; else 0. [`Self::write`] can write these bytes, but a touch would cause a fetch of the page.
    pub fn behind_absent(&self, address: usize) -> usize {
        let inside = address % PAGE_BYTES;
        let is_shared = inside > 0
            && ANY_BLOCKS.load(Ordering::Relaxed)
            && blocks::contains(address)
            && blocks::state(address) == blocks::PageState::Missing;
        if is_shared { PAGE_BYTES - inside } else { 0 }
    }

    /// Writes bytes to the program's memory, in place of what that memory stands for.
    ///
    /// # Safety
    /// As for a write of these bytes to `at`, except that the memory may be absent.
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
                // SAFETY: the caller promises that these bytes may be written there.
                unsafe { std::ptr::copy_nonoverlapping(from, part.start as *mut u8, part.len()) };
            }
            self.return_shares();
        } else {
            if !blocks::contains(at) {
                self.forget(&range);
            }
            // SAFETY: the caller promises that these bytes may be written there. A bad address causes a fault, as in
            // memcpy, while a system call would return EFAULT.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        }
    }

    /// Fetches all absent bytes of a range into place.
    ///
    /// # Errors
    /// Returns an error if they cannot be fetched.
    pub fn fetch_range(&self, range: &Range<usize>) -> Result<(), FetchError> {
        self.fetch_ranges(std::slice::from_ref(range))
    }

    /// Fetches all absent bytes of several ranges into place, and asks for them together.
    ///
    /// # Errors
    /// As [`Self::fetch_range`].
    pub fn fetch_ranges(&self, ranges: &[Range<usize>]) -> Result<(), FetchError> {
        self.fetch_all(ranges, true)
    }

    /// Fetches the absent bytes of a range into place. If the program's call (`call`) has taken long and may end early,
    /// fetches only the first of them. Returns whether all are in place.
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
                // The memory no longer stands for these bytes, so nobody needs them.
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

    /// Continues a fetch outside blocks, where only whole pages can be put into place. `got`: number of bytes that the
    /// fetch has got, from the reference's beginning. The fetch goes on to the end of the page in which these bytes
    /// end. Returns the number of bytes in complete pages. As long as no page is complete, the fetch must not end
    /// early.
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
            // The next fetch asks for the bytes of the incomplete page once more.
            _ => Ok(whole),
        }
    }

    /// Fetches all absent bytes of some ranges into place. `needed`: the program needs them, so they are recorded as
    /// touched ([`Hold::touch`]).
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

    /// Fetches a range into place and unregisters it. The range then has no more mappings than the program has made.
    /// (The kernel splits a mapping if only a part of it is registered.)
    ///
    /// # Errors
    /// Returns an error if the bytes cannot be fetched.
    pub fn make_ordinary(&self, range: &Range<usize>) -> Result<(), FetchError> {
        let Some(faults) = self.lock().faults.clone() else { return Ok(()) };
        self.fetch_range(range)?;
        let _ = faults.unregister(whole_pages(range));
        Ok(())
    }

    /// The first absent pieces of some ranges, at most [`FETCH_BYTES`] bytes in all.
    fn some_within(&self, ranges: &[Range<usize>]) -> Pieces {
        let state = self.lock();
        let mut room = FETCH_BYTES;
        let mut some = Pieces::new();
        for range in ranges {
            // Pages are fetched as a whole. If this range begins in a page of the last piece, only bytes behind that
            // piece are added.
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

    /// Fetches the bytes of a reference into memory of the library's own. Returns the mean time of fetches from the
    /// holder, including this one, in quarters of a microsecond ([`Times`]).
    ///
    /// # Errors
    /// Returns an error if they cannot be fetched.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<u32, FetchError> {
        let began = Instant::now();
        self.holders.fetch(reference, into)?;
        Ok(self.times.took(&reference.payload.holder, began.elapsed(), reference.length))
    }

    /// Fetches the first bytes of a reference: all of them, unless `call` has taken long and may end early
    /// ([`Holders::fetch_some`]). Returns how many, and the mean time as [`Self::fetch`] does.
    ///
    /// # Errors
    /// Returns an error if they cannot be fetched.
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

    /// Fetches the bytes that pieces stand for, and puts them into the memory that still stands for them. Returns the
    /// mean time of a fetch of one piece from the first piece's holder, in quarters of a microsecond ([`Times`]).
    /// Returns 0 if the bytes cannot be fetched, but nobody needs them any more. `tell` is called when the fetch takes
    /// long.
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
            // If no memory stands for these bytes any more, nobody needs them.
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

    /// Puts the fetched bytes of pieces into the memory that still stands for them. Returns whether any memory did.
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
                        debug_assert!(placed.rest.is_empty(), "absent pages that should be registered are not");
                    } else {
                        // If this fails, the memory has been unmapped, and the kernel's event about that is on its way.
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

    /// Returns the holder of the first absent bytes in the page of `address`, or `None` if no byte of the page is
    /// absent.
    pub fn holder_at(&self, address: usize) -> Option<Holder> {
        let page = address / PAGE_BYTES * PAGE_BYTES;
        Some(self.lock().absent.within(&(page..page + PAGE_BYTES)).first()?.hold.payload().holder)
    }

    /// Serves a fault: fetches the page that was touched. If touches go on from one page to the next, also fetches
    /// absent bytes behind the page, more each time. `tell` is called when the fetch takes long.
    ///
    /// # Errors
    /// Returns an error if the bytes cannot be fetched.
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
                        // Registered memory that stands for nothing, or a page that was filled a moment ago.
                        let _ = filling::fill_zeros(faults, whole.clone());
                    }
                    // The waiting thread is woken in any case: it touches the page once more, whatever state the page
                    // is in now.
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
            // Once the page is filled, the thread that touched it continues. It may then unmap or move memory, and wait
            // until this thread reads the kernel's event about that. So this function ends here.
            if served.is_err() || !blocks::contains(page) || blocks::state(page) != blocks::PageState::Missing {
                let _ = faults.wake(whole);
                self.return_shares();
                return served;
            }
        }
    }

    /// Handles the kernel's event that memory was unmapped. Pieces in the range that have become absent again since
    /// then are kept.
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

    /// Handles the kernel's event that memory was moved (mremap(2)).
    pub fn moved(&self, from: usize, to: usize, bytes: usize) {
        let mut state = self.lock();
        state.absent.moved(from, to, bytes);
        state.publish();
    }

    /// Prepares a fork, before locks are held for it: fetches everything, because a child would read zeros. From now on
    /// nothing becomes absent, until [`Still`] is dropped. Bytes that cannot be fetched stay absent in this process.
    pub fn fetch_for_fork(&self) {
        FORKING.fetch_add(1, Ordering::AcqRel);
        if self.fetch_range(&(0..usize::MAX - PAGE_BYTES)).is_err() {
            let left: Vec<Range<usize>> = self.lock().absent.all().map(|piece| piece.addresses.clone()).collect();
            left.iter().for_each(|addresses| drop(self.fetch_range(addresses)));
        }
    }

    /// Takes this layer's locks for a fork: nothing changes until the value is dropped.
    pub fn hold_still(&'static self) -> Still {
        // The state is locked first: a thread that makes memory absent holds that lock, and may then have `holders`
        // start threads.
        let mut state = self.lock();
        state.fill_saved();
        let holders = self.holders.hold_still();
        Still { state, returns: self.returns.hold_still(), holders }
    }

    /// Fetches bytes that have been absent for long, because their holder keeps them only for a limited time. Later a
    /// touch could not get them any more, and would end the program.
    pub fn fetch_old(&self) {
        /// Age in milliseconds from which bytes are old: a quarter of the time for which stores keep payloads by
        /// default.
        const OLD_MS: u64 = 30_000;
        /// Time in milliseconds for which fetches of old bytes are tried.
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
            // If the bytes cannot be fetched now, a later touch may still get them.
            let _ = self.fetch_all(std::slice::from_ref(&addresses), false);
        }
    }

    /// Starts the return of unused shares, if there are many. Does not wait, because this is a part of free(3).
    pub fn return_shares(&self) {
        if self.returns.waiting() >= RETURNS_AT_ONCE {
            self.holders.wake();
        }
    }
}

/// The locks that [`Memory::hold_still`] takes.
pub struct Still {
    state: Held<'static, State>,
    returns: hold::Still<'static>,
    holders: fetch::Still<'static>,
}

impl Still {
    /// Forgets the parent's state in the child, which has no absent memory, no threads that serve faults, and none of
    /// the parent's connections. Bytes that could not be fetched before the fork are made inaccessible, so that nobody
    /// reads zeros.
    pub fn forget(&mut self) {
        for piece in self.state.absent.all() {
            let pages = pages_around(&piece.addresses);
            // SAFETY: memory that the program has read into, and whose bytes are lost.
            let _ = unsafe { mprotect(pages.start as *mut _, pages.len(), MprotectFlags::empty()) };
        }
        // The parent's state is not dropped: its pieces have the parent's shares, which would be given back.
        let parents = std::mem::ManuallyDrop::new(std::mem::take(&mut *self.state));
        if let Some(faults) = &parents.faults {
            // SAFETY: only threads of the parent use it, and they do not exist in this process.
            unsafe { faults.close_parents() };
        }
        self.returns.forget();
        self.holders.forget();
        ABSENT_BYTES.store(0, Ordering::Release);
        ANY_BLOCKS.store(false, Ordering::Relaxed);
        THREADS.store(false, Ordering::Relaxed);
        blocks::after_fork();
        // In the child, only this fork is under way, until this value is dropped. Forks of other threads are the
        // parent's.
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
            // SAFETY: `Memory` discards only two kinds of memory: buffers that the program has given to a read, and
            // pages whose bytes it has saved.
            let made = unsafe { Userfaultfd::new(memory.device.as_fd()) };
            let starts = |faults: &Arc<_>| memory.holders.start() && faults::start(memory, Arc::clone(faults));
            self.faults = made.ok().map(Arc::new).filter(starts);
            self.refused = self.faults.is_none();
        }
        self.faults.clone()
    }
}
