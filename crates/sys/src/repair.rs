//! TCP_REPAIR (net/ipv4/tcp.c, `tcp_repair_options_est` and around; CRIU's soccr for the order of the calls): a
//! kernel TCP socket that is ESTABLISHED without a handshake.
//!
//! The calls, in the order that works:
//!
//! 1. `TCP_REPAIR` on, **before** bind: under repair a socket takes a port unasked (SK_FORCE_REUSE). SO_REUSEADDR in its
//!    place has the kernel look at every socket of that port (inet_bhash2_conflict), 0.3 ms with some thousand;
//! 2. `bind`, and `TCP_MAXSEG` **before** connect, else `snd_mss` stays at 524 whatever the options say;
//! 3. each queue's sequence number;
//! 4. `connect`: no packet leaves, the socket is ESTABLISHED;
//! 5. options, timestamp; the window after the receive sequence number, which it is checked against;
//! 6. `TCP_REPAIR` off with -1, which sends no window probe.

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

/// A connection as its new owner needs it. Sequence numbers are those of the socket that is made.
#[derive(Clone, Copy, Debug)]
pub struct Restored {
    /// Where the socket is bound: an address of this machine.
    pub local: SocketAddr,
    /// The client.
    pub remote: SocketAddr,
    /// Next byte to send.
    pub snd_nxt: u32,
    /// Next byte expected.
    pub rcv_nxt: u32,
    /// The client's window in bytes.
    pub snd_wnd: u32,
    /// Window in bytes that the client believes it has.
    pub rcv_wnd: u32,
    /// Largest segment without options, bytes.
    pub mss: u16,
    /// Shifts of the client's and our window fields, where negotiated (RFC 7323).
    pub window_scale: Option<(u8, u8)>,
    /// Selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Our timestamp clock now, where negotiated (RFC 7323). Even: since Linux 6.7 the lowest bit of TCP_TIMESTAMP asks
    /// for a clock in microseconds.
    pub tsval: Option<u32>,
}

/// What failed: the call's name, and the kernel's answer.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {errno}")]
pub struct RepairError {
    /// The system call, with its option.
    pub call: &'static str,
    /// The kernel's answer.
    pub errno: io::Error,
}

fn at<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, RepairError> {
    result.map_err(|errno| RepairError { call, errno: errno.into() })
}

/// Makes the socket: non-blocking, ESTABLISHED, able to send at once. With it comes the offset of its timestamp clock
/// from [`clock_ms`], 0 without timestamps.
///
/// # Errors
/// The first call that failed. Needs CAP_NET_ADMIN.
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

/// The kernel's `tcp_clock_ms`: every connection's timestamp clock is this plus an offset of its own.
pub fn clock_ms() -> u32 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000) as u32
}

/// Lets the timestamp clock go on from `now`, and returns its offset.
fn timestamps_from(socket: &OwnedFd, now: u32) -> Result<u32, RepairError> {
    loop {
        let before = clock_ms();
        tcp(socket, "setsockopt(TCP_TIMESTAMP)", libc::TCP_TIMESTAMP, now as i32)?;
        // Once more where a millisecond began in between: the kernel may have used either.
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

/// Only what was negotiated: an option that the client never saw would be a protocol error.
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

/// `struct tcp_repair_window`: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup. The first bounds which later segments
/// may change the window (RFC 9293, 3.10.7.4). The kernel goes on to predict the window field of before, and an ACK that has
/// it changes nothing: no ACK that the kernel can have predicted may reach such a socket (crates/handoff/bpf/backend.bpf.c).
fn repair_window(socket: &OwnedFd, rcv_nxt: u32, snd_wnd: u32, rcv_wnd: u32) -> Result<(), RepairError> {
    let window = [rcv_nxt, snd_wnd, snd_wnd.max(1), rcv_wnd, rcv_nxt];
    at("setsockopt(TCP_REPAIR_WINDOW)", set(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR_WINDOW, window.as_slice()))
}

/// Tells a socket that has nothing outstanding what its peer's window is now.
///
/// # Errors
/// The first call that failed. Needs CAP_NET_ADMIN.
pub fn set_window(socket: &OwnedFd, rcv_nxt: u32, snd_wnd: u32, rcv_wnd: u32) -> Result<(), RepairError> {
    tcp(socket, "setsockopt(TCP_REPAIR, on)", libc::TCP_REPAIR, 1)?;
    repair_window(socket, rcv_nxt, snd_wnd, rcv_wnd)?;
    tcp(socket, "setsockopt(TCP_REPAIR, off)", libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP)
}

/// Ends a socket without a word to the client: nothing that is still queued is sent, and no FIN or RST.
pub fn close_silently(socket: OwnedFd) {
    // Where the kernel refuses, an ordinary close follows, whose FIN the egress program drops.
    let _ = set_i32(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, 1);
    drop(socket);
}
