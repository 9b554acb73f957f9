//! Absent memory outside *blocks* (large blocks of malloc, which the library allocates itself), such as mappings and
//! libc's own heap. Absent memory stands for bytes in a store. Outside blocks, memory is registered with userfaultfd
//! only as long as it stands for something: the code that uses the memory next knows nothing of the library.

use std::ops::Range;

use shunt_odb::absent::{Piece, Pieces};
use shunt_sys::userfaultfd::{PAGE_BYTES, Userfaultfd};

use super::{State, whole_pages};

/// Whether the kernel still has a piece absent. If another thread has unmapped the memory, other code may use the
/// memory again before the kernel's event about the unmapping is read.
pub(super) fn is_absent(faults: &Userfaultfd, piece: &Piece) -> bool {
    faults.is_absent(piece.addresses.start / PAGE_BYTES * PAGE_BYTES)
}

/// Makes whole pages absent. Returns false if they cannot be; they may have lost their contents then.
pub(super) fn discard(faults: &Userfaultfd, pages: &Range<usize>) -> bool {
    let made = faults.discard(pages.clone()).is_ok();
    if !made {
        let _ = faults.unregister(pages.clone());
    }
    made
}

impl State {
    /// Notes that the whole pages of a range stand for nothing, and unregisters them: the kernel fills them with zeros
    /// by itself. Returns what they stood for.
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
