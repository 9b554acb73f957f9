//! A client that reads as far and as fast as it is told.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::answer::{Answer, Ending};
use crate::host::Host;
use crate::http::get_request;

/// One connection, with one request at a time.
pub struct Client {
    stream: TcpStream,
    server: SocketAddr,
    answer: Option<Answer>,
    /// Whether the request could not be written.
    refused: bool,
    buffer: Vec<u8>,
}

/// Result of one read.
enum Got {
    Bytes,
    Nothing,
    End(Ending),
}

impl Client {
    /// Connects from `host`. The receive buffer has `receive_buffer` bytes; `None`: the kernel's default size.
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
        Ok(Self { stream, server, answer: None, refused: false, buffer: vec![0; 128 << 10] })
    }

    /// Sends a request for `path`. The response's body must be the file of this name and length. If the connection is
    /// broken, only the next read shows it.
    pub fn ask(&mut self, path: &str, file: &str, length: u64) {
        self.ask_with(&[], path, file, length);
    }

    /// Sends a request like [`Self::ask`], with further header fields.
    pub fn ask_with(&mut self, fields: &[String], path: &str, file: &str, length: u64) {
        self.answer = Some(Answer::of(file, length));
        self.refused = self.stream.write_all(get_request(self.server, path, fields).as_bytes()).is_err();
    }

    /// Number of bytes of the present response's body that have been read.
    pub fn body_bytes(&self) -> u64 {
        self.answer.as_ref().map_or(0, Answer::body_bytes)
    }

    /// Reads until the header and this many bytes of the body have arrived.
    ///
    /// # Errors
    /// When the response ends earlier, has another status than 200, or does not come so far within `limit`.
    pub fn read_until(&mut self, body_bytes: u64, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while self.status() == 0 || self.body_bytes() < body_bytes {
            // Reads in small pieces, because each read opens the window for more.
            match self.read(16 << 10, deadline)? {
                Got::Bytes => {}
                Got::Nothing => bail!("no header, or less than {body_bytes} bytes, within {limit:?}"),
                Got::End(ending) => bail!("the response ended too early for the step: {ending}"),
            }
        }
        ensure!(self.status() == 200, "status {}", self.status());
        Ok(())
    }

    /// Reads the rest of the response. Returns how the response ended: as [`Ending::Hang`] if this takes longer than
    /// `limit`.
    ///
    /// # Errors
    /// When the bytes are no HTTP.
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

    /// Reads once. Returns how the response ended, or `None` if more is to come. If nothing comes within `limit`, the
    /// response counts as ended by [`Ending::Hang`].
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn read_more(&mut self, limit: Duration) -> Result<Option<Ending>> {
        match self.read(self.buffer.len(), Instant::now() + limit)? {
            Got::Bytes => Ok(None),
            Got::Nothing => Ok(Some(Ending::Hang(self.body_bytes()))),
            Got::End(ending) => Ok(Some(ending)),
        }
    }

    /// Reads 16 KiB at a time with a pause after each, until `stop` is true: then returns `None`. If the response ends
    /// earlier, returns how. A response of which nothing comes for `limit` counts as ended by [`Ending::Hang`].
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

    fn status(&self) -> u16 {
        self.answer.as_ref().map_or(0, Answer::status)
    }

    fn read(&mut self, most: usize, deadline: Instant) -> Result<Got> {
        let answer = self.answer.as_mut().context("no request was sent")?;
        if let Some(ending) = answer.ending() {
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
            Ok(0) => Ok(Got::End(answer.closed())),
            Ok(bytes) => {
                answer.feed(&self.buffer[..bytes])?;
                Ok(answer.ending().map_or(Got::Bytes, Got::End))
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Got::Nothing),
                ErrorKind::Interrupted => Ok(Got::Bytes),
                ErrorKind::ConnectionReset => Ok(Got::End(answer.reset())),
                _ => Err(error).context("reading the response"),
            },
        }
    }
}
