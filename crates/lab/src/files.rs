//! Files for servers to serve, whose contents anyone can tell apart.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes `size` bytes that follow from `seed` and repeat nowhere nearby: xorshift64.
pub(crate) fn write(path: &Path, seed: &str, size: u64) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    // Mixed as FNV-1a does.
    let mut state = seed
        .bytes()
        .fold(0x9e37_79b9_7f4a_7c15_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let mut left = size;
    while left > 0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let piece = left.min(8);
        file.write_all(&state.to_le_bytes()[..piece as usize])?;
        left -= piece;
    }
    file.flush()
}
