//! Ordered bytes to and from another agent. Everything above this file knows only [`Transport`]: mutual TLS replaces
//! what is inside it, and nothing else.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use shunt_wire::local::Reason;
use shunt_wire::peer::Frame;

/// Most bytes that wait for a peer that does not read.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
const READ_BYTES: usize = 16 << 10;

/// Why a connection between agents ended.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer does not read.
    #[error("the peer does not read: {MAX_OUTPUT_BYTES} bytes wait for it")]
    Stuck,
    /// The peer's fault.
    #[error("the peer sent a frame that is refused: {0}")]
    Refused(Reason),
    /// The network's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A connection, non-blocking, with frames collected in both directions.
#[derive(Debug)]
pub struct Transport {
    stream: TcpStream,
    /// Allocated once: clearing it for each read would cost more than the read.
    input: Box<[u8]>,
    /// What of it was read from the stream, and not yet given out as frames.
    unread: Range<usize>,
    output: Vec<u8>,
}

impl Transport {
    /// Begins to connect from any local address; [`Transport::connected`] tells when it is there.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => Self::new(TcpStream::from(socket)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes an accepted connection.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        let input = vec![0; READ_BYTES].into_boxed_slice();
        Ok(Self { stream, input, unread: 0..0, output: Vec::new() })
    }

    /// What a pending connect came to, once the socket is writable.
    ///
    /// # Errors
    /// Why it failed.
    pub fn connected(&self) -> io::Result<()> {
        match self.stream.take_error()? {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Both ends' addresses: ours, theirs.
    ///
    /// # Errors
    /// The kernel's.
    pub fn addresses(&self) -> io::Result<(IpAddr, IpAddr)> {
        Ok((self.stream.local_addr()?.ip().to_canonical(), self.stream.peer_addr()?.ip().to_canonical()))
    }

    /// To poll it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Reads what is there, at most once: the poll is level-triggered.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn fill(&mut self) -> Result<(), TransportError> {
        self.fill_at_most(READ_BYTES)
    }

    /// Reads at most so many bytes more, where what follows them is not for us.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn fill_at_most(&mut self, most: usize) -> Result<(), TransportError> {
        // What is left is less than a frame, and the buffer holds many.
        self.input.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        let end = self.input.len().min(self.unread.end + most);
        match self.stream.read(&mut self.input[self.unread.end..end]) {
            Ok(0) => Err(TransportError::Closed),
            Ok(bytes) => {
                self.unread.end += bytes;
                Ok(())
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The next whole frame of what was read.
    ///
    /// # Errors
    /// [`TransportError::Refused`]: nothing after it can be read.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, TransportError> {
        match Frame::parse(&self.input[self.unread.clone()]).map_err(TransportError::Refused)? {
            Some((frame, length)) => {
                self.unread.start += length;
                Ok(Some(frame))
            }
            None => Ok(None),
        }
    }

    /// Where frames to send are appended; [`Transport::flush`] sends them together.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Sends what was appended: `true` when nothing is left.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn flush(&mut self) -> Result<bool, TransportError> {
        let mut sent = 0;
        while sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.output.drain(..sent);
        if self.output.len() > MAX_OUTPUT_BYTES {
            return Err(TransportError::Stuck);
        }
        Ok(self.output.is_empty())
    }

    /// The connection itself, for a payload that follows the last frame. None of that may have been read.
    pub fn into_socket(self) -> OwnedFd {
        debug_assert!(self.unread.is_empty(), "bytes of the payload were read as frames");
        self.stream.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_wire::peer::Ended;
    use std::net::TcpListener;

    fn pair() -> (Transport, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Transport::new(listener.accept().unwrap().0).unwrap(), client)
    }

    fn wait_fill(transport: &mut Transport) -> Result<(), TransportError> {
        std::thread::sleep(std::time::Duration::from_millis(20));
        transport.fill()
    }

    #[test]
    fn frames_come_out_however_they_were_cut() {
        let (mut ours, mut theirs) = pair();
        let mut bytes = Vec::new();
        for handoff in 0..3u64 {
            Ended { worker: 1.into(), reason: 1.into(), handoff: handoff.into(), trace: Default::default() }
                .emit(&mut bytes);
        }
        let cut = bytes.len() / 2;
        theirs.write_all(&bytes[..cut]).unwrap();
        wait_fill(&mut ours).unwrap();
        assert!(matches!(ours.next_frame().unwrap(), Some(Frame::Ended(ended)) if ended.handoff.get() == 0));
        assert!(ours.next_frame().unwrap().is_none());
        theirs.write_all(&bytes[cut..]).unwrap();
        wait_fill(&mut ours).unwrap();
        assert!(matches!(ours.next_frame().unwrap(), Some(Frame::Ended(ended)) if ended.handoff.get() == 1));
        assert!(matches!(ours.next_frame().unwrap(), Some(Frame::Ended(ended)) if ended.handoff.get() == 2));
        drop(theirs);
        assert!(matches!(wait_fill(&mut ours), Err(TransportError::Closed)));
    }

    #[test]
    fn noise_is_refused() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        wait_fill(&mut ours).unwrap();
        assert!(matches!(ours.next_frame(), Err(TransportError::Refused(Reason::Malformed))));
    }

    #[test]
    fn a_peer_that_does_not_read_is_given_up() {
        let (mut ours, _theirs) = pair();
        ours.output().resize(64 << 20, 0);
        assert!(matches!(ours.flush(), Err(TransportError::Stuck)));
    }
}
