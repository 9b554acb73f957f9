//! Random bytes of the kernel (getrandom(2)).

use std::io;

/// Returns a random key.
///
/// # Errors
/// Returns the kernel's error of getrandom(2).
pub(crate) fn key() -> io::Result<[u8; 16]> {
    let mut key = [0; 16];
    let got = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    if got == key.len() { Ok(key) } else { Err(io::Error::other("getrandom gave too little")) }
}
