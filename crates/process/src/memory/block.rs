//! Absent memory in large blocks of malloc ([`crate::memory::blocks`]). *Absent* memory stands for bytes in a store,
//! which are fetched when they are needed. A page that has been absent once stays registered with userfaultfd, and
//! *missing* until something is put there. The kernel has no memory for a missing page, and a thread that touches the
//! page waits. So a buffer that is used for one body after another costs no system call.
//!
//! A page may stand for some bytes and have real bytes beside them. The real bytes are saved, and put back together
//! with the fetched ones.

use std::ops::Range;

use shunt_odb::absent::Pieces;
use shunt_sys::userfaultfd::{PAGE_BYTES, Userfaultfd};
use smallvec::SmallVec;

use super::{State, filling, pages_around, whole_pages};
use crate::memory::blocks::{self, PageState};
use crate::system::signals::SignalsWait;

fn pages(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    range.clone().step_by(PAGE_BYTES).map(|page| page..page + PAGE_BYTES)
}

/// The pages of `all` whose state meets `wanted`, as runs that are as long as possible.
fn runs(all: &Range<usize>, wanted: impl Fn(PageState) -> bool) -> SmallVec<[Range<usize>; 4]> {
    let mut runs: SmallVec<[Range<usize>; 4]> = SmallVec::new();
    for page in pages(all).filter(|page| wanted(blocks::state(page.start))) {
        match runs.last_mut() {
            Some(last) if last.end == page.start => last.end = page.end,
            _ => runs.push(page),
        }
    }
    runs
}

/// Outcome of [`State::place`].
pub(super) struct Placed {
    /// The absent pieces that were in the range.
    pub(super) removed: Pieces,
    /// Parts of the range in pages that are not missing. The caller still has to write them, and without the lock: the
    /// program may have emptied or protected these pages, so that the write causes a fault.
    pub(super) rest: SmallVec<[Range<usize>; 2]>,
}

impl State {
    /// Makes every page that overlaps a range missing, and saves what these pages hold outside the range. Returns false
    /// if the kernel refuses.
    pub(super) fn empty_block(&mut self, faults: &Userfaultfd, addresses: &Range<usize>) -> bool {
        let around = pages_around(addresses);
        let edges = [around.start, around.end - PAGE_BYTES].into_iter().filter(|page| {
            let inside = *page >= addresses.start && page + PAGE_BYTES <= addresses.end;
            !inside && blocks::state(*page) != PageState::Missing
        });
        let edges: SmallVec<[usize; 2]> = edges.collect();
        // This thread's signals are blocked, because a handler may write into a page that is being saved.
        let _signals = (!edges.is_empty()).then(SignalsWait::new);
        for page in whole_pages(addresses).step_by(PAGE_BYTES) {
            if self.saved.is_empty() {
                break;
            }
            self.saved.remove(&page);
        }
        for page in &edges {
            let mut copy = Box::<[u8; PAGE_BYTES]>::new_uninit();
            // SAFETY: the page lies in a block and is not missing; all of the copy is written.
            let copy = unsafe {
                std::ptr::copy_nonoverlapping(*page as *const u8, copy.as_mut_ptr().cast::<u8>(), PAGE_BYTES);
                copy.assume_init()
            };
            self.saved.insert(*page, copy);
        }
        let ordinary = runs(&around, |state| state == PageState::Ordinary);
        let emptied = ordinary.iter().cloned().try_for_each(|run| faults.register(run)).and_then(|()| {
            let there = runs(&around, |state| state != PageState::Missing);
            there.into_iter().try_for_each(|run| faults.empty(run))
        });
        if emptied.is_ok() {
            blocks::set(&around, PageState::Missing);
            return true;
        }
        // The kernel refuses locked memory (mlock(2)), or the process has too many mappings. Pages before the refused
        // one may have been emptied.
        for page in edges {
            if let Some(copy) = self.saved.remove(&page) {
                filling::fill(faults, page, &copy[..]);
            }
        }
        for run in ordinary {
            if faults.unregister(run.clone()).is_err() {
                blocks::set(&run, PageState::Filled);
            }
        }
        false
    }

    /// Notes that a range of a block stands for nothing any more, and returns what it stood for. Its pages stay as they
    /// are.
    pub(super) fn forget_block(&mut self, range: &Range<usize>) -> Pieces {
        let gone: SmallVec<[usize; 2]> = self.saved.range(whole_pages(range)).map(|(page, _)| *page).collect();
        for page in gone {
            self.saved.remove(&page);
        }
        self.absent.remove(range)
    }

