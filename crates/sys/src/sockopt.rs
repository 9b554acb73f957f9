//! Socket options and requests that no library wraps.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `setsockopt` with any plain value.
///
/// # Errors
/// The kernel's.
pub fn set<T: IntoBytes + Immutable + ?Sized>(socket: impl AsFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    let bytes = value.as_bytes();
    // SAFETY: pointer and length are those of one live slice, which the kernel only reads.
    let status = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            bytes.as_ptr().cast(),
            bytes.len() as libc::socklen_t,
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `setsockopt` with an `int`.
///
/// # Errors
/// The kernel's.
pub fn set_i32(socket: impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    set(socket, level, option, &value)
}

/// Upper bound of what the kernel sends a second on this connection, by its own pacing (tcp_output.c); `None`: no bound.
///
/// # Errors
/// The kernel's.
pub fn set_max_pacing_rate(socket: impl AsFd, bytes_per_second: Option<u64>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &bytes_per_second.unwrap_or(u64::MAX))
}

/// Bytes that are queued and not yet acknowledged (`SIOCOUTQ`, tcp(7)).
///
/// # Errors
/// The kernel's.
pub fn unacknowledged(socket: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (TIOCOUTQ) writes one int, which lives in this frame.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if status == 0 { Ok(bytes.max(0) as u32) } else { Err(io::Error::last_os_error()) }
}

/// The namespace's cookie (`SO_NETNS_COOKIE`), as BPF programs see it.
///
/// # Errors
/// The kernel's.
pub fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    get(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
}

fn get<T: FromBytes + IntoBytes>(socket: impl AsFd, level: i32, option: i32) -> io::Result<T> {
    let mut value = T::new_zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `value`, which is that long, and any bytes make a `T`.
    let status =
        unsafe { libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
    if status == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
