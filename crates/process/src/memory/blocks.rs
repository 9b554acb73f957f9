//! Large blocks of malloc, in pages of their own: who frees one touches none of its bytes, so that it stays absent, and
//! the next who reads into it finds it absent already. What is known of a block is kept apart from it.
//!
//! ```text
//!   SPACE   | block | block      | block | ...      | not used yet |
//!   STATES    a byte for each page: its PageState
//!   FREE      blocks of each number of pages that are free, the last freed first
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};
use shunt_sys::userfaultfd::PAGE_BYTES;

/// Address space for all blocks.
const SPACE_BYTES: usize = 16 << 30;
const PAGES: usize = SPACE_BYTES / PAGE_BYTES;
/// It becomes readable and writable so much at a time, so that a program that locks its memory does not get all of it.
const STEP_BYTES: usize = 4 << 20;
/// A larger block is libc's, whose large blocks have a mapping of their own.
const LARGEST_BYTES: usize = 4 << 20;
/// Free blocks keep their pages up to here.
const KEPT_BYTES: usize = 64 << 20;
/// Blocks of up to so many pages have a list for each number; larger ones four for each doubling.
const EXACT_PAGES: usize = 16;
const CLASSES: usize = 48;

/// What the kernel has for a page of a block. Changed under the lock of [`crate::memory`], or by who has the block alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum PageState {
    /// Ordinary memory.
    Ordinary = 0,
    /// Registered with userfaultfd, and missing: whoever touches it waits.
    Missing = 1,
    /// Registered, and there.
    Filled = 2,
}

/// First address; 0: there are no blocks here.
static BASE: AtomicUsize = AtomicUsize::new(0);
/// Pages from the first that have been given out, and those that are readable and writable.
static USED: AtomicUsize = AtomicUsize::new(0);
static READY: AtomicUsize = AtomicUsize::new(0);
static STATES: [AtomicU8; PAGES] = [const { AtomicU8::new(0) }; PAGES];
/// By first page: pages of the block there.
static SIZES: [AtomicU32; PAGES] = [const { AtomicU32::new(0) }; PAGES];
/// By first page of a free block: the next one of its class, plus 1.
static NEXT: [AtomicU32; PAGES] = [const { AtomicU32::new(0) }; PAGES];
static FREE: [AtomicU32; CLASSES] = [const { AtomicU32::new(0) }; CLASSES];
static FREE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Where a block begins in its first page.
static OFFSET: AtomicUsize = AtomicUsize::new(0);
/// Of the lists, which whoever has it holds for a few instructions.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// From here on. `offset_bytes`: where blocks begin in their first page, a multiple of 16.
pub fn begin(offset_bytes: usize) {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let space = unsafe {
        mmap_anonymous(std::ptr::null_mut(), SPACE_BYTES, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    };
    // Where the process may not have that much (RLIMIT_AS), blocks are libc's.
    if let Ok(base) = space {
        OFFSET.store(offset_bytes, Ordering::Relaxed);
        BASE.store(base as usize, Ordering::Release);
    }
}

/// Whether an address is in a block, or was once.
#[inline]
pub fn contains(address: usize) -> bool {
    let base = BASE.load(Ordering::Relaxed);
    base != 0 && address.wrapping_sub(base) < SPACE_BYTES
}

fn lock() {
    while LOCKED.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        rustix::thread::sched_yield();
    }
}

fn unlock() {
    LOCKED.store(false, Ordering::Release);
}

/// In the child of a fork: no memory is registered there, and what was missing reads as zeros.
pub fn after_fork() {
    let used = USED.load(Ordering::Relaxed);
    STATES[..used].iter().for_each(|state| state.store(PageState::Ordinary as u8, Ordering::Relaxed));
    if LOCKED.swap(false, Ordering::Relaxed) {
        // Another thread of the parent was changing the lists. What is in them is lost to the child.
        FREE.iter().for_each(|list| list.store(0, Ordering::Relaxed));
    }
}

/// The list of blocks of `pages`, and how many pages its blocks have.
fn class(pages: usize) -> (usize, usize) {
    if pages <= EXACT_PAGES {
        return (pages, pages);
    }
    let doubling = (pages - 1).ilog2() as usize;
    let step = 1 << (doubling - 2);
    let rounded = pages.next_multiple_of(step);
    (EXACT_PAGES + (doubling - 4) * 4 + (rounded - (1 << doubling)) / step, rounded)
}

