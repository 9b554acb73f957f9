//! Reads and writes, by every function that glibc has for them. A connection between two programs under Shunt (started
//! by `shunt run`) is *framed*: it carries references to bytes beside real bytes, and crates/process reads and writes
//! it. Memory may be absent, which means that it stands for bytes in a store. If a program writes absent memory to a
//! descriptor, the bytes are fetched, or another machine sends them. All other calls are glibc's.

use std::os::fd::RawFd;

use libc::{c_int, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use shunt_process::bypass;
use shunt_process::connections::runtime::{Runtime, runtime};
use shunt_process::connections::{reading, receive, send};
use shunt_process::descriptors;
use shunt_process::memory::any_absent;
use shunt_process::memory::outside;
use shunt_process::system::inside::Inside;
use shunt_process::system::kernel::Errno;
use shunt_process::system::parts::addresses;

use super::{connection, errno, real, returned, set_errno};

fn part(at: *const c_void, bytes: size_t) -> iovec {
    iovec { iov_base: at.cast_mut(), iov_len: bytes }
}

/// Returns the parts of memory that the program has passed. `None` if they are invalid: then the kernel says what is
/// wrong with them.
///
/// # Safety
/// There are `count` iovecs at `iov`, as the program promises to the kernel.
unsafe fn parts<'a>(iov: *const iovec, count: usize) -> Option<&'a [iovec]> {
    match count {
        0 => Some(&[]),
        // SAFETY: the caller promises that there are `count` iovecs.
        1..=MOST_PARTS if !iov.is_null() => Some(unsafe { std::slice::from_raw_parts(iov, count) }),
        _ => None,
    }
}

const MOST_PARTS: usize = libc::UIO_MAXIOV as usize;
/// Flags of reads that get something beside the stream: urgent bytes, or errors. Such reads go to the kernel.
const BESIDE: c_int = libc::MSG_OOB | libc::MSG_ERRQUEUE;

/// Reads, if the descriptor is a framed connection's. Returns `None` if glibc's function has to read. If bytes are
/// there to be read, absent memory in the buffers is given up without a fetch, because the read overwrites it.
fn reads(fd: RawFd, iov: Option<&[iovec]>, flags: c_int) -> Option<ssize_t> {
    let iov = iov?;
    if let Some((runtime, place)) = connection(fd) {
        if flags & BESIDE != 0 {
            return None;
        }
        let Some(_inside) = Inside::enter() else { return Some(returned(Err(libc::EAGAIN))) };
        return ours(fd, receive::read(runtime, fd, place, iov, flags));
    }
    if any_absent()
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        reading::overwriting(runtime, fd, iov);
    }
    None
}

/// The call by which a program writes.
#[derive(Clone, Copy)]
enum How {
    Write,
    Send(c_int),
    /// A call that may pass more than bytes, such as an address.
    Message(c_int),
}

/// Writes, if the descriptor is a framed connection's, or memory is absent. Returns `None` if glibc's function has to
/// write.
fn writes(fd: RawFd, iov: Option<&[iovec]>, how: How) -> Option<ssize_t> {
    let iov = iov?;
    let flags = match how {
        How::Write => 0,
        How::Send(flags) | How::Message(flags) => flags,
    };
    if let Some((runtime, place)) = connection(fd) {
        let Some(_inside) = Inside::enter() else { return Some(returned(Err(libc::EAGAIN))) };
        return ours(fd, send::write(runtime, fd, place, iov, flags));
    }
    if bypass::is_full_of_rescue(fd, flags) {
        return Some(returned(Err(libc::EAGAIN)));
    }
    if let How::Message(_) = how {
        return fetches(iov);
    }
    if any_absent()
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
        && iov.iter().any(|part| runtime.memory.meets(&addresses(part)))
    {
        return Some(returned(bypass::write(runtime, fd, iov, flags, |iov| match how {
            How::Write => outside::writev(fd, iov),
            _ => outside::sendmsg(fd, iov, flags),
        })));
    }
    None
}

/// Fetches absent memory that is written elsewhere than to a framed connection: all of it together, not page by page.
/// Returns `None` if glibc's function can write now, and -1 if the bytes cannot be fetched.
fn fetches(iov: &[iovec]) -> Option<ssize_t> {
    if any_absent()
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        for part in iov {
            let memory = part.iov_base as usize..(part.iov_base as usize).saturating_add(part.iov_len);
            if runtime.memory.fetch_range(&memory).is_err() {
                set_errno(libc::ECONNRESET);
                return Some(-1);
            }
        }
    }
    None
}

/// Returns the result of a call on a framed connection, as glibc's functions do. `None` if the descriptor is no socket
/// any more: glibc closes some descriptors by itself.
fn ours(fd: RawFd, outcome: Result<usize, Errno>) -> Option<ssize_t> {
    if outcome == Err(libc::ENOTSOCK) {
        descriptors::forget_entry(fd);
        return None;
    }
    Some(returned(outcome))
}

