//! Waits of a read that finds too few bytes, or of a write that finds too little room. They end as the kernel's own
//! waits do: when the socket is ready, after the socket's timeouts, and by signals. Bytes in a socket may be
//! *references*, which stand for bytes in a store.

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

/// Calls glibc's recvmsg(2), which may wait and lets the thread be cancelled.
pub fn patient(fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let mut message = kernel::message(iov);
    // SAFETY: the parts are memory of the program or of the library, which is writable during the call.
    let got = unsafe { real::recvmsg(fd, &raw mut message, flags) };
    usize::try_from(got).map_err(|_| errno())
}

/// Calls glibc's splice(2), which may wait and lets the thread be cancelled.
pub fn splice(from: RawFd, to: RawFd, bytes: usize, flags: u32) -> Result<usize, Errno> {
    let nowhere = std::ptr::null_mut();
    // SAFETY: the call takes descriptors, and null in place of offsets.
    let moved = unsafe { real::splice(from, nowhere, to, nowhere, bytes, flags) };
    usize::try_from(moved).map_err(|_| errno())
}

/// Whether the program's call waits: neither `flags` nor the descriptor is nonblocking.
pub fn waits(fd: RawFd, flags: i32) -> bool {
    let nonblocking = rustix::fs::fcntl_getfl(kernel::borrow(fd));
    flags & libc::MSG_DONTWAIT == 0 && !nonblocking.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits until the socket has `needed` bytes, headers and references included, or will get no more. The socket's
/// timeout and signals end the wait as they end the program's own call. Returns false if the socket has nothing and
/// will get nothing.
pub fn wait(fd: RawFd, flags: i32, needed: usize) -> Result<bool, Errno> {
    if !waits(fd, flags) {
        return Err(libc::EAGAIN);
    }
    let mut seen = [0; REFERENCE_BYTES];
    let needed = needed.min(seen.len());
    let got = outside(|| patient(fd, &own(&mut seen[..needed]), libc::MSG_PEEK | libc::MSG_WAITALL))?;
    // If there are fewer bytes than needed, a signal came, or the stream has ended. The caller's next look at the
    // socket finds out which.
    Ok(got > 0)
}

/// Whether a few bytes can be sent without waiting. If not, the kernel reports when they can, because tcp_poll notes
/// that somebody has asked.
pub fn has_room(fd: RawFd) -> bool {
    let mut wanted = [PollFd::from_borrowed_fd(kernel::borrow(fd), PollFlags::OUT)];
    poll(&mut wanted, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

/// Makes a socket report that it has room, now or as soon as it has some. A program that was told that there is none,
/// or that has written less than it wanted to, waits for that change (epoll(7), EPOLLET).
pub fn announce_room(socket: impl AsFd) {
    // If there is no room, the kernel notes that somebody asks. If there is, it wakes waiters whenever the bound of
    // unsent bytes is set (tcp.c, TCP_NOTSENT_LOWAT; stream.c, sk_stream_write_space).
    has_room(socket.as_fd().as_raw_fd());
    if let Ok(bound) = get_i32(&socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT) {
        let _ = set_i32(&socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bound);
    }
}

/// Whether a program whose write ends early will soon write the rest by another call. A program does so if its calls do
/// not wait and the socket is a TCP socket. In that case this makes the socket report that there is room.
pub fn comes_again(fd: RawFd, flags: i32) -> bool {
    let socket = kernel::borrow(fd);
    let comes_again = !waits(fd, flags) && socket_protocol(socket) == Ok(Some(ipproto::TCP));
    if comes_again {
        announce_room(socket);
    }
    comes_again
}

/// Whether the connection is over: both ends have closed it, or it has broken.
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

/// Makes a socket that is readable, or at its end, report this once more. A program that was given less than it asked
/// for waits for such a report (epoll(7), EPOLLET). The kernel makes this report whenever SO_RCVLOWAT is set
/// (tcp_set_rcvlowat).
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
