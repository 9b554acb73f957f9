//! Calls that make, copy and close descriptors, and calls by which programs ask about connections or set their options.
//! A connection between two programs under Shunt (started by `shunt run`) is *framed*: it carries references to bytes
//! beside real bytes.

use libc::{c_int, c_uint, c_ulong, c_void, sockaddr, socklen_t};
use shunt_process::bypass;
use shunt_process::connections::runtime::{Runtime, runtime};
use shunt_process::connections::{available, entries};
use shunt_process::descriptors;
use shunt_process::system::inside::Inside;
use shunt_process::system::kernel;

use super::{connection, errno, real, returned, set_errno};

/// Calls `what` if the library is active, and preserves the program's errno.
fn quietly(what: impl FnOnce(&'static Runtime)) {
    if let Some(runtime) = runtime() {
        let before = errno();
        what(runtime);
        set_errno(before);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the address is the program's, and long enough to contain its family.
    let family = if address.is_null() || length < 2 { 0 } else { unsafe { (*address).sa_family } };
    if fd >= 0 && matches!(c_int::from(family), libc::AF_INET | libc::AF_INET6) {
        quietly(|runtime| {
            descriptors::connecting(runtime, fd);
            bypass::connecting(fd);
        });
    } else if fd >= 0 && !address.is_null() && c_int::from(family) == libc::AF_UNSPEC {
        quietly(|runtime| descriptors::dissolved(runtime, fd));
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::connect(fd, address, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if fd >= 0 {
        quietly(|_| descriptors::listening(fd));
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::listen(fd, backlog) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let accepted = unsafe { real::accept(fd, address, length) };
    if accepted >= 0 {
        quietly(|runtime| descriptors::accepted(runtime, fd, accepted));
    }
    accepted
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let accepted = unsafe { real::accept4(fd, address, length, flags) };
    if accepted >= 0 {
        quietly(|runtime| descriptors::accepted(runtime, fd, accepted));
    }
    accepted
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // SO_RCVLOWAT is ignored, because the kernel would count the bytes of references, and not those that they stand
    // for.
    if level == libc::SOL_SOCKET && option == libc::SO_RCVLOWAT && connection(fd).is_some() {
        return 0;
    }
    if level == libc::SOL_SOCKET && option == libc::SO_ZEROCOPY && runtime().is_some() {
        // With this option, the kernel numbers the program's writes, and tells the program of which writes it has read
        // the memory. A framed write makes other system calls than the program, so the numbers would be wrong.
        set_errno(libc::EOPNOTSUPP);
        return -1;
    }
    if level == libc::IPPROTO_TCP && option == libc::TCP_ULP && connection(fd).is_some() {
        // A protocol between the program and TCP (kTLS) would take frames for the program's bytes. The error is that of
        // a kernel without such protocols.
        set_errno(libc::ENOENT);
        return -1;
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::setsockopt(fd, level, option, value, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    /// Option of <linux/tcp.h> that maps received bytes.
    const TCP_ZEROCOPY_RECEIVE: c_int = 35;
    if level == libc::IPPROTO_TCP && option == TCP_ZEROCOPY_RECEIVE && connection(fd).is_some() {
        set_errno(libc::EOPNOTSUPP);
        return -1;
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::getsockopt(fd, level, option, value, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    descriptors::forget_entry(fd);
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let outcome = unsafe { real::socketpair(domain, kind, protocol, pair) };
    if outcome == 0 {
        // SAFETY: the kernel has written both descriptors.
        (0..2).for_each(|at| descriptors::forget_entry(unsafe { *pair.add(at) }));
    }
    outcome
}

/// daemon(3), by which glibc puts /dev/null in the place of the standard streams.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn daemon(stays: c_int, keeps: c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let outcome = unsafe { real::daemon(stays, keeps) };
    if outcome == 0 && keeps == 0 {
        (0..3).for_each(descriptors::forget_entry);
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if entries::is_kept(fd) {
        set_errno(libc::EBADF);
        return -1;
    }
    let place = descriptors::closing(fd);
    bypass::forget(fd);
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let outcome = unsafe { real::close(fd) };
    if place.is_some() {
        quietly(|runtime| descriptors::closed(runtime, place));
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if runtime().is_none() || first > last {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::close_range(first, last, flags) };
    }
    // The library's own descriptors stay open.
    let end = last.min(entries::highest().unsigned_abs());
    let mut from = first;
    for fd in first..=end {
        if !entries::is_kept(fd as c_int) {
            continue;
        }
        // SAFETY: the arguments are valid for this call, because the program's call of `close_range` needs the same.
        if fd > from && unsafe { close_between(from, fd - 1, flags) } != 0 {
            return -1;
        }
        from = fd + 1;
    }
    // SAFETY: the arguments are valid for this call, because the program's call of `close_range` needs the same.
    if from <= last { unsafe { close_between(from, last, flags) } } else { 0 }
}

/// Calls close_range(2) for descriptors of which none is the library's own, and notes those that are closed by it.
///
/// # Safety
/// As for close_range(2).
unsafe fn close_between(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    /// Flag of <linux/close_range.h>: marks the descriptors as close-on-exec, and closes none.
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    let closes = flags & CLOSE_RANGE_CLOEXEC == 0;
    let numbers = first..=last.min(entries::highest().unsigned_abs());
    let places: Vec<_> =
        if closes { numbers.filter_map(|fd| descriptors::closing(fd as c_int)).collect() } else { Vec::new() };
    // SAFETY: the caller keeps the rules of close_range(2).
    let outcome = unsafe { real::close_range(first, last, flags) };
    for place in places {
        quietly(|runtime| descriptors::closed(runtime, Some(place)));
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: the arguments are valid for this call, because the program's call of `closefrom` needs the same.
    unsafe { close_range(first.max(0).unsigned_abs(), c_uint::MAX, 0) };
}

/// pidfd_getfd(2), which copies another process's descriptor (Linux 5.6).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pidfd_getfd(process: c_int, fd: c_int, flags: c_uint) -> c_int {
    // The system call is made by its number, because glibc has the function only since 2.36.
    let arguments = [process as usize, fd as usize, flags as usize, 0, 0, 0];
    // SAFETY: the arguments are valid for this call, because the program's call of `pidfd_getfd` needs the same.
    let copy = returned(unsafe { kernel::call(libc::SYS_pidfd_getfd, arguments) }) as c_int;
    if copy >= 0 {
        quietly(|runtime| descriptors::arrived(runtime, copy));
    }
    copy
}

/// Notes that a call has made `to`, a copy of the descriptor `from`. Returns `to`, which is negative if the call has
/// failed.
fn copied(from: c_int, to: c_int) -> c_int {
    if to >= 0 {
        quietly(|_| descriptors::duplicated(from, to));
    }
    to
}

/// Makes a call that puts a copy of `from` in the place of `to`, as dup2(2) does.
fn replaces(from: c_int, to: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if entries::is_kept(to) {
        // The kernel's error for a number beyond the limit.
        set_errno(libc::EBADF);
        return -1;
    }
    let is_open = from >= 0 && from != to && rustix::io::fcntl_getfd(kernel::borrow(from)).is_ok();
    let place = if is_open { descriptors::closing(to) } else { None };
    let outcome = copied(from, call());
    if place.is_some() {
        quietly(|runtime| descriptors::closed(runtime, place));
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    copied(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    replaces(from, to, || unsafe { real::dup2(from, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    replaces(from, to, || unsafe { real::dup3(from, to, flags) })
}

/// fcntl(2). Its third argument is an int or a pointer, or there is none. If there is one, it is in a register in each
/// case (System V ABI, x86_64).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    if command == libc::F_SETFD && entries::is_kept(fd) {
        return 0;
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let outcome = unsafe { real::fcntl(fd, command, argument) };
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { copied(fd, outcome) } else { outcome }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: passes the program's arguments on to the same function under its other name.
    unsafe { fcntl(fd, command, argument) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    if request == libc::FIONREAD
        && argument != 0
        && let Some((runtime, place)) = connection(fd)
    {
        // A signal handler that has interrupted the library is told that there are 0 bytes now, and may ask again.
        let there = Inside::enter().map_or(Ok(0), |_inside| available::available(runtime, fd, place));
        return match there {
            Ok(bytes) => {
                // SAFETY: FIONREAD's argument is a pointer to an int.
                unsafe { (argument as *mut c_int).write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
                0
            }
            Err(errno) => returned(Err(errno)) as c_int,
        };
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::ioctl(fd, request, argument) }
}

/// vfork(2), done as fork(2), because a child of vfork(2) shares the parent's memory. If such a child closed or copied
/// descriptors, the library would forget connections of the parent. A forked child has its own memory.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vfork() -> libc::pid_t {
    // SAFETY: fork(3) takes no arguments.
    unsafe { real::fork() }
}

same! {
    __close is close(fd: c_int) -> c_int;
    __connect is connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    __dup2 is dup2(from: c_int, to: c_int) -> c_int;
    __fcntl is fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
    __vfork is vfork() -> libc::pid_t;
}
