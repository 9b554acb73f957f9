//! The sending half of a client's connection that belongs to another machine, the frontend. It is a kernel socket,
//! which TCP_REPAIR has made to continue where the frontend's socket stopped. A TCP stack in user space would be
//! another implementation of [`FlowSender`]. A *flow* is such a connection, and a *payload* is the body that is sent on
//! it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::{socket_send_buffer_size, tcp_congestion};
use shunt_sys::repair::{self, RepairError, Restored};
use shunt_sys::sockopt::{self, CongestionWindow};

/// Congestion controls of the kernel whose window shrinks only after a loss (net/ipv4/tcp_cubic.c, tcp_cong.c).
const BY_LOSS: [&str; 2] = ["cubic", "reno"];

/// The sending half of a client's connection. No call waits.
pub trait FlowSender: Send {
    /// Takes some of the bytes, and returns how many. `more`: more bytes follow at once, so a short segment may wait
    /// for them.
    ///
    /// # Errors
    /// `EAGAIN` if it takes none now, else why the connection is over.
    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno>;

    /// The kernel socket, if the sender is one. The kernel then moves a payload's bytes into it by itself
    /// (sendfile(2)).
    fn socket(&self) -> Option<BorrowedFd<'_>>;

    /// Descriptor that is writable when the sender takes bytes again.
    fn writable(&self) -> BorrowedFd<'_>;

    /// Number of bytes that the sender has taken and the client has not acknowledged.
    ///
    /// # Errors
    /// Returns why the connection is over.
    fn unacknowledged(&self) -> io::Result<u32>;

    /// Congestion window, and the number of segments in flight.
    ///
    /// # Errors
    /// Returns why the connection is over.
    fn congestion_window(&self) -> io::Result<CongestionWindow>;

    /// Largest number of unacknowledged payload bytes that the sender can hold.
    ///
    /// # Errors
    /// Returns why the connection is over.
    fn buffer_bytes(&self) -> io::Result<usize>;

    /// Whether only a loss makes the congestion window smaller.
    fn shrinks_only_by_loss(&self) -> bool;

    /// Sets the send buffer that the sender begins with, in bytes.
    fn set_buffer_bytes(&self, bytes: usize);

    /// Limits the rate at which the sender sends, in bytes per second. `None`: no limit.
    fn pace(&self, rate: Option<u64>);

    /// Tells the sender the client's window, in bytes. The window may have changed by packets that the sender has not
    /// got.
    ///
    /// # Errors
    /// Returns an error if the sender cannot be told.
    fn set_window(&self, snd_wnd: u32) -> Result<(), RepairError>;

    /// Whether the connection is open: no reset of the client has closed it.
    fn is_open(&self) -> bool;

    /// Closes the sender without a packet. When it is dropped instead, it sends what is left, and then a FIN.
    fn close_silently(self: Box<Self>);
}

/// A kernel TCP socket, put into the connection by TCP_REPAIR.
#[derive(Debug)]
pub struct KernelSocket {
    socket: OwnedFd,
    /// Next sequence number that the socket expects. It stays the same, because the socket never receives data.
    rcv_nxt: u32,
    /// The socket's receive window, in bytes.
    rcv_wnd: u32,
}

impl KernelSocket {
    /// Makes the socket of a connection. Also returns the offset of the socket's timestamp clock from
    /// [`repair::clock_ms`].
    ///
    /// # Errors
    /// Returns why the kernel refuses, as [`repair::restore`] does.
    pub fn restore(connection: &Restored) -> Result<(Self, u32), RepairError> {
        let (socket, ts_offset) = repair::restore(connection)?;
        Ok((Self { socket, rcv_nxt: connection.rcv_nxt, rcv_wnd: connection.rcv_wnd }, ts_offset))
    }
}

/// A connected stream socket, for tests and measurements. It was not made by TCP_REPAIR.
impl From<OwnedFd> for KernelSocket {
    fn from(socket: OwnedFd) -> Self {
        Self { socket, rcv_nxt: 0, rcv_wnd: 0 }
    }
}

impl FlowSender for KernelSocket {
    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno> {
        let more = if more { SendFlags::MORE } else { SendFlags::empty() };
        rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT | more)
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn writable(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn unacknowledged(&self) -> io::Result<u32> {
        sockopt::unacknowledged(&self.socket)
    }

    fn congestion_window(&self) -> io::Result<CongestionWindow> {
        sockopt::congestion_window(&self.socket)
    }

    /// The buffer's size, as the kernel tells it, includes the overhead of segments: half of it holds payload.
    fn buffer_bytes(&self) -> io::Result<usize> {
        Ok(socket_send_buffer_size(&self.socket)? / 2)
    }

    fn shrinks_only_by_loss(&self) -> bool {
        tcp_congestion(&self.socket).is_ok_and(|name| BY_LOSS.contains(&name.as_str()))
    }

    fn set_buffer_bytes(&self, bytes: usize) {
        let _ = sockopt::begin_with_send_buffer(&self.socket, bytes);
    }

    fn pace(&self, rate: Option<u64>) {
        let _ = sockopt::set_max_pacing_rate(&self.socket, rate);
    }

    fn set_window(&self, snd_wnd: u32) -> Result<(), RepairError> {
        repair::set_window(&self.socket, self.rcv_nxt, snd_wnd, self.rcv_wnd)
    }

    /// getpeername(2) fails if a client's reset has closed the socket.
    fn is_open(&self) -> bool {
        rustix::net::getpeername(&self.socket).is_ok()
    }

    fn close_silently(self: Box<Self>) {
        repair::close_silently(self.socket);
    }
}
