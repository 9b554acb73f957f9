//! Socket options and ioctls that no library wraps.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Sets a socket option to the bytes of `value`.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
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

/// Sets a socket option of type `int`.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
pub fn set_i32(socket: impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    set(socket, level, option, &value)
}

/// Returns a socket option of type `int`.
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn get_i32(socket: impl AsFd, level: i32, option: i32) -> io::Result<i32> {
    let (mut value, mut length): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel writes one int and its length, which live in this frame.
    let status = unsafe {
        let into = std::ptr::from_mut(&mut value).cast();
        libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, into, &mut length)
    };
    if status == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Limits the rate at which the kernel sends on this connection, by its own pacing (tcp_output.c); `None`: no limit.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
pub fn set_max_pacing_rate(socket: impl AsFd, bytes_per_second: Option<u64>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &bytes_per_second.unwrap_or(u64::MAX))
}

/// Sets the initial send buffer of a TCP socket, in bytes. The machine's limits do not apply. The buffer later grows
/// with the congestion window (tcp_input.c, `tcp_sndbuf_expand`); SO_SNDBUF alone would fix its size. Needs
/// CAP_NET_ADMIN.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
pub fn begin_with_send_buffer(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    /// Socket option since Linux 5.15, which libc does not have. With the value 0, neither buffer's size is fixed.
    const SO_BUF_LOCK: i32 = 72;
    rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, bytes)?;
    set_i32(socket, libc::SOL_SOCKET, SO_BUF_LOCK, 0)
}

/// Sets the largest segment that a socket announces to its peer when it connects: bytes of data and TCP options
/// (`TCP_MAXSEG`).
///
/// # Errors
/// Returns the kernel's error of setsockopt(2), which refuses values below 88.
pub fn set_max_segment(socket: impl AsFd, bytes: u16) -> io::Result<()> {
    set_i32(socket, libc::IPPROTO_TCP, libc::TCP_MAXSEG, bytes.into())
}

/// Returns the size of a full segment that a connected socket sends now, in bytes without TCP's header and options
/// (`TCP_MAXSEG`).
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn segment_bytes(socket: impl AsFd) -> io::Result<u32> {
    get_i32(socket, libc::IPPROTO_TCP, libc::TCP_MAXSEG).map(|bytes| bytes.max(0) as u32)
}

/// Returns the number of bytes in a TCP socket's send queue that are not acknowledged yet (`SIOCOUTQ`, tcp(7)).
///
/// # Errors
/// Returns the kernel's error of ioctl(2).
pub fn unacknowledged(socket: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (TIOCOUTQ) writes one int, which lives in this frame.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if status == 0 { Ok(bytes.max(0) as u32) } else { Err(io::Error::last_os_error()) }
}

/// Congestion state of a connection, from `TCP_INFO`.
#[derive(Clone, Copy, Debug)]
pub struct CongestionWindow {
    /// Congestion window, `snd_cwnd`, in segments.
    pub segments: u32,
    /// Maximum segment size in bytes.
    pub mss: u32,
    /// Whether nothing is being recovered, and no loss is suspected (TCP_CA_Open).
    pub open: bool,
    /// Number of segments retransmitted since the connection began.
    pub retransmitted: u32,
    /// Number of segments that are sent and not yet acknowledged.
    pub in_flight: u32,
}

/// Beginning of `struct tcp_info` (linux/tcp.h), up to the last field that this file needs.
#[derive(FromBytes, IntoBytes)]
#[repr(C)]
struct TcpInfo {
    state: u8,
    ca_state: u8,
    counts_and_options: [u8; 6],
    rto_and_ato: [u32; 2],
    snd_mss: u32,
    rcv_mss: u32,
    unacked: u32,
    others: [u32; 13],
    snd_cwnd: u32,
    more_others: [u32; 4],
    total_retrans: u32,
}

/// Returns the congestion state of a TCP connection (`TCP_INFO`, tcp(7)).
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn congestion_window(socket: impl AsFd) -> io::Result<CongestionWindow> {
    let info: TcpInfo = get(socket, libc::IPPROTO_TCP, libc::TCP_INFO)?;
    Ok(CongestionWindow {
        segments: info.snd_cwnd,
        mss: info.snd_mss,
        open: info.ca_state == 0,
        retransmitted: info.total_retrans,
        in_flight: info.unacked,
    })
}

/// Returns the cookie of the socket's network namespace (`SO_NETNS_COOKIE`), as BPF programs see it.
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    get(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
}

/// Returns the index of the interface that a socket is bound to, such as the VRF into which `ip vrf exec` puts sockets;
/// 0: none.
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn bound_interface(socket: impl AsFd) -> io::Result<u32> {
    get(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX)
}

/// Credentials of a process (`struct ucred`). [`peer_credentials`] returns those that the other end of a Unix socket
/// had at its connect(2), listen(2) or socketpair(2), with the effective user and group. Those of a packet's sender
/// have its real user and group ([`crate::packet`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes)]
#[repr(C)]
pub struct PeerCredentials {
    /// Process id; 0 for a process of another PID namespace.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Returns the credentials of the process at the other end (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    get(socket, libc::SOL_SOCKET, libc::SO_PEERCRED)
}

/// Returns the supplementary groups of the process at the other end of a Unix socket (`SO_PEERGROUPS`, Linux 4.13).
///
/// # Errors
/// Returns the kernel's error of getsockopt(2).
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    // NGROUPS_MAX is 65,536, but few processes have many groups. On ERANGE the kernel reports the length that is
    // needed.
    let mut groups = vec![0u32; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes into `groups`, which is that long.
        let status = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &mut length,
            )
        };
        let count = length as usize / size_of::<u32>();
        if status == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

pub(crate) fn get<T: FromBytes + IntoBytes>(socket: impl AsFd, level: i32, option: i32) -> io::Result<T> {
    let mut value = T::new_zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `value`, which is that long, and any bytes make a `T`.
    let status =
        unsafe { libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
    if status == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_send_buffer_that_was_begun_with_may_grow() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        begin_with_send_buffer(&socket, 300_000).expect("this takes root: run `make test`, which asks sudo for it");
        assert_eq!(rustix::net::sockopt::socket_send_buffer_size(&socket).unwrap(), 600_000);
        assert_eq!(get::<i32>(&socket, libc::SOL_SOCKET, 72).unwrap(), 0, "SO_BUF_LOCK");
    }

    #[test]
    fn a_new_connection_has_the_initial_window() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let window = congestion_window(&client).unwrap();
        assert!(window.open);
        assert_eq!((window.segments, window.retransmitted), (10, 0), "TCP_INIT_CWND");
        assert!((1000..=65536).contains(&window.mss), "{} bytes", window.mss);
    }
}
