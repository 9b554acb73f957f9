//! Bytes of a payload that another thread reads, because they are not in memory.

use crate::reading::Ticket;

/// Bytes that another thread reads or has read.
#[derive(Debug, Default)]
pub(super) enum Ahead {
    #[default]
    Nothing,
    /// Another thread is reading bytes of a range: the read's ticket, the range's index, the bytes' offset in its file.
    Asked(Ticket, usize, u64),
    /// Another thread has read bytes of a range: the range's index, the bytes' offset in its file, the bytes.
    Here(usize, u64, Vec<u8>),
}

impl Ahead {
    /// Drops the bytes that were read, unless the byte that is needed next, at the offset `at`, is among them.
    pub(super) fn go_on(&mut self, range: usize, at: u64) {
        if matches!(self, Self::Here(..)) && self.bytes(range, at, 1).is_none() {
            *self = Self::Nothing;
        }
    }

    /// Returns the bytes of a range, from `at` on and at most `most`, that another thread has read.
    pub(super) fn bytes(&self, range: usize, at: u64, most: usize) -> Option<&[u8]> {
        let Self::Here(of, from, bytes) = self else { return None };
        let skip = usize::try_from(at.checked_sub(*from).filter(|_| *of == range)?).ok()?;
        let bytes = bytes.get(skip..).filter(|bytes| !bytes.is_empty())?;
        Some(&bytes[..bytes.len().min(most)])
    }
}
