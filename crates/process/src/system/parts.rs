//! Parts of a program's memory, as readv(2) and similar calls take them.

use std::io::IoSlice;
use std::ops::Range;

use libc::iovec;
use smallvec::SmallVec;

/// Most parts of the program's memory in one write: as many as the kernel takes (UIO_MAXIOV), less one that the library
/// adds.
pub const PARTS_AT_ONCE: usize = libc::UIO_MAXIOV as usize - 1;

/// Parts of a program's memory. They are usually few, and then take no memory of the heap.
pub type Parts = SmallVec<[iovec; 4]>;

/// Addresses of a part.
pub fn addresses(part: &iovec) -> Range<usize> {
    part.iov_base as usize..(part.iov_base as usize).saturating_add(part.iov_len)
}

/// Length of all parts together, in bytes.
pub fn length(parts: &[iovec]) -> usize {
    parts.iter().map(|part| part.iov_len).sum()
}

/// The first `bytes` bytes of some parts.
pub fn first(parts: &[iovec], bytes: usize) -> Parts {
    match parts {
        [part] => SmallVec::from_elem(iovec { iov_len: part.iov_len.min(bytes), ..*part }, 1),
        _ => split(parts, bytes).0,
    }
}

/// Some parts without their first `bytes` bytes.
pub fn behind(parts: &[iovec], bytes: usize) -> Parts {
    match parts {
        [part] if bytes == 0 => SmallVec::from_elem(*part, 1),
        _ => split(parts, bytes).1,
    }
}

/// The first `bytes` bytes of some parts, and the rest of the parts.
pub fn split(parts: &[iovec], bytes: usize) -> (Parts, Parts) {
    let (mut first, mut rest) = (Parts::new(), Parts::new());
    let mut left = bytes;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let now = part.iov_len.min(left);
        left -= now;
        if now > 0 {
            first.push(iovec { iov_base: part.iov_base, iov_len: now });
        }
        if now < part.iov_len {
            rest.push(iovec {
                iov_base: part.iov_base.cast::<u8>().wrapping_add(now).cast(),
                iov_len: part.iov_len - now,
            });
        }
    }
    (first, rest)
}

/// Makes a part of some addresses.
pub fn of(addresses: &Range<usize>) -> iovec {
    iovec { iov_base: addresses.start as *mut libc::c_void, iov_len: addresses.len() }
}

/// Some parts as slices, to be copied from.
pub fn slices<'a>(memory: &[iovec]) -> SmallVec<[IoSlice<'a>; 8]> {
    // SAFETY: memory of the program that is readable during the call. Another thread may change it meanwhile, as during
    // write(2); it is only copied.
    let slice = |part: &iovec| IoSlice::new(unsafe { std::slice::from_raw_parts(part.iov_base.cast(), part.iov_len) });
    memory.iter().filter(|part| part.iov_len > 0).map(slice).collect()
}
