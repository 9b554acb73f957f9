//! Files for servers to serve, whose bytes a client can check.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Bytes of one file, in order. They are computed from the file's name, and do not repeat within a short distance
/// (xorshift64). A client that knows the name can check each byte of a body as it arrives.
#[derive(Debug, Clone)]
pub struct Contents {
    state: u64,
    /// Number of bytes of `state` that have been used.
    used: usize,
}

const WORD: usize = size_of::<u64>();

impl Contents {
    /// Contents of the file that [`crate::Lab::files`] makes under this name, from its first byte.
    #[must_use]
    pub fn of(name: &str) -> Self {
        // Hashes the name as FNV-1a does.
        let state = name
            .bytes()
            .fold(0x9e37_79b9_7f4a_7c15_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Self { state, used: WORD }
    }

    fn next_word(&mut self) -> [u8; WORD] {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.to_le_bytes()
    }

    /// Compares the next bytes of the file with `bytes`.
    ///
    /// # Errors
    /// Index of the first byte that differs. After an error, later bytes cannot be compared any more.
    pub fn compare(&mut self, bytes: &[u8]) -> Result<(), usize> {
        let (rest_of_word, whole) = bytes.split_at(bytes.len().min(WORD - self.used));
        same(rest_of_word, &self.state.to_le_bytes()[self.used..], 0)?;
        self.used += rest_of_word.len();
        let mut at = rest_of_word.len();
        for piece in whole.chunks(WORD) {
            let word = self.next_word();
            same(piece, &word, at)?;
            self.used = piece.len();
            at += piece.len();
        }
        Ok(())
    }
}

/// Compares `got` with the beginning of `right`. An error has the index of the first difference plus `at`.
fn same(got: &[u8], right: &[u8], at: usize) -> Result<(), usize> {
    if got == &right[..got.len()] {
        return Ok(());
    }
    Err(at + got.iter().zip(right).take_while(|(got, right)| got == right).count())
}

/// Writes the first `size` bytes of a file's [`Contents`].
pub(crate) fn write(path: &Path, name: &str, size: u64) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut contents = Contents::of(name);
    let mut left = size;
    while left > 0 {
        let piece = left.min(WORD as u64);
        file.write_all(&contents.next_word()[..piece as usize])?;
        left -= piece;
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_its_contents_in_pieces_of_every_size() {
        let path = tempfile::NamedTempFile::new().unwrap();
        write(path.path(), "64k", 1003).unwrap();
        let file = std::fs::read(path.path()).unwrap();
        assert_eq!(file.len(), 1003);
        for size in 1..40 {
            let mut contents = Contents::of("64k");
            assert!(file.chunks(size).all(|piece| contents.compare(piece).is_ok()), "pieces of {size}");
        }
    }

    #[test]
    fn each_wrong_byte_is_found_where_it_is() {
        let path = tempfile::NamedTempFile::new().unwrap();
        write(path.path(), "1m", 100).unwrap();
        let file = std::fs::read(path.path()).unwrap();
        for wrong in 0..file.len() {
            let mut bytes = file.clone();
            bytes[wrong] ^= 1;
            let mut contents = Contents::of("1m");
            let first = contents.compare(&bytes[..5]);
            let found = first.and_then(|()| contents.compare(&bytes[5..]).map_err(|at| at + 5));
            assert_eq!(found, Err(wrong));
        }
        assert_eq!(Contents::of("2m").compare(&file[..1]), Err(0));
    }
}
