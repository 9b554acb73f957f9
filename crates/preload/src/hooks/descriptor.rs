//! Calls that make descriptors, copy them, and end them; and what programs ask about connections.

use libc::{c_int, c_uint, c_ulong, c_void, sockaddr, socklen_t};

use super::{connection, errno, real, returned, set_errno};
use crate::runtime::{Runtime, runtime};
use crate::{descriptors, receive};

/// Does something about descriptors that leaves errno alone.
fn quietly(what: impl FnOnce(&'static Runtime)) {
    if let Some(runtime) = runtime() {
        let before = errno();
        what(runtime);
        set_errno(before);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the program's address, here and in all that follow the program's own call.
    let family = if address.is_null() || length < 2 { 0 } else { unsafe { (*address).sa_family } };
    if fd >= 0 && matches!(c_int::from(family), libc::AF_INET | libc::AF_INET6) {
        quietly(|_| descriptors::connecting(fd));
    } else if fd >= 0 && !address.is_null() && c_int::from(family) == libc::AF_UNSPEC {
        quietly(|runtime| descriptors::dissolved(runtime, fd));
    }
    // SAFETY: as above.
    unsafe { real::connect(fd, address, length) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if fd >= 0 {
        quietly(|_| descriptors::listening(fd));
    }
    // SAFETY: as above.
    unsafe { real::listen(fd, backlog) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: as above.
    let accepted = unsafe { real::accept(fd, address, length) };
    if accepted >= 0 {
        quietly(|runtime| descriptors::accepted(runtime, fd, accepted));
    }
    accepted
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: as above.
    let accepted = unsafe { real::accept4(fd, address, length, flags) };
    if accepted >= 0 {
        quietly(|runtime| descriptors::accepted(runtime, fd, accepted));
    }
    accepted
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // The kernel would count the bytes of references.
    if level == libc::SOL_SOCKET && option == libc::SO_RCVLOWAT && connection(fd).is_some() {
        return 0;
    }
    // SAFETY: as above.
    unsafe { real::setsockopt(fd, level, option, value, length) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if descriptors::is_kept(fd) {
        set_errno(libc::EBADF);
        return -1;
    }
    let place = descriptors::closing(fd);
    // SAFETY: as above.
    let outcome = unsafe { real::close(fd) };
    if place.is_some() {
        quietly(|runtime| descriptors::closed(runtime, place));
    }
    outcome
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    /// <linux/close_range.h>: marks them, and closes none.
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if flags & CLOSE_RANGE_CLOEXEC != 0 || runtime().is_none() {
        // SAFETY: as above.
        return unsafe { real::close_range(first, last, flags) };
    }
    if first > last {
        set_errno(libc::EINVAL);
        return -1;
    }
    // One at a time, around our own.
    let end = last.min(descriptors::highest().unsigned_abs());
    for fd in first..=end {
        let before = errno();
        // SAFETY: as above.
        if unsafe { close(fd as c_int) } != 0 {
            set_errno(before);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: as above.
    unsafe { close_range(first.max(0).unsigned_abs(), c_uint::MAX, 0) };
}

/// After a call that has made a copy of `from`.
fn copied(from: c_int, to: c_int) -> c_int {
    if to >= 0 {
        quietly(|_| descriptors::duplicated(from, to));
    }
    to
}

/// A call that puts a copy in the place of `to`.
fn replaces(from: c_int, to: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if descriptors::is_kept(to) {
        // As for a number beyond the limit.
        set_errno(libc::EBADF);
        return -1;
    }
    let is_open = from >= 0 && from != to && rustix::io::fcntl_getfd(descriptors::borrow(from)).is_ok();
    let place = if is_open { descriptors::closing(to) } else { None };
    let outcome = copied(from, call());
    if place.is_some() {
        quietly(|runtime| descriptors::closed(runtime, place));
    }
    outcome
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: as above.
    copied(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: as above.
    replaces(from, to, || unsafe { real::dup2(from, to) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: as above.
    replaces(from, to, || unsafe { real::dup3(from, to, flags) })
}

/// The third argument is an int, a pointer or absent: a register in each case (System V ABI, x86_64).
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: as above.
    let outcome = unsafe { real::fcntl(fd, command, argument) };
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { copied(fd, outcome) } else { outcome }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: as above.
    let outcome = unsafe { real::fcntl64(fd, command, argument) };
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { copied(fd, outcome) } else { outcome }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    if request == libc::FIONREAD
        && argument != 0
        && let Some((runtime, place)) = connection(fd)
    {
        return match receive::available(runtime, fd, place) {
            Ok(bytes) => {
                // SAFETY: FIONREAD's argument is a pointer to an int.
                unsafe { (argument as *mut c_int).write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
                0
            }
            Err(errno) => returned(Err(errno)) as c_int,
        };
    }
    // SAFETY: as above.
    unsafe { real::ioctl(fd, request, argument) }
}

/// A child of vfork shares the parent's memory: what it closes and copies would be the parent's connections that we
/// forget. As fork it has its own.
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> libc::pid_t {
    // SAFETY: as above.
    unsafe { real::fork() }
}
