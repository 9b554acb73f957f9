//! Absent memory that is not a block of ours: mappings, stacks, libc's own heap. Registered for as long as it stands for
//! something, because whoever has it next knows nothing of us.

use std::ops::Range;

use shunt_odb::absent::{Piece, Pieces};
use shunt_sys::userfaultfd::{PAGE_BYTES, Userfaultfd};

use super::{State, whole_pages};

/// Whether a piece is absent, as the kernel sees it now: what another thread has unmapped may be somebody else's memory
/// before the event about it is here.
pub(super) fn is_absent(faults: &Userfaultfd, piece: &Piece) -> bool {
    faults.is_absent(piece.addresses.start / PAGE_BYTES * PAGE_BYTES)
}

/// Makes whole pages absent. False: they cannot be, and hold nothing any more.
pub(super) fn discard(faults: &Userfaultfd, pages: &Range<usize>) -> bool {
    let made = faults.discard(pages.clone()).is_ok();
    if !made {
        let _ = faults.unregister(pages.clone());
    }
    made
}

impl State {
    /// Whole pages of a range stand for nothing any more: ordinary memory, which the kernel fills with zeros by itself.
    pub(super) fn forget_elsewhere(&mut self, range: &Range<usize>) -> Pieces {
        let pages = whole_pages(range);
        if !self.absent.meets(&pages) {
            return Pieces::new();
        }
        let removed = self.absent.remove(&pages);
        if let (Some(faults), Some(first), Some(last)) = (&self.faults, removed.first(), removed.last()) {
            let _ = faults.unregister(first.addresses.start..last.addresses.end);
        }
        removed
    }
}
