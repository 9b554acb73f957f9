//! Reading side of a BPF ring buffer (kernel/bpf/ringbuf.c), for processes that may not use bpf(2). The descriptor is
//! mapped as follows:
//!
//! ```text
//!   page 0      consumer position, written by this process
//!   page 1      producer position, written by the kernel
//!   from 2      the records, mapped twice in a row, so that no record is divided at the ring's end
//! ```
//!
//! A record is a 32-bit length (bit 31: still being written, bit 30: discarded), a 32-bit page offset, then the data,
//! padded to 8 bytes.

use std::fs::read_to_string;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE_BYTES: usize = 4096;
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER_BYTES: usize = 8;
/// Number of the map type BPF_MAP_TYPE_RINGBUF.
const RINGBUF: u64 = 27;

/// A mapped ring buffer. This value must be its only reader.
#[derive(Debug)]
pub struct RingBuffer {
    consumer: NonNull<u8>,
    producer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mappings are not tied to a thread, and reading takes `&mut self`.
unsafe impl Send for RingBuffer {}

/// Returns the number in the line `name` of a file in /proc/self/fdinfo.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

impl RingBuffer {
    /// Maps the ring buffer of a BPF map's descriptor.
    ///
    /// # Errors
    /// Returns the kernel's error of mmap(2) or of reading /proc, or an error where the descriptor is no ring buffer.
    pub fn new(map: impl AsFd) -> io::Result<Self> {
        let text = read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
        let bytes = field(&text, "max_entries").and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.filter(|bytes| field(&text, "map_type") == Some(RINGBUF) && bytes.is_power_of_two());
        let bytes = bytes.ok_or_else(|| io::Error::other("a descriptor that is no BPF ring buffer"))?;
        let (both, own) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let nowhere = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice; the kernel refuses lengths beyond the map's.
        let consumer = unsafe { mmap(nowhere, PAGE_BYTES, both, own, &map, 0) }?;
        // SAFETY: a new mapping at an address of the kernel's choice; the kernel refuses lengths beyond the map's.
        let producer = unsafe { mmap(nowhere, PAGE_BYTES + 2 * bytes, ProtFlags::READ, own, &map, PAGE_BYTES as u64) };
        let producer = producer.inspect_err(|_| {
            // SAFETY: the mapping that was just made, which nothing uses yet.
            let _ = unsafe { munmap(consumer, PAGE_BYTES) };
        })?;
        let pointer = |at: *mut libc::c_void| NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mmap gave 0"));
        Ok(Self { consumer: pointer(consumer)?, producer: pointer(producer)?, bytes })
    }

    fn position(page: &NonNull<u8>) -> &AtomicU64 {
        // SAFETY: the first 8 bytes of a page that is mapped as long as `self` lives; all other access to them is
        // atomic.
        unsafe { page.cast().as_ref() }
    }

    /// Calls `record` with the data of each complete record, in order, and consumes the record. Stops at the first
    /// record that is still being written.
    pub fn drain(&mut self, mut record: impl FnMut(&[u8])) {
        let consumer = Self::position(&self.consumer);
        let mut at = consumer.load(Ordering::Relaxed);
        while at != Self::position(&self.producer).load(Ordering::Acquire) {
            let offset = PAGE_BYTES + (at as usize & (self.bytes - 1));
            // SAFETY: inside the mapping: the offset is in the first of the two mappings of the records. Records are
            // aligned to 8 bytes.
            let header: &AtomicU32 = unsafe { self.producer.add(offset).cast().as_ref() };
            let length = header.load(Ordering::Acquire);
            if length & BUSY != 0 {
                return;
            }
            let bytes = (length & !DISCARDED) as usize;
            if bytes > self.bytes - HEADER_BYTES {
                return;
            }
            if length & DISCARDED == 0 {
                // SAFETY: the kernel has finished this record, and does not touch it until it is consumed. It is not
                // longer than the ring, which is mapped twice.
                record(unsafe { std::slice::from_raw_parts(self.producer.add(offset + HEADER_BYTES).as_ptr(), bytes) });
            }
            at += (bytes + HEADER_BYTES).next_multiple_of(8) as u64;
            consumer.store(at, Ordering::SeqCst);
        }
    }
}

impl Drop for RingBuffer {
    fn drop(&mut self) {
        // SAFETY: both mappings belong to this value as a whole, and no reference into them is left.
        unsafe {
            let _ = munmap(self.consumer.as_ptr().cast(), PAGE_BYTES);
            let _ = munmap(self.producer.as_ptr().cast(), PAGE_BYTES + 2 * self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_proc_about_a_ring_are_read() {
        let text = "pos:\t0\nflags:\t02\nmap_type:\t27\nkey_size:\t0\nmax_entries:\t262144\n";
        assert_eq!((field(text, "map_type"), field(text, "max_entries")), (Some(27), Some(262_144)));
        assert_eq!(field(text, "map"), None);
    }

    #[test]
    fn no_ring_is_refused() {
        assert!(RingBuffer::new(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
