//! Copies of absent memory that are absent, too, and reading beside it.

use std::ops::Range;

use shunt_odb::absent::Piece;
use shunt_odb::fetch::FetchError;

use super::scratch::Buffer;
use super::{Copies, Memory};
use crate::memory::blocks;

impl Memory {
    /// Copies a range to a block: what is absent stays so, and what is real beside it is copied, without a touch of either's
    /// missing pages. False: the copy cannot be absent, and what was there may be lost.
    ///
    /// # Safety
    /// As for a copy of these bytes, but that memory may be absent.
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
            // SAFETY: the caller's promise.
            unsafe { self.copy_real(&(at..addresses.start), moved(at)) };
            at = addresses.end;
            if !self.stand_for(moved(addresses.start)..moved(addresses.end), &hold, offset) {
                return false;
            }
        }
        // SAFETY: as above.
        unsafe { self.copy_real(&(at..from.end), moved(at)) };
        true
    }

    /// # Safety
    /// As [`Self::copy`], of memory that stands for nothing.
    unsafe fn copy_real(&self, from: &Range<usize>, to: usize) {
        if !from.is_empty() {
            // SAFETY: the caller's promise. By way of memory of ours, because it is written under a lock.
            unsafe { self.write(to, &self.read(from)) };
        }
    }

    /// What is real of a range, without a touch of a page that stands for something beside it.
    ///
    /// # Safety
    /// The program lets the range be read.
    pub unsafe fn read(&self, range: &Range<usize>) -> Buffer<'_> {
        let (mut bytes, mut copies) = (self.scratch.buffer(range.len()), Copies::new());
        let mut at = 0;
        self.readable(range, &mut copies, |part| {
            // SAFETY: the caller's promise, or a copy of ours that lives as long as `copies`.
            let part = unsafe { std::slice::from_raw_parts(part.start as *const u8, part.len()) };
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        });
        bytes
    }

    /// Has a range fetched, and what other memory stands for behind it, up to so many bytes: of a body that is copied piece
    /// by piece, the program has the rest.
    ///
    /// # Errors
    /// They cannot be had.
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
