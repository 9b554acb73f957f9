//! A client that compares each byte as it comes, stops reading where it is told, and says how a response ended.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::files::Contents;
use crate::host::Host;
use crate::http::{ResponseReader, get_request};

/// How a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Each byte of the file, and no other.
    Whole,
    /// An error in place of the body, whole as well.
    Error(u16),
    /// The connection ended before a byte of the response came, as idle connections may; a client asks again on another.
    Unanswered,
    /// The connection was reset after so many bytes of the body.
    Reset(u64),
    /// The connection was closed before the length that the header named.
    Short(u64),
    /// Another byte than the file's at this place of the body, or more of them than the header named.
    Wrong(u64),
    /// Nothing more within the limit, after so many bytes of the body.
    Hang(u64),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => write!(f, "whole"),
            Self::Error(status) => write!(f, "error {status}"),
            Self::Unanswered => write!(f, "not answered"),
            Self::Reset(bytes) => write!(f, "reset after {bytes} bytes"),
            Self::Short(bytes) => write!(f, "closed after {bytes} bytes"),
            Self::Wrong(at) => write!(f, "WRONG BYTE at {at}"),
            Self::Hang(bytes) => write!(f, "nothing more after {bytes} bytes"),
        }
    }
}

/// What a response is to be.
struct Expected {
    contents: Contents,
    length: u64,
    /// Of the body, so far.
    read: u64,
    wrong_at: Option<u64>,
}

/// One connection with one request at a time.
pub struct Client {
    stream: TcpStream,
    server: SocketAddr,
    reader: ResponseReader,
    expected: Option<Expected>,
    /// The request could not be written.
    refused: bool,
    buffer: Vec<u8>,
}

/// What a read brought.
enum Got {
    Bytes,
    Nothing,
    End(Ending),
}

impl Client {
    /// Connects out of `host`, with a receive buffer of so many bytes where one is named.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn connect(host: &Host, server: SocketAddr, receive_buffer: Option<usize>) -> Result<Self> {
        let connect = || -> Result<TcpStream> {
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            if let Some(bytes) = receive_buffer {
                sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
            }
            rustix::net::connect(&socket, &server).with_context(|| format!("connecting to {server}"))?;
            let stream = TcpStream::from(socket);
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = host.run(connect)??;
        Ok(Self {
            stream,
            server,
            reader: ResponseReader::default(),
            expected: None,
            refused: false,
            buffer: vec![0; 128 << 10],
        })
    }

    /// Asks for `path`, which is the file of this name and size. A connection that is gone shows when it is read.
    pub fn ask(&mut self, path: &str, file: &str, length: u64) {
        self.reader = ResponseReader::default();
        self.expected = Some(Expected { contents: Contents::of(file), length, read: 0, wrong_at: None });
        self.refused = self.stream.write_all(get_request(self.server, path, &[]).as_bytes()).is_err();
    }

    /// Bytes of the present body so far.
    pub fn body_bytes(&self) -> u64 {
        self.expected.as_ref().map_or(0, |expected| expected.read)
    }

    /// Reads until the header and so many bytes of the body are here.
    ///
    /// # Errors
    /// When the response ends before, or nothing comes for `limit`.
    pub fn read_until(&mut self, body_bytes: u64, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while self.reader.status() == 0 || self.body_bytes() < body_bytes {
            // In small pieces: what is read here opens the window for more.
            match self.read(16 << 10, deadline)? {
                Got::Bytes => {}
                Got::Nothing => bail!("no header, or less than {body_bytes} bytes, within {limit:?}"),
                Got::End(ending) => bail!("the response ended too early for the step: {ending}"),
            }
        }
        ensure!(self.reader.status() == 200, "status {}", self.reader.status());
        Ok(())
    }

