//! Large blocks of malloc, which share no page with anything else. Freeing a block touches none of its bytes. So pages
//! that were absent stay missing, and can stand for the bytes of the next read without a system call. The library keeps
//! its data about a block in tables, not in the block. *Absent* pages stand for bytes of a payload in a store; the
//! kernel has no memory for them, and userfaultfd(2) calls them *missing*.
//!
//! ```text
//!   SPACE   | block | block      | block | ...      | not used yet |
//!   STATES    a byte for each page: its PageState
//!   FREE      lists of free blocks by their size, the last freed block first
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};
use shunt_sys::userfaultfd::PAGE_BYTES;

/// Address space for all blocks.
const SPACE_BYTES: usize = 16 << 30;
const PAGES: usize = SPACE_BYTES / PAGE_BYTES;
/// Number of bytes of the space that become readable and writable at a time. A program that locks its memory
/// (mlockall(2)) thus does not lock the whole space.
const STEP_BYTES: usize = 4 << 20;
/// Largest length in bytes for which this heap allocates a block. Larger blocks are libc's, and have a mapping of their
/// own.
const LARGEST_BYTES: usize = 4 << 20;
/// Most bytes of free blocks that keep their pages. While there are more, a block that is freed gives its pages back to
/// the kernel.
const KEPT_BYTES: usize = 64 << 20;
/// Number of pages up to which each size of block has a separate free list. Larger sizes have four lists for each
/// doubling.
const EXACT_PAGES: usize = 16;
/// Number of free lists. Each is for one class, a size in pages.
const CLASSES: usize = 48;

/// State of a block's page in the kernel. It is changed under the lock of [`crate::memory`], or by the only thread that
/// uses the block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum PageState {
    /// Ordinary memory.
    Ordinary = 0,
    /// Registered with userfaultfd, and missing: a thread that touches it waits.
    Missing = 1,
    /// Registered with userfaultfd, and present.
    Filled = 2,
}

/// First address of the space; 0 if there is no space.
static BASE: AtomicUsize = AtomicUsize::new(0);
/// Number of pages that have ever been given out, counted from the first page of the space.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Number of pages that are readable and writable, counted from the first page of the space.
static READY: AtomicUsize = AtomicUsize::new(0);
static STATES: [AtomicU8; PAGES] = [const { AtomicU8::new(0) }; PAGES];
/// By page: number of pages of the block that begins there.
static SIZES: [AtomicU32; PAGES] = [const { AtomicU32::new(0) }; PAGES];
/// By first page of a free block: the next free block of the same class, as the number of its first page plus 1; 0 if
/// it is the last.
static NEXT: [AtomicU32; PAGES] = [const { AtomicU32::new(0) }; PAGES];
/// By class: the first free block, as the number of its first page plus 1; 0 if there is none.
static FREE: [AtomicU32; CLASSES] = [const { AtomicU32::new(0) }; CLASSES];
static FREE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Offset of each block in its first page, in bytes.
static OFFSET: AtomicUsize = AtomicUsize::new(0);
/// Spinlock of the free lists. A thread holds it for a few instructions.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Reserves the space, from which blocks come from now on. `offset_bytes`: offset of each block in its first page, a
/// multiple of 16.
pub fn begin(offset_bytes: usize) {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let space = unsafe {
        mmap_anonymous(std::ptr::null_mut(), SPACE_BYTES, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    };
    // If the process may not have that much address space (RLIMIT_AS), all blocks are libc's.
    if let Ok(base) = space {
        OFFSET.store(offset_bytes, Ordering::Relaxed);
        BASE.store(base as usize, Ordering::Release);
    }
}

/// Whether an address is in the space of blocks.
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

/// Resets the states in the child of a fork: no memory is registered there, and missing pages read as zeros.
pub fn after_fork() {
    let used = USED.load(Ordering::Relaxed);
    STATES[..used].iter().for_each(|state| state.store(PageState::Ordinary as u8, Ordering::Relaxed));
    if LOCKED.swap(false, Ordering::Relaxed) {
        // Another thread of the parent was changing the lists at the fork. The child loses the blocks in them.
        FREE.iter().for_each(|list| list.store(0, Ordering::Relaxed));
    }
}

/// Index of the free list for blocks of `pages` pages, and the number of pages that its blocks have.
fn class(pages: usize) -> (usize, usize) {
    if pages <= EXACT_PAGES {
        return (pages, pages);
    }
    let doubling = (pages - 1).ilog2() as usize;
    let step = 1 << (doubling - 2);
    let rounded = pages.next_multiple_of(step);
    (EXACT_PAGES + (doubling - 4) * 4 + (rounded - (1 << doubling)) / step, rounded)
}

/// Allocates a block of at least `bytes` bytes. Returns `None` if libc has to allocate it.
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

/// Changes the count of free bytes. The caller holds the lock.
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
        // SAFETY: a part of the library's own space that has not been given out.
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

/// Range that a program may use of the block that begins at an address.
pub fn usable(start: usize) -> Range<usize> {
    let pages = SIZES[page_of(start)].load(Ordering::Relaxed) as usize;
    start..start / PAGE_BYTES * PAGE_BYTES + pages * PAGE_BYTES
}

/// Gives the pages of a block back to the kernel. Returns false if they are locked; they keep their contents then.
fn drop_pages(pages: &Range<usize>) -> bool {
    // SAFETY: whole pages of a block whose contents are not needed.
    if unsafe { madvise(pages.start as *mut _, pages.len(), Advice::LinuxDontNeed) }.is_err() {
        return false;
    }
    let (filled, missing) = (PageState::Filled as u8, PageState::Missing as u8);
    for state in states(pages) {
        let _ = state.compare_exchange(filled, missing, Ordering::Relaxed, Ordering::Relaxed);
    }
    true
}

/// Makes a block read as zeros. Nothing in it may stand for payload bytes. Returns false if its pages are locked and
/// keep their contents.
pub fn clear(start: usize) -> bool {
    drop_pages(&around(start))
}

/// Takes a block back. Nothing in it may stand for payload bytes any more.
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

/// States of whole pages, cut off at the end of the space: a program may call read(2) with a length that reaches beyond
/// it.
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

/// Whether any of some pages is in the state `wanted`.
pub fn any(pages: &Range<usize>, wanted: PageState) -> bool {
    states(pages).iter().any(|state| state.load(Ordering::Relaxed) == wanted as u8)
}

/// Sets the state of whole pages.
pub fn set(pages: &Range<usize>, to: PageState) {
    states(pages).iter().for_each(|state| state.store(to as u8, Ordering::Relaxed));
}

/// The pages of the block that an address is in, the first and last included; empty if the address is in no block.
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
