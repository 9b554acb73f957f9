//! A client that has asked for a long body and reads no more of it for now. So its handoff (the backend sends the body
//! on the client's connection) does not end.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use shunt_testbed::same_bytes;

use super::Running;

/// Size of the client's receive buffer, in bytes. The client's kernel cannot hold all of a body of [`HELD_BYTES`] in
/// it.
const RECEIVE_BUFFER: usize = 32 << 10;
/// Length of a body, in bytes, that is long enough for its handoff to last until the client reads on.
pub const HELD_BYTES: u64 = 256 << 10;
/// Number of body bytes that is more than a window. When a client has read as many, its backend has got ACKs of it.
/// Without any ACK, the backend would let the frontend send the body after all.
pub const HEARD: usize = 512 << 10;

/// A client's connection, with one response of which at least the header has come.
pub struct Held {
    stream: TcpStream,
    path: String,
    /// Bytes of the body that have been read and not compared yet.
    begun: Vec<u8>,
    length: usize,
}

impl Held {
    /// Asks for `/name`, and reads to the end of the header. To be called inside the client's namespace.
    pub fn ask(service: &Running<'_>, name: &str, fields: &str) -> Result<Self> {
        let server = service.service.chain().server();
        let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        // An agent that is started meanwhile must not inherit the socket: the connection would outlive this client.
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER)?;
        rustix::net::connect(&socket, &server).with_context(|| format!("connecting to {server}"))?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(50)))?; // shorter than nginx's send_timeout
        write!(stream, "GET /{name} HTTP/1.1\r\nHost: x\r\n{fields}\r\n")?;
        let (begun, length) = read_head(&mut stream, name)?;
        Ok(Self { stream, path: name.to_owned(), begun, length })
    }

    /// Asks for `/name` on the same connection, and reads to the end of the header. To be called when the previous body
    /// has been read.
    pub fn ask_for_next(&mut self, name: &str) -> Result<()> {
        write!(self.stream, "GET /{name} HTTP/1.1\r\nHost: x\r\n\r\n")?;
        name.clone_into(&mut self.path);
        (self.begun, self.length) = read_head(&mut self.stream, name)?;
        Ok(())
    }

    /// Returns the client's address.
    pub fn local(&self) -> Result<SocketAddr> {
        Ok(self.stream.local_addr()?)
    }

    /// Reads `bytes` more bytes of the body, and keeps them, so that they can be compared later.
    pub fn read_some(&mut self, bytes: usize) -> Result<()> {
        let mut buffer = vec![0; bytes];
        self.stream.read_exact(&mut buffer).with_context(|| format!("{}: {bytes} bytes", self.path))?;
        self.begun.extend_from_slice(&buffer);
        Ok(())
    }

    /// Closes the connection with a reset.
    pub fn reset(self) -> Result<()> {
        Ok(sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO))?)
    }

    /// Reads the rest of the body, without comparing. Returns whether the connection ends before all bytes have come. A
    /// silence of 50 s is an error.
    pub fn ends_early(mut self) -> Result<bool> {
        let mut left = self.length - self.begun.len();
        let mut buffer = [0; 64 << 10];
        while left > 0 {
            let most = buffer.len().min(left);
            match self.stream.read(&mut buffer[..most]) {
                Ok(0) => return Ok(true),
                Ok(read) => left -= read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(true),
                Err(error) => return Err(error).with_context(|| format!("{}: {left} bytes missing", self.path)),
            }
        }
        Ok(false)
    }

    /// Reads the rest, and compares every byte with the file.
    pub fn finish(mut self, service: &Running<'_>) -> Result<()> {
        self.read_rest(service)
    }

    /// Like `finish`, and then asks for `/name` on the same connection, and reads that response without comparing its
    /// body.
    pub fn finish_and_ask_again(mut self, service: &Running<'_>, name: &str) -> Result<()> {
        self.read_rest(service)?;
        self.ask_again(name)
    }

    /// Asks for `/name` on the same connection, and reads the response to its end, without comparing its body. To be
    /// called when the previous body has been read.
    pub fn ask_again(mut self, name: &str) -> Result<()> {
        write!(self.stream, "GET /{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut response = Vec::new();
        self.stream.read_to_end(&mut response).context("reading a second response")?;
        ensure!(response.starts_with(b"HTTP/1.1 200 "), "{name}: {} bytes of something else", response.len());
        Ok(())
    }

    /// Waits for what follows a body that has been read: more bytes, an end or a reset. Returns whether it is a reset.
    /// A silence of 50 s is an error.
    pub fn ends_in_a_reset(mut self) -> Result<bool> {
        loop {
            match self.stream.read(&mut [0; 64]) {
                Ok(_) => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(true),
                Err(error) => return Err(error).with_context(|| format!("waiting behind {}", self.path)),
            }
        }
    }

    /// Reads the rest, compares every byte with the file, and keeps the connection.
    pub fn read_rest(&mut self, service: &Running<'_>) -> Result<()> {
        let mut file = File::open(service.files.join(&self.path))?;
        ensure!(file.metadata()?.len() == self.length as u64, "{}: {} bytes", self.path, self.length);
        let (mut at, mut want, mut got) = (0, vec![0; 64 << 10], vec![0; 64 << 10]);
        while at < self.length {
            let read = match std::mem::take(&mut self.begun) {
                mut begun if !begun.is_empty() => {
                    let read = begun.len().min(got.len());
                    self.begun = begun.split_off(read);
                    got[..read].copy_from_slice(&begun);
                    read
                }
                _ => {
                    let most = got.len().min(self.length - at);
                    match self.stream.read(&mut got[..most]) {
                        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                        read => read.with_context(|| format!("{} after {at} bytes", self.path))?,
                    }
                }
            };
            ensure!(read > 0, "{}: closed after {at} of {} bytes", self.path, self.length);
            file.read_exact(&mut want[..read])?;
            same_bytes(&got[..read], &want[..read]).with_context(|| format!("{} after {at} bytes", self.path))?;
            at += read;
        }
        Ok(())
    }
}

/// Reads a response's header. Returns the bytes of the body that have come with it, and the body's length.
fn read_head(stream: &mut TcpStream, name: &str) -> Result<(Vec<u8>, usize)> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let end = loop {
        let read = match stream.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.context("reading a head")?,
        };
        ensure!(read > 0, "closed within a head");
        bytes.extend_from_slice(&buffer[..read]);
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
    };
    let begun = bytes.split_off(end);
    let head = String::from_utf8(bytes)?.to_ascii_lowercase();
    ensure!(head.starts_with("http/1.1 200 "), "{name}: {head}");
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
    Ok((begun, length.context("no Content-Length")?.parse()?))
}
