//! Comparison of bodies. An error shows only the place of the first difference, because bodies are megabytes long.

use std::fmt;
use std::ops::Range;

/// Number of bytes that an error shows before the first difference.
const BEFORE: usize = 8;

/// Number of bytes that an error shows from the first difference on.
const FROM: usize = 16;

/// How bytes differ from the expected ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Offset of the first byte that differs, or that only one of the two bodies has.
    pub at: usize,
    lengths: [usize; 2],
    around: [Vec<u8>; 2],
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([got_bytes, expected_bytes], [got, expected]) = (self.lengths, &self.around);
        let (at, from) = (self.at, self.at.saturating_sub(BEFORE));
        write!(f, "{got_bytes} bytes, {expected_bytes} were expected; the first difference is at {at}: ")?;
        write!(f, "from {from} on {got:02x?}, expected {expected:02x?}")
    }
}

impl std::error::Error for Difference {}

/// Compares bytes with the expected ones.
///
/// # Errors
/// When they differ. The error has both lengths, the offset of the first difference, and the bytes around it.
pub fn same_bytes(got: &[u8], expected: &[u8]) -> Result<(), Difference> {
    if got == expected {
        return Ok(());
    }
    let shorter = got.len().min(expected.len());
    let at = got.iter().zip(expected).position(|(got, expected)| got != expected).unwrap_or(shorter);
    let shown = at.saturating_sub(BEFORE)..at + FROM;
    let around = |bytes: &[u8]| bytes[within(&shown, bytes.len())].to_vec();
    Err(Difference { at, lengths: [got.len(), expected.len()], around: [around(got), around(expected)] })
}

/// Checks that bytes are the expected ones. `what` says which bytes they are.
///
/// # Panics
/// When they differ, with what [`same_bytes`] reports.
#[track_caller]
pub fn assert_same_bytes(got: &[u8], expected: &[u8], what: impl fmt::Display) {
    if let Err(difference) = same_bytes(got, expected) {
        panic!("{what}: {difference}");
    }
}

/// Returns the part of a range that lies within the first `bytes` bytes.
fn within(range: &Range<usize>, bytes: usize) -> Range<usize> {
    range.start.min(bytes)..range.end.min(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_by_its_place_and_not_by_all_bytes() {
        let expected = vec![7; 1 << 20];
        let mut got = expected.clone();
        assert_eq!(same_bytes(&got, &expected), Ok(()));
        got[600_000] = 9;
        got.truncate(700_000);
        let difference = same_bytes(&got, &expected).unwrap_err();
        assert_eq!(difference.at, 600_000);
        let told = difference.to_string();
        assert!(told.starts_with("700000 bytes, 1048576 were expected; the first difference is at 600000: "), "{told}");
        assert!(told.contains("from 599992 on [07, 07, 07, 07, 07, 07, 07, 07, 09, 07,"), "{told}");
        assert!(told.len() < 400, "{told}");
    }

    #[test]
    fn bytes_that_end_early_differ_at_their_end() {
        assert_eq!(same_bytes(b"abc", b"abcdef").unwrap_err().at, 3);
        assert_eq!(same_bytes(b"abcdef", b"").unwrap_err().at, 0);
    }
}
