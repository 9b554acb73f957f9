//! Memory of our own that bytes are fetched into. A few buffers are kept: a fresh one would cost a page fault for each of
//! its pages, which is more than copying into it does.

use std::ops::{Deref, DerefMut};

use shunt_sys::lock::Mutex;

/// Buffers that are kept.
const KEPT: usize = 4;

#[derive(Default)]
pub struct Scratch(Mutex<Vec<Vec<u8>>>);

/// A buffer in use. What is in it at first is anything.
pub struct Buffer<'a> {
    of: &'a Scratch,
    bytes: Vec<u8>,
    length: usize,
}

impl Scratch {
    /// A buffer of so many bytes.
    pub fn buffer(&self, length: usize) -> Buffer<'_> {
        // Not waited for: in the child of a fork, whoever has it may be gone.
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
