//! The interposed symbols: each only says which of the library's functions it means, or that it is glibc's.

mod descriptor;
mod file;
pub mod heap;
pub mod real;
mod socket;

use std::os::fd::RawFd;

use crate::descriptors;
use crate::runtime::{Runtime, runtime};
use crate::send::Errno;

/// The calling thread's errno.
pub fn errno() -> Errno {
    // SAFETY: always points to the calling thread's.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// What glibc's calls return: a count, or -1 and errno.
fn returned(outcome: Result<usize, Errno>) -> isize {
    match outcome {
        Ok(count) => count as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// The connection that a descriptor leads to, if it lies between programs under Shunt.
#[inline]
fn connection(fd: RawFd) -> Option<(&'static Runtime, u32)> {
    if fd < 0 {
        return None;
    }
    let runtime = runtime()?;
    let before = errno();
    let place = descriptors::place(runtime, fd);
    set_errno(before);
    Some((runtime, place?))
}