/// Flags of recv(2) and send(2) for those flags of preadv2(2) and pwritev2(2) that matter here.
fn stream_flags(flags: c_int) -> c_int {
    if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, to: *mut c_void, bytes: size_t) -> ssize_t {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    reads(fd, Some(&[part(to, bytes)]), 0).unwrap_or_else(|| unsafe { real::read(fd, to, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(fd: c_int, to: *mut c_void, bytes: size_t, room: size_t) -> ssize_t {
    checked(bytes, room);
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { read(fd, to, bytes) }
}

/// Aborts if a buffer is too small, as glibc's fortified functions do.
pub fn checked(bytes: size_t, room: size_t) {
    if bytes > room {
        // SAFETY: ends the process.
        unsafe { libc::abort() }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program promises as many iovecs as it says.
    let buffers = unsafe { parts(iov, usize::try_from(count).unwrap_or(usize::MAX)) };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    reads(fd, buffers, 0).unwrap_or_else(|| unsafe { real::readv(fd, iov, count) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, to: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    reads(fd, Some(&[part(to, bytes)]), flags).unwrap_or_else(|| unsafe { real::recv(fd, to, bytes, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    to: *mut c_void,
    bytes: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    checked(bytes, room);
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { recv(fd, to, bytes, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    bytes: size_t,
    flags: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    let ours = reads(fd, Some(&[part(to, bytes)]), flags);
    if ours.is_some() && !length.is_null() {
        // recvfrom(2) on a connected socket returns no address.
        // SAFETY: the program's variable for the address's length.
        unsafe { *length = 0 };
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    ours.unwrap_or_else(|| unsafe { real::recvfrom(fd, to, bytes, flags, from, length) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    bytes: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    checked(bytes, room);
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { recvfrom(fd, to, bytes, flags, from, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the message is null or valid, by the program's promise. A null one is for the kernel to refuse.
    let Some(asked) = (unsafe { message.as_mut() }) else {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::recvmsg(fd, message, flags) };
    };
    // SAFETY: the program promises as many iovecs as it says.
    let buffers = unsafe { parts(asked.msg_iov, asked.msg_iovlen) };
    if let Some(got) = reads(fd, buffers, flags) {
        (asked.msg_namelen, asked.msg_controllen, asked.msg_flags) = (0, 0, 0);
        return got;
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    let got = unsafe { real::recvmsg(fd, message, flags) };
    if got >= 0 && asked.msg_controllen > 0 {
        // SAFETY: the kernel has just written it.
        unsafe { passed(asked, descriptors::arrived) };
    }
    got
}

/// Calls `then` for each descriptor that a message carries (SCM_RIGHTS). Any of them may lead to a framed connection.
///
/// # Safety
/// The control data that the message describes is readable.
unsafe fn passed(message: &msghdr, then: impl Fn(&Runtime, RawFd)) {
    let Some(runtime) = runtime() else { return };
    let before = errno();
    // SAFETY: the caller promises that the control data is readable.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(message);
        while !control.is_null() {
            if (*control).cmsg_level == libc::SOL_SOCKET && (*control).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(control);
                // Descriptors are read only up to the end of the message's control data, even if the program gives a
                // greater length: the kernel would refuse such a message.
                let end = message.msg_control as usize + message.msg_controllen;
                let bytes = (*control).cmsg_len.saturating_sub(data as usize - control as usize);
                let bytes = bytes.min(end.saturating_sub(data as usize));
                for at in 0..bytes / size_of::<RawFd>() {
                    then(runtime, data.cast::<RawFd>().add(at).read_unaligned());
                }
            }
            control = libc::CMSG_NXTHDR(message, control);
        }
    }
    set_errno(before);
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if connection(fd).is_none() || count == 0 || messages.is_null() {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        let got = unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
        // SAFETY: the kernel has just written `got` messages.
        (0..got.max(0) as usize).for_each(|at| unsafe { passed(&(*messages.add(at)).msg_hdr, descriptors::arrived) });
        return got;
    }
    // A stream has no messages, so one read does all that is asked.
    // SAFETY: `messages` points to at least one message, by the program's promise.
    let got = unsafe { recvmsg(fd, &raw mut (*messages).msg_hdr, flags) };
    if got < 0 {
        return -1;
    }
    // SAFETY: `messages` points to at least one message, by the program's promise.
    unsafe { (*messages).msg_len = got as u32 };
    1
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, bytes: size_t) -> ssize_t {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    writes(fd, Some(&[part(from, bytes)]), How::Write).unwrap_or_else(|| unsafe { real::write(fd, from, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program promises as many iovecs as it says.
    let memory = unsafe { parts(iov, usize::try_from(count).unwrap_or(usize::MAX)) };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    writes(fd, memory, How::Write).unwrap_or_else(|| unsafe { real::writev(fd, iov, count) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, from: *const c_void, bytes: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    writes(fd, Some(&[part(from, bytes)]), How::Send(flags))
        .unwrap_or_else(|| unsafe { real::send(fd, from, bytes, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    from: *const c_void,
    bytes: size_t,
    flags: c_int,
    to: *const sockaddr,
    length: socklen_t,
) -> ssize_t {
    writes(fd, Some(&[part(from, bytes)]), How::Message(flags))
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        .unwrap_or_else(|| unsafe { real::sendto(fd, from, bytes, flags, to, length) })
}

/// Looks at the descriptors that a message carries. If one leads to a framed connection, leaves the connection's state
/// with its socket, because the receiver of the message may be another user's process.
///
/// # Safety
/// `message` is null, or a message as for sendmsg(2).
unsafe fn leaves(message: *const msghdr) {
    // SAFETY: the caller promises that `message` is null or a message.
    if let Some(message) = unsafe { message.as_ref() }
        && !message.msg_control.is_null()
        && let Some(_inside) = Inside::enter()
    {
        // SAFETY: the caller promises a message as for sendmsg(2), whose control data is readable.
        unsafe { passed(message, descriptors::passing) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the message is null or valid, by the program's promise. A null one is for the kernel to refuse.
    let memory = unsafe { message.as_ref().and_then(|asked| parts(asked.msg_iov, asked.msg_iovlen)) };
    // SAFETY: the message is null or valid, by the program's promise.
    unsafe { leaves(message) };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    writes(fd, memory, How::Message(flags)).unwrap_or_else(|| unsafe { real::sendmsg(fd, message, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int) -> c_int {
    if connection(fd).is_none() || messages.is_null() {
        if !messages.is_null() {
            // SAFETY: `messages` points to `count` messages, by the program's promise.
            (0..count as usize).for_each(|at| unsafe { leaves(&raw const (*messages.add(at)).msg_hdr) });
        }
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    for at in 0..count as usize {
        // SAFETY: `messages` points to `count` messages, by the program's promise.
        let message = unsafe { &mut *messages.add(at) };
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        let sent = unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) };
        if sent < 0 {
            return if at > 0 { at as c_int } else { -1 };
        }
        message.msg_len = sent as u32;
        // SAFETY: the program promises as many iovecs as it says.
        let iov = unsafe { parts(message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) };
        let asked: usize = iov.into_iter().flatten().map(|part| part.iov_len).sum();
        if (sent as usize) < asked {
            return at as c_int + 1;
        }
    }
    count as c_int
}

/// preadv2(2). With an offset of -1, it reads as readv(2) does.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program promises as many iovecs as it says.
    let buffers = unsafe { parts(iov, usize::try_from(count).unwrap_or(usize::MAX)) };
    let ours = if offset == -1 { reads(fd, buffers, stream_flags(flags)) } else { None };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    ours.unwrap_or_else(|| unsafe { real::preadv2(fd, iov, count, offset, flags) })
}

/// pwritev2(2). With an offset of -1, it writes as writev(2) does.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program promises as many iovecs as it says.
    let memory = unsafe { parts(iov, usize::try_from(count).unwrap_or(usize::MAX)) };
    let ours = if offset == -1 {
        writes(fd, memory, How::Message(stream_flags(flags)))
    } else {
        fetches(memory.unwrap_or(&[]))
    };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    ours.unwrap_or_else(|| unsafe { real::pwritev2(fd, iov, count, offset, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwrite64(fd: c_int, from: *const c_void, bytes: size_t, offset: off64_t) -> ssize_t {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    fetches(&[part(from, bytes)]).unwrap_or_else(|| unsafe { real::pwrite64(fd, from, bytes, offset) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    // SAFETY: the program promises as many iovecs as it says.
    let memory = unsafe { parts(iov, usize::try_from(count).unwrap_or(usize::MAX)) };
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    fetches(memory.unwrap_or(&[])).unwrap_or_else(|| unsafe { real::pwritev64(fd, iov, count, offset) })
}

same! {
    __read is read(fd: c_int, to: *mut c_void, bytes: size_t) -> ssize_t;
    __write is write(fd: c_int, from: *const c_void, bytes: size_t) -> ssize_t;
    __send is send(fd: c_int, from: *const c_void, bytes: size_t, flags: c_int) -> ssize_t;
    preadv64v2 is preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwritev64v2 is pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwrite is pwrite64(fd: c_int, from: *const c_void, bytes: size_t, offset: off64_t) -> ssize_t;
    __pwrite64 is pwrite64(fd: c_int, from: *const c_void, bytes: size_t, offset: off64_t) -> ssize_t;
    pwritev is pwritev64(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t) -> ssize_t;
}
