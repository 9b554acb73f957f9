//! Senders on a client's connection whose other half is another machine's: a kernel socket that TCP_REPAIR has put
//! where the frontend's stopped. Whatever else can send on such a flow (a TCP stack of one's own) is another
//! implementation of [`FlowSender`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::{socket_send_buffer_size, tcp_congestion};
use shunt_sys::repair::{self, RepairError, Restored};
use shunt_sys::sockopt::{self, CongestionWindow};

/// Congestion controls of the kernel whose window shrinks only after a loss (net/ipv4/tcp_cong.c and its neighbours).
const BY_LOSS: [&str; 2] = ["cubic", "reno"];

/// The sending half of a client's connection. No call waits.
pub trait FlowSender: Send {
    /// Takes bytes, and returns how many. `more`: others follow at once, so that a short segment may wait for them.
    ///
    /// # Errors
    /// `EAGAIN` where it takes none now, else why the connection is over.
    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno>;

    /// The socket, where it is a kernel's: then the kernel moves a payload's bytes into it by itself (sendfile(2)).
    fn socket(&self) -> Option<BorrowedFd<'_>>;

    /// Descriptor that is writable where it takes bytes again.
    fn writable(&self) -> BorrowedFd<'_>;

    /// Number of bytes taken that the client has not acknowledged.
    ///
    /// # Errors
    /// Why the connection is over.
    fn unacknowledged(&self) -> io::Result<u32>;

    /// Congestion window, and what is in flight.
    ///
    /// # Errors
    /// Why the connection is over.
    fn congestion_window(&self) -> io::Result<CongestionWindow>;

    /// Most bytes that it holds until they are acknowledged.
    ///
    /// # Errors
    /// Why the connection is over.
    fn buffer_bytes(&self) -> io::Result<usize>;

    /// Whether only a loss makes its congestion window smaller.
    fn shrinks_only_by_loss(&self) -> bool;

    /// Sets how many bytes it holds at the beginning.
    fn set_buffer_bytes(&self, bytes: usize);

    /// Limits the rate at which it sends, in bytes per second. `None`: no limit.
    fn pace(&self, rate: Option<u64>);

    /// Tells it the client's window, which others' packets have moved.
    ///
    /// # Errors
    /// Returns an error where it cannot be told.
    fn set_window(&self, snd_wnd: u32) -> Result<(), RepairError>;

    /// Whether the connection is open: no reset of the client has closed it.
    fn is_open(&self) -> bool;

    /// Closes it without a packet. Dropping it instead sends what is left, and then a FIN.
    fn close_silently(self: Box<Self>);
}

/// A kernel TCP socket, put into the connection by TCP_REPAIR.
#[derive(Debug)]
pub struct KernelSocket {
    socket: OwnedFd,
    /// Next sequence number that it expects. It never receives data.
    rcv_nxt: u32,
    /// Its receive window, in bytes.
    rcv_wnd: u32,
}

impl KernelSocket {
    /// Makes the socket of a connection. Returns also the offset of its timestamp clock from [`repair::clock_ms`].
    ///
    /// # Errors
    /// Returns why the kernel refuses, as [`repair::restore`] does.
    pub fn restore(connection: &Restored) -> Result<(Self, u32), RepairError> {
        let (socket, ts_offset) = repair::restore(connection)?;
        Ok((Self { socket, rcv_nxt: connection.rcv_nxt, rcv_wnd: connection.rcv_wnd }, ts_offset))
    }
}

/// A connected stream socket, for tests and measurements. It has no connection to be repaired.
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

    /// The kernel counts the overhead of segments, too: half of its buffer holds payload.
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

    /// getpeername(2) fails where a client's reset has closed the socket.
    fn is_open(&self) -> bool {
        rustix::net::getpeername(&self.socket).is_ok()
    }

    fn close_silently(self: Box<Self>) {
        repair::close_silently(self.socket);
    }
}