/// A block of at least so many bytes. `None`: libc has to give one.
pub fn allocate(bytes: usize) -> Option<usize> {
    let base = BASE.load(Ordering::Acquire);
    let offset = OFFSET.load(Ordering::Relaxed);
    if base == 0 || !(PAGE_BYTES..=LARGEST_BYTES).contains(&bytes) {
        return None;
    }
    let (class, pages) = class((bytes + offset).div_ceil(PAGE_BYTES));
    lock();
    let page = match FREE[class].load(Ordering::Relaxed) as usize {
        0 => fresh(base, pages),
        free => {
            FREE[class].store(NEXT[free - 1].load(Ordering::Relaxed), Ordering::Relaxed);
            count_free(|bytes| bytes - pages * PAGE_BYTES);
            Some(free - 1)
        }
    };
    unlock();
    page.map(|page| base + page * PAGE_BYTES + offset)
}

/// Under the lock.
fn count_free(change: impl FnOnce(usize) -> usize) {
    FREE_BYTES.store(change(FREE_BYTES.load(Ordering::Relaxed)), Ordering::Relaxed);
}

fn fresh(base: usize, pages: usize) -> Option<usize> {
    let page = USED.load(Ordering::Relaxed);
    let end = page + pages;
    if end > PAGES {
        return None;
    }
    let ready = READY.load(Ordering::Relaxed);
    if end > ready {
        let more = ((end - ready) * PAGE_BYTES).next_multiple_of(STEP_BYTES).min((PAGES - ready) * PAGE_BYTES);
        let at = base + ready * PAGE_BYTES;
        // SAFETY: a part of our own space that nobody has had.
        unsafe { mprotect(at as *mut _, more, MprotectFlags::READ | MprotectFlags::WRITE) }.ok()?;
        READY.store(ready + more / PAGE_BYTES, Ordering::Relaxed);
    }
    USED.store(end, Ordering::Relaxed);
    SIZES[page].store(pages as u32, Ordering::Relaxed);
    Some(page)
}

fn page_of(address: usize) -> usize {
    (address - BASE.load(Ordering::Relaxed)) / PAGE_BYTES
}

/// What a program may use of the block that begins at an address.
pub fn usable(start: usize) -> Range<usize> {
    let pages = SIZES[page_of(start)].load(Ordering::Relaxed) as usize;
    start..start / PAGE_BYTES * PAGE_BYTES + pages * PAGE_BYTES
}

/// Gives the pages of a block back to the kernel. False: they are locked, and hold what they held.
fn drop_pages(pages: &Range<usize>) -> bool {
    // SAFETY: whole pages of a block whose contents nobody wants.
    if unsafe { madvise(pages.start as *mut _, pages.len(), Advice::LinuxDontNeed) }.is_err() {
        return false;
    }
    let (filled, missing) = (PageState::Filled as u8, PageState::Missing as u8);
    for state in states(pages) {
        let _ = state.compare_exchange(filled, missing, Ordering::Relaxed, Ordering::Relaxed);
    }
    true
}

/// Has a block, in which nothing stands for anything, read as zeros. False: it does not.
pub fn clear(start: usize) -> bool {
    drop_pages(&around(start))
}

/// Takes a block back. Nothing stands for anything in it any more.
pub fn free(start: usize) {
    let page = page_of(start);
    let pages = SIZES[page].load(Ordering::Relaxed) as usize;
    if FREE_BYTES.load(Ordering::Relaxed) > KEPT_BYTES {
        drop_pages(&around(start));
    }
    let (class, _) = class(pages);
    lock();
    NEXT[page].store(FREE[class].load(Ordering::Relaxed), Ordering::Relaxed);
    FREE[class].store(page as u32 + 1, Ordering::Relaxed);
    count_free(|bytes| bytes + pages * PAGE_BYTES);
    unlock();
}

/// The states of whole pages, as far as there are blocks: programs give reads more room than there is.
fn states(pages: &Range<usize>) -> &'static [AtomicU8] {
    let first = page_of(pages.start);
    &STATES[first..(first + pages.len() / PAGE_BYTES).min(PAGES)]
}

/// The state of the page at an address.
pub fn state(address: usize) -> PageState {
    match STATES[page_of(address)].load(Ordering::Relaxed) {
        0 => PageState::Ordinary,
        1 => PageState::Missing,
        _ => PageState::Filled,
    }
}

/// Whether any of some pages is in a state.
pub fn any(pages: &Range<usize>, wanted: PageState) -> bool {
    states(pages).iter().any(|state| state.load(Ordering::Relaxed) == wanted as u8)
}

/// Sets the state of whole pages.
pub fn set(pages: &Range<usize>, to: PageState) {
    states(pages).iter().for_each(|state| state.store(to as u8, Ordering::Relaxed));
}

/// The whole pages of the block that an address is in; none where it is in no block.
pub fn around(address: usize) -> Range<usize> {
    if !contains(address) {
        return address..address;
    }
    let base = BASE.load(Ordering::Relaxed);
    let mut first = page_of(address);
    while first > 0 && SIZES[first].load(Ordering::Relaxed) == 0 {
        first -= 1;
    }
    let start = base + first * PAGE_BYTES;
    start..start + SIZES[first].load(Ordering::Relaxed) as usize * PAGE_BYTES
}
