//! Buffers of the library's own for fetched bytes. A few are kept: a new buffer costs a page fault for each of its
//! pages, which is more than copying into it costs.

use std::ops::{Deref, DerefMut};

use shunt_sys::lock::Mutex;

/// Number of free buffers that are kept.
const KEPT: usize = 4;

#[derive(Default)]
pub struct Scratch(Mutex<Vec<Vec<u8>>>);

/// A buffer in use. Its initial contents are arbitrary.
pub struct Buffer<'a> {
    of: &'a Scratch,
    bytes: Vec<u8>,
    length: usize,
}

impl Scratch {
    /// Returns a buffer of `length` bytes.
    pub fn buffer(&self, length: usize) -> Buffer<'_> {
        // Does not wait for the lock: in the child of a fork, the thread that holds the lock may not exist.
        let kept = self.0.try_lock().and_then(|mut kept| kept.pop());
        let mut bytes = kept.unwrap_or_default();
        if bytes.len() < length {
            bytes.resize(length, 0);
        }
        Buffer { of: self, bytes, length }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let Some(mut kept) = self.of.0.try_lock()
            && kept.len() < KEPT
        {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Deref for Buffer<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for Buffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}