    /// Prepares a range that the kernel is about to write into: missing pages would cost faults. Forgets the absent
    /// pieces in the range's whole pages, and returns them.
    pub(super) fn make_ordinary(&mut self, range: &Range<usize>) -> Pieces {
        let Some(faults) = self.faults.clone() else { return Pieces::new() };
        let inner = whole_pages(range);
        let removed = self.forget_block(&inner);
        if !inner.is_empty() && blocks::any(&inner, PageState::Missing) && faults.unregister(inner.clone()).is_ok() {
            blocks::set(&inner, PageState::Ordinary);
        }
        for page in pages(&pages_around(range)) {
            let is_edge = page.start < inner.start || page.end > inner.end;
            // A page at the range's edge that stands for bytes is fetched when the kernel touches it.
            if is_edge && blocks::state(page.start) == PageState::Missing && !self.absent.meets(&page) {
                self.fill_page(&faults, page.start);
            }
        }
        removed
    }

    /// Puts bytes into a block from address `at` on, in place of what the block stands for there. Writes only into
    /// missing pages.
    pub(super) fn place(&mut self, at: usize, bytes: &[u8]) -> Placed {
        let range = at..at + bytes.len();
        let mut placed = Placed { removed: self.absent.remove(&range), rest: SmallVec::new() };
        let Some(faults) = self.faults.clone() else { return placed };
        let whole = runs(&whole_pages(&range), |state| state == PageState::Missing);
        for run in &whole {
            if filling::fill(&faults, run.start, &bytes[run.start - at..run.end - at]) {
                blocks::set(run, PageState::Filled);
            }
        }
        self.saved.retain(|page, _| !whole.iter().any(|run| run.contains(page)));
        for page in pages(&pages_around(&range)).filter(|page| !whole.iter().any(|run| run.contains(&page.start))) {
            let here = page.start.max(range.start)..page.end.min(range.end);
            let part = &bytes[here.start - at..here.end - at];
            if blocks::state(page.start) != PageState::Missing {
                match placed.rest.last_mut() {
                    Some(last) if last.end == here.start => last.end = here.end,
                    _ => placed.rest.push(here),
                }
                continue;
            }
            let copy = self.saved.entry(page.start).or_insert_with(|| Box::new([0; PAGE_BYTES]));
            copy[here.start - page.start..here.end - page.start].copy_from_slice(part);
            if !self.absent.meets(&page) {
                self.fill_page(&faults, page.start);
            }
        }
        placed
    }

    /// Real bytes of a range that are saved because their pages are missing, as pairs of addresses and bytes.
    pub(super) fn saved_within(&self, range: &Range<usize>) -> Vec<(Range<usize>, Vec<u8>)> {
        let first = range.start / PAGE_BYTES * PAGE_BYTES;
        let saved = self.saved.range(first..range.end);
        let missing = saved.filter(|(page, _)| blocks::state(**page) == PageState::Missing);
        let parts = missing.map(|(page, copy)| {
            let here = range.start.max(*page)..range.end.min(page + PAGE_BYTES);
            (here.clone(), copy[here.start - page..here.end - page].to_vec())
        });
        parts.collect()
    }

    /// Fills a missing page that stands for nothing with the bytes that were saved for it, or zeros.
    fn fill_page(&mut self, faults: &Userfaultfd, page: usize) {
        let filled = match self.saved.remove(&page) {
            Some(copy) => filling::fill(faults, page, &copy[..]),
            None => filling::fill_zeros(faults, page..page + PAGE_BYTES),
        };
        if filled {
            blocks::set(&(page..page + PAGE_BYTES), PageState::Filled);
        }
    }

    /// Serves a touch of a page that stands for nothing.
    pub(super) fn fill_meaningless(&mut self, faults: &Userfaultfd, page: usize) {
        if blocks::state(page) != PageState::Missing {
            // The page was filled a moment ago, or emptied by the program itself.
            if faults.is_absent(page) {
                let _ = filling::fill_zeros(faults, page..page + PAGE_BYTES);
            }
            return;
        }
        let block = blocks::around(page);
        if self.absent.meets(&block) || self.saved.range(block.clone()).next().is_some() {
            self.fill_page(faults, page);
        } else if faults.unregister(block.clone()).is_ok() {
            // The program uses the block for something else now. It should not have to wait for a fault at each page.
            blocks::set(&block, PageState::Ordinary);
        }
    }

    /// Fills each missing page that has saved bytes and stands for nothing.
    pub(super) fn fill_saved(&mut self) {
        let Some(faults) = self.faults.clone() else { return };
        let whole = |page: &usize| !self.absent.meets(&(*page..page + PAGE_BYTES));
        let held: Vec<usize> = self.saved.keys().copied().filter(whole).collect();
        for page in held {
            self.fill_page(&faults, page);
        }
    }
}
