//! System calls that are not interposed. They do not use libc's functions, which are interposed, and in which a thread
//! can be cancelled (pthreads(7)) while a connection's state is half changed.

use std::arch::asm;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use libc::{c_int, c_long, iovec, msghdr};

/// Error number of a system call.
pub type Errno = i32;

/// Borrows a descriptor that the program has passed in a call, for the time of that call.
pub fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    debug_assert!(fd >= 0);
    // SAFETY: used only during the program's call. If the number is closed meanwhile, calls fail as they would without
    // the library.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Makes any system call.
///
/// # Safety
/// As for that system call.
#[inline]
pub unsafe fn call(number: c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let outcome: isize;
    // SAFETY: the kernel's convention on x86_64 (syscall(2)). The caller keeps the rules of that system call.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => outcome,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    usize::try_from(outcome).map_err(|_| -outcome as Errno)
}

/// Memory of the library's own, as a single part.
pub fn own(bytes: &mut [u8]) -> [iovec; 1] {
    [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }]
}

/// A message header that points to these parts.
pub fn message(iov: &[iovec]) -> msghdr {
    // SAFETY: all zeros is an empty message.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len().min(libc::UIO_MAXIOV as usize);
    message
}

/// Calls sendmsg(2), or sendto(2) for a single part, which costs the kernel less.
#[inline]
pub fn send(fd: c_int, iov: &[iovec], flags: c_int) -> Result<usize, Errno> {
    if let [part] = iov {
        // SAFETY: the kernel reads the part, and returns EFAULT if it cannot be read.
        return unsafe {
            call(libc::SYS_sendto, [fd as usize, part.iov_base as usize, part.iov_len, flags as usize, 0, 0])
        };
    }
    let message = message(iov);
    // SAFETY: the kernel reads the message and its parts, and returns EFAULT for parts that cannot be read.
    unsafe { call(libc::SYS_sendmsg, [fd as usize, &raw const message as usize, flags as usize, 0, 0, 0]) }
}

/// Calls sendfile(2), from offset `from` of the file.
pub fn send_file(fd: c_int, file: BorrowedFd<'_>, from: u64, bytes: usize) -> Result<usize, Errno> {
    let mut from = from;
    let (file, at) = (file.as_raw_fd() as usize, &raw mut from as usize);
    // SAFETY: the kernel reads and writes the offset during the call.
    unsafe { call(libc::SYS_sendfile, [fd as usize, file, at, bytes, 0, 0]) }
}

/// Calls recvmsg(2), or recvfrom(2) for a single part, which costs the kernel less.
#[inline]
pub fn receive(fd: c_int, iov: &[iovec], flags: c_int) -> Result<usize, Errno> {
    if let [part] = iov {
        // SAFETY: the part is the library's own memory, or memory that the program has given to be written.
        return unsafe {
            call(libc::SYS_recvfrom, [fd as usize, part.iov_base as usize, part.iov_len, flags as usize, 0, 0])
        };
    }
    let mut message = message(iov);
    // SAFETY: the parts are the library's own memory, or memory that the program has given to be written.
    unsafe { call(libc::SYS_recvmsg, [fd as usize, &raw mut message as usize, flags as usize, 0, 0, 0]) }
}
