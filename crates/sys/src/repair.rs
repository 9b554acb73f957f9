//! TCP_REPAIR: makes a kernel TCP socket that is ESTABLISHED without a handshake. Sources: net/ipv4/tcp.c,
//! `tcp_repair_options_est` and the functions around it; CRIU's soccr for the order of the calls.
//!
//! The calls, in the order that works:
//!
//! 1. `TCP_REPAIR` on, **before** bind: a socket under repair may take any port (SK_FORCE_REUSE). With SO_REUSEADDR
//!    instead, the kernel checks every socket of that port (inet_bhash2_conflict), which takes 0.3 ms with some
//!    thousand sockets;
//! 2. `bind`, and `TCP_MAXSEG` **before** connect: otherwise `snd_mss` stays at 524 bytes, whatever the MSS option of
//!    step 5 says;
//! 3. the sequence number of each queue;
//! 4. `connect`: sends no packet under repair, and the socket becomes ESTABLISHED;
//! 5. TCP options and timestamp; then the window, because the kernel checks it against the receive sequence number;
//! 6. `TCP_REPAIR` off with -1, so that the kernel sends no window probe.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::time::{ClockId, clock_gettime};

use crate::sockopt::{set, set_i32};

const TCP_REPAIR_OFF_NO_WP: i32 = -1;
const TCP_RECV_QUEUE: i32 = 1;
const TCP_SEND_QUEUE: i32 = 2;
const TCPOPT_MSS: u32 = 2;
const TCPOPT_WINDOW: u32 = 3;
const TCPOPT_SACK_PERM: u32 = 4;
const TCPOPT_TIMESTAMP: u32 = 8;

/// State of a connection with a client, for a new socket that continues it. Sequence numbers are in the new socket's
/// sequence space.
#[derive(Clone, Copy, Debug)]
pub struct Restored {
    /// Address and port of this machine that the socket is bound to.
    pub local: SocketAddr,
    /// The client's address and port.
    pub remote: SocketAddr,
    /// Sequence number of the next byte to send.
    pub snd_nxt: u32,
    /// Sequence number of the next byte expected from the client.
    pub rcv_nxt: u32,
    /// The client's window in bytes.
    pub snd_wnd: u32,
    /// This end's window, as the client was last told, in bytes.
    pub rcv_wnd: u32,
    /// Maximum segment size without TCP options, in bytes.
    pub mss: u16,
    /// Shifts of the client's window field and of this end's, where window scaling was negotiated (RFC 7323).
    pub window_scale: Option<(u8, u8)>,
    /// Whether selective acknowledgments were negotiated (RFC 2018).
    pub sack: bool,
    /// Present value of this end's timestamp clock, where timestamps were negotiated (RFC 7323). It must be even: since
    /// Linux 6.7 the lowest bit of TCP_TIMESTAMP asks for a clock in microseconds.
    pub tsval: Option<u32>,
}

/// A system call that failed.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {errno}")]
pub struct RepairError {
    /// Name of the call, with its option.
    pub call: &'static str,
    /// The kernel's error.
    pub errno: io::Error,
}

fn at<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, RepairError> {
    result.map_err(|errno| RepairError { call, errno: errno.into() })
}

/// Makes a nonblocking, ESTABLISHED socket that can send at once. Also returns the offset of its timestamp clock from
/// [`clock_ms`], 0 without timestamps.
///
/// # Errors
/// Returns the first call that failed. Needs CAP_NET_ADMIN.
pub fn restore(connection: &Restored) -> Result<(OwnedFd, u32), RepairError> {
    let family = if connection.remote.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = at("socket", rustix::net::socket_with(family, SocketType::STREAM, flags, None))?;
    tcp(&socket, "setsockopt(TCP_REPAIR, on)", libc::TCP_REPAIR, 1)?;
    at("bind", rustix::net::bind(&socket, &connection.local))?;
    let timestamps = if connection.tsval.is_some() { 12 } else { 0 };
    let clamp = u32::from(connection.mss) + timestamps;
    at("setsockopt(TCP_MAXSEG)", set_i32(&socket, libc::IPPROTO_TCP, libc::TCP_MAXSEG, clamp as i32))?;
    sequence(&socket, TCP_SEND_QUEUE, connection.snd_nxt)?;
    sequence(&socket, TCP_RECV_QUEUE, connection.rcv_nxt)?;
    at("connect", rustix::net::connect(&socket, &connection.remote))?;
    options(&socket, connection, clamp)?;
    let offset = connection.tsval.map_or(Ok(0), |now| timestamps_from(&socket, now))?;
    window(&socket, connection)?;
    tcp(&socket, "setsockopt(TCP_REPAIR, off)", libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP)?;
    at("setsockopt(TCP_NODELAY)", sockopt::set_tcp_nodelay(&socket, true))?;
    Ok((socket, offset))
}

