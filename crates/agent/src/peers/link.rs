//! The daemon's part of a link: the TLS connection with a peer (another machine's agent). A *turn* is one pass of the
//! daemon's event loop.

use std::io;

use crate::os::poll::{Interest, Poll, Source};
use shunt_transport::Transport;

/// A link: a connection with a peer.
pub(crate) struct Link {
    pub(crate) transport: Transport,
    /// The socket has not taken all frames of the last turn.
    is_blocked: bool,
    /// Both sides have sent HELLO.
    pub(crate) is_up: bool,
}

impl Link {
    /// Makes a link of a connection on which this agent has sent no frame yet.
    pub(crate) fn new(transport: Transport) -> Self {
        Self { transport, is_blocked: false, is_up: false }
    }

    /// Notes whether the socket has taken all bytes. If not, the poll also waits until the socket takes more.
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_ctl(2).
    pub(crate) fn note_sent(&mut self, peer: usize, all: bool, poll: &Poll) -> io::Result<()> {
        if all != self.is_blocked {
            return Ok(());
        }
        self.is_blocked = !all;
        let interest = if all { Interest::Readable } else { Interest::Both };
        poll.set(self.transport.descriptor(), Source::Peer(peer), interest)
    }
}
