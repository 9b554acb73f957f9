//! Copies of absent memory, which are absent, too, and reads of real bytes beside absent ones. Absent memory stands for
//! bytes of a payload in a store, which are not fetched for a copy. A page is *missing* if the kernel has no memory for
//! it: a touch waits until the library has filled it. A *block* is a large block of malloc that the library has
//! allocated itself.

use std::ops::Range;

use shunt_odb::absent::Piece;
use shunt_odb::fetch::FetchError;

use super::scratch::Buffer;
use super::{Copies, Memory};
use crate::memory::blocks;

impl Memory {
    /// Copies a range to a block at `to`. Absent bytes are absent in the copy, too. Real bytes are copied without a
    /// touch of missing pages in the range or the block. Returns false if such a copy cannot be made; the old contents
    /// at `to` may be lost then.
    ///
    /// # Safety
    /// As for a copy of these bytes, except that the memory may be absent.
    pub unsafe fn copy(&'static self, from: &Range<usize>, to: usize) -> bool {
        let target = to..to + from.len();
        let pieces = self.absent_within(from);
        let can_be = blocks::contains(to) && (pieces.is_empty() || self.can_be_absent(&target) == target);
        if !can_be || from.start < target.end && to < from.end {
            return false;
        }
        let moved = |address: usize| address - from.start + to;
        let mut at = from.start;
        for Piece { addresses, hold, offset } in pieces {
            // SAFETY: the caller promises that these bytes may be copied.
            unsafe { self.copy_real(&(at..addresses.start), moved(at)) };
            at = addresses.end;
            if !self.stand_for(moved(addresses.start)..moved(addresses.end), &hold, offset) {
                return false;
            }
        }
        // SAFETY: the caller promises that these bytes may be copied.
        unsafe { self.copy_real(&(at..from.end), moved(at)) };
        true
    }

    /// Copies real bytes, without a touch of missing pages.
    ///
    /// # Safety
    /// As for [`Self::copy`]. `from` stands for nothing.
    unsafe fn copy_real(&self, from: &Range<usize>, to: usize) {
        if !from.is_empty() {
            // SAFETY: the caller promises that these bytes may be copied. They pass through the library's own memory,
            // because they are written under a lock.
            unsafe { self.write(to, &self.read(from)) };
        }
    }

    /// Copies a range that stands for nothing into a buffer, without a touch of a page that stands for bytes beside the
    /// range.
    ///
    /// # Safety
    /// The program may read the range.
    pub unsafe fn read(&self, range: &Range<usize>) -> Buffer<'_> {
        let (mut bytes, mut copies) = (self.scratch.buffer(range.len()), Copies::new());
        let mut at = 0;
        self.readable(range, &mut copies, |part| {
            // SAFETY: the part is program memory, which the caller promises is readable, or a copy that lives as long
            // as `copies`.
            let part = unsafe { std::slice::from_raw_parts(part.start as *const u8, part.len()) };
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        });
        bytes
    }

    /// Fetches a range into place, together with each piece of memory whose bytes begin within the next `most` bytes of
    /// the same payload. A program that copies a body piece by piece has the rest of the body in such memory, and will
    /// probably copy it next.
    ///
    /// # Errors
    /// Returns an error if they cannot be fetched.
    pub fn fetch_with_rest(&self, range: &Range<usize>, most: u64) -> Result<(), FetchError> {
        let mut ranges = vec![range.clone()];
        if let Some(last) = self.absent_within(range).last() {
            let behind = last.offset + last.addresses.len() as u64;
            let state = self.lock();
            let rest = state.absent.all().filter(|piece| {
                piece.hold.payload() == last.hold.payload() && (behind..behind + most).contains(&piece.offset)
            });
            ranges.extend(rest.map(|piece| piece.addresses.clone()));
        }
        self.fetch_ranges(&ranges)
    }
}
