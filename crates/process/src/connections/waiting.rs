//! What a read or a write waits for that finds too little: the kernel's own readiness, timeouts and signals.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::ipproto;
use rustix::net::sockopt::socket_protocol;
use shunt_odb::reference::REFERENCE_BYTES;
use shunt_sys::sockopt::{get_i32, set_i32};

use crate::system::inside::outside;
use crate::system::kernel::{self, Errno, own};
use crate::system::real::{self, errno};

/// recvmsg(2) that may wait: glibc's, where the thread may be cancelled.
pub fn patient(fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let mut message = kernel::message(iov);
    // SAFETY: the parts are the program's or our own, writable for the call.
    let got = unsafe { real::recvmsg(fd, &raw mut message, flags) };
    usize::try_from(got).map_err(|_| errno())
}

/// splice(2) that may wait, as above.
pub fn splice(from: RawFd, to: RawFd, bytes: usize, flags: u32) -> Result<usize, Errno> {
    let nowhere = std::ptr::null_mut();
    // SAFETY: takes descriptors and no offsets.
    let moved = unsafe { real::splice(from, nowhere, to, nowhere, bytes, flags) };
    usize::try_from(moved).map_err(|_| errno())
}

/// Whether the program waits in this call for what is not there.
pub fn waits(fd: RawFd, flags: i32) -> bool {
    let nonblocking = rustix::fs::fcntl_getfl(kernel::borrow(fd));
    flags & libc::MSG_DONTWAIT == 0 && !nonblocking.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits as the program's own call would, with its timeout and its signals, until so many bytes of ours are there, or
/// fewer, and no more come. False: nothing is there, and nothing will come.
pub fn wait(fd: RawFd, flags: i32, needed: usize) -> Result<bool, Errno> {
    if !waits(fd, flags) {
        return Err(libc::EAGAIN);
    }
    let mut seen = [0; REFERENCE_BYTES];
    let needed = needed.min(seen.len());
    let got = outside(|| patient(fd, &own(&mut seen[..needed]), libc::MSG_PEEK | libc::MSG_WAITALL))?;
    // Less of it: a signal came, or the end, and then it is for the program what it is.
    Ok(got > 0)
}

/// Whether a few bytes go out without waiting. Where they do not, the kernel says when they do (tcp_poll notes who asks).
pub fn has_room(fd: RawFd) -> bool {
    let mut wanted = [PollFd::from_borrowed_fd(kernel::borrow(fd), PollFlags::OUT)];
    poll(&mut wanted, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

/// Has a socket say that it has room, now or once it has: a program that was told otherwise, or that has written less than it wanted
/// to, waits for that to change (epoll(7), EPOLLET).
pub fn announce_room(socket: impl AsFd) {
    // Where there is none, the kernel notes that somebody asks. And where there is, it looks for who waits whenever the bound of unsent
    // bytes is set (tcp.c, TCP_NOTSENT_LOWAT; stream.c, sk_stream_write_space).
    has_room(socket.as_fd().as_raw_fd());
    if let Ok(bound) = get_i32(&socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT) {
        let _ = set_i32(&socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bound);
    }
}

/// Whether a program writes the rest of what it has written only in part by another call, soon: it does not wait in its calls, and
/// is told that there is room.
pub fn comes_again(fd: RawFd, flags: i32) -> bool {
    let socket = kernel::borrow(fd);
    let comes_again = !waits(fd, flags) && socket_protocol(socket) == Ok(Some(ipproto::TCP));
    if comes_again {
        announce_room(socket);
    }
    comes_again
}

/// Whether nothing comes and goes any more: both ends have said so, or the connection has broken.
pub fn is_over(fd: RawFd) -> bool {
    let mut wanted = [PollFd::from_borrowed_fd(kernel::borrow(fd), PollFlags::empty())];
    poll(&mut wanted, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

/// Whether the other end will send no more.
pub fn ended(fd: RawFd) -> bool {
    let asked = PollFlags::RDHUP;
    let mut wanted = [PollFd::from_borrowed_fd(kernel::borrow(fd), asked)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut wanted, Some(&now)).is_ok() && wanted[0].revents().intersects(asked | PollFlags::HUP | PollFlags::ERR)
}

/// Has a socket that is readable, or at its end, say so once more: a program that was given less than it asked for waits for
/// that (epoll(7), EPOLLET). The kernel looks at what is there whenever this bound is set (tcp_set_rcvlowat).
pub fn announce(fd: RawFd) {
    let one: libc::c_int = 1;
    let (value, bytes) = (&raw const one as usize, size_of_val(&one));
    // SAFETY: a value of that size, readable for the call.
    let _ = unsafe {
        kernel::call(
            libc::SYS_setsockopt,
            [fd as usize, libc::SOL_SOCKET as usize, libc::SO_RCVLOWAT as usize, value, bytes, 0],
        )
    };
}