    /// Reads the rest of the response.
    ///
    /// # Errors
    /// When what comes is no HTTP.
    pub fn finish(&mut self, limit: Duration) -> Result<Ending> {
        let deadline = Instant::now() + limit;
        loop {
            match self.read(self.buffer.len(), deadline)? {
                Got::Bytes => {}
                Got::Nothing => return Ok(Ending::Hang(self.body_bytes())),
                Got::End(ending) => return Ok(ending),
            }
        }
    }

    /// Reads on at about this pace until `stop` says so, and returns how the response ended if it did.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn read_slowly(&mut self, pause: Duration, limit: Duration, stop: impl Fn() -> bool) -> Result<Option<Ending>> {
        while !stop() {
            match self.read(16 << 10, Instant::now() + limit)? {
                Got::Bytes => std::thread::sleep(pause),
                Got::Nothing => return Ok(Some(Ending::Hang(self.body_bytes()))),
                Got::End(ending) => return Ok(Some(ending)),
            }
        }
        Ok(None)
    }

    fn read(&mut self, most: usize, deadline: Instant) -> Result<Got> {
        if let Some(ending) = self.ending() {
            return Ok(Got::End(ending));
        }
        if self.refused {
            return Ok(Got::End(Ending::Unanswered));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Got::Nothing);
        }
        self.stream.set_read_timeout(Some(left))?;
        match self.stream.read(&mut self.buffer[..most]) {
            Ok(0) => Ok(Got::End(self.closed())),
            Ok(bytes) => {
                self.take(bytes)?;
                Ok(self.ending().map_or(Got::Bytes, Got::End))
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Got::Nothing),
                ErrorKind::Interrupted => Ok(Got::Bytes),
                ErrorKind::ConnectionReset if self.is_unanswered() => Ok(Got::End(Ending::Unanswered)),
                ErrorKind::ConnectionReset => Ok(Got::End(Ending::Reset(self.body_bytes()))),
                _ => Err(error).context("reading the response"),
            },
        }
    }

    /// Compares what was read with what it is to be.
    fn take(&mut self, bytes: usize) -> Result<()> {
        let Some(expected) = &mut self.expected else { bail!("{bytes} bytes that nobody asked for") };
        let mut pieces = Vec::new();
        let used = self.reader.feed(&self.buffer[..bytes], &mut |piece| pieces.push(piece.to_vec()))?;
        for piece in pieces.iter().filter(|_| self.reader.status() == 200) {
            expected.take(piece);
        }
        if used < bytes {
            expected.wrong_at.get_or_insert(expected.length);
        }
        Ok(())
    }

    /// Of a response that needs no more bytes.
    fn ending(&self) -> Option<Ending> {
        let expected = self.expected.as_ref()?;
        if let Some(at) = expected.wrong_at {
            return Some(Ending::Wrong(at));
        }
        if !self.reader.is_done() {
            return None;
        }
        Some(match self.reader.status() {
            200 if expected.read == expected.length => Ending::Whole,
            // A shorter body than the file is, and the header said so: another length is another byte.
            200 => Ending::Wrong(expected.read),
            status => Ending::Error(status),
        })
    }

    fn is_unanswered(&self) -> bool {
        self.reader.status() == 0
    }

    fn closed(&mut self) -> Ending {
        if self.is_unanswered() {
            return Ending::Unanswered;
        }
        let read = self.body_bytes();
        match self.reader.closed() {
            Ok(()) => self.ending().unwrap_or(Ending::Short(read)),
            Err(_) => Ending::Short(read),
        }
    }
}

impl Expected {
    fn take(&mut self, piece: &[u8]) {
        if self.wrong_at.is_none() {
            let room = usize::try_from(self.length - self.read).unwrap_or(usize::MAX);
            let compared = self.contents.compare(&piece[..piece.len().min(room)]);
            let wrong = compared.err().or((piece.len() > room).then_some(room));
            self.wrong_at = wrong.map(|at| self.read + at as u64);
        }
        self.read += piece.len() as u64;
    }
}