/// Returns the kernel's `tcp_clock_ms`, in milliseconds. A connection's timestamp clock is this value plus an offset
/// that the connection has.
pub fn clock_ms() -> u32 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000) as u32
}

/// Sets the socket's timestamp clock to `now`, and returns its offset from [`clock_ms`].
fn timestamps_from(socket: &OwnedFd, now: u32) -> Result<u32, RepairError> {
    loop {
        let before = clock_ms();
        tcp(socket, "setsockopt(TCP_TIMESTAMP)", libc::TCP_TIMESTAMP, now as i32)?;
        // If a millisecond began meanwhile, the kernel may have computed the offset from either value. Then this is
        // tried again.
        if clock_ms() == before {
            return Ok(now.wrapping_sub(before));
        }
    }
}

fn tcp(socket: &OwnedFd, call: &'static str, option: i32, value: i32) -> Result<(), RepairError> {
    at(call, set_i32(socket, libc::IPPROTO_TCP, option, value))
}

fn sequence(socket: &OwnedFd, queue: i32, number: u32) -> Result<(), RepairError> {
    tcp(socket, "setsockopt(TCP_REPAIR_QUEUE)", libc::TCP_REPAIR_QUEUE, queue)?;
    tcp(socket, "setsockopt(TCP_QUEUE_SEQ)", libc::TCP_QUEUE_SEQ, number as i32)
}

/// Sets the MSS and only those other TCP options that were negotiated: to use another one would be a protocol error.
fn options(socket: &OwnedFd, connection: &Restored, mss: u32) -> Result<(), RepairError> {
    let mut list = vec![[TCPOPT_MSS, mss]];
    if let Some((client, ours)) = connection.window_scale {
        list.push([TCPOPT_WINDOW, u32::from(client) | u32::from(ours) << 16]);
    }
    if connection.sack {
        list.push([TCPOPT_SACK_PERM, 0]);
    }
    if connection.tsval.is_some() {
        list.push([TCPOPT_TIMESTAMP, 0]);
    }
    at("setsockopt(TCP_REPAIR_OPTIONS)", set(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR_OPTIONS, list.as_slice()))
}

fn window(socket: &OwnedFd, connection: &Restored) -> Result<(), RepairError> {
    repair_window(socket, connection.rcv_nxt, connection.snd_wnd, connection.rcv_wnd)
}

/// Sets `struct tcp_repair_window`: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup. snd_wl1 decides which later
/// segments may change the window (RFC 9293, 3.10.7.4).
///
/// The kernel still expects segments with the window field from before this call (header prediction,
/// tcp_rcv_established). It ignores the window of an ACK that it has predicted. So no ACK with that window field may
/// reach the socket (crates/handoff/bpf/backend.bpf.c).
fn repair_window(socket: &OwnedFd, rcv_nxt: u32, snd_wnd: u32, rcv_wnd: u32) -> Result<(), RepairError> {
    let window = [rcv_nxt, snd_wnd, snd_wnd.max(1), rcv_wnd, rcv_nxt];
    at("setsockopt(TCP_REPAIR_WINDOW)", set(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR_WINDOW, window.as_slice()))
}

/// Tells a socket the client's present window, `snd_wnd` bytes. Nothing may be outstanding on the socket.
///
/// # Errors
/// Returns the first call that failed. Needs CAP_NET_ADMIN.
pub fn set_window(socket: &OwnedFd, rcv_nxt: u32, snd_wnd: u32, rcv_wnd: u32) -> Result<(), RepairError> {
    tcp(socket, "setsockopt(TCP_REPAIR, on)", libc::TCP_REPAIR, 1)?;
    repair_window(socket, rcv_nxt, snd_wnd, rcv_wnd)?;
    tcp(socket, "setsockopt(TCP_REPAIR, off)", libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP)
}

/// Closes a socket without notice to the client: it sends neither queued bytes nor a FIN or RST.
pub fn close_silently(socket: OwnedFd) {
    // If the kernel refuses TCP_REPAIR, this is an ordinary close. Its FIN is dropped by be_out, the BPF program on
    // egress (crates/handoff).
    let _ = set_i32(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, 1);
    drop(socket);
}
