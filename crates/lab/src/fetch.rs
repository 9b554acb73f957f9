//! A plain client: sends GETs over one connection, and hashes each body as it arrives.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sha2::{Digest, Sha256};
use shunt_sys::sockopt::set_max_segment;

use crate::host::Host;
use crate::http::{ResponseReader, get_request};

/// Parameters of a fetch.
#[derive(Debug, Clone)]
pub struct Fetch {
    pub server: SocketAddr,
    /// Fields added to every request, each `Name: value`.
    pub headers: Vec<String>,
    /// Longest time without a byte before the fetch fails.
    pub timeout: Duration,
    /// Pause after each read, which makes a slow reader.
    pub pause: Duration,
    /// Size of a read, in bytes.
    pub read_bytes: usize,
    /// Whether all requests are written at once instead of one by one.
    pub pipeline: bool,
    /// Counter of the body bytes that have arrived. Other threads can read it.
    pub got: Arc<AtomicU64>,
    /// Value of [`Self::got`] from which on the client reads nothing. Other threads can raise it. `u64::MAX`: it reads
    /// all.
    pub hold: Arc<AtomicU64>,
    /// Time after each request for which the client reads nothing. Meanwhile only what fits into its window can arrive.
    pub stall: Duration,
    /// Largest segment that the client announces (TCP_MAXSEG), in bytes, including TCP's options.
    pub mss: Option<u16>,
}

/// One response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    pub path: String,
    pub status: u16,
    /// Header fields, with names in lower case.
    pub fields: Vec<(String, String)>,
    pub length: u64,
    pub sha256: String,
    /// Time from the request to the last byte. With [`Fetch::pipeline`], the first response's time begins when all
    /// requests are written, and each later response's when the previous response has ended.
    pub elapsed: Duration,
    /// Longest time without a byte, from the request on. The client's own pauses count, too.
    pub longest_pause: Duration,
}

impl Fetched {
    /// A field's value, by its name in lower case.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }
}

/// GETs `paths` from `server` over one keepalive connection out of `host`.
///
/// # Errors
/// When the connection fails or a response is broken.
pub fn fetch(host: &Host, server: SocketAddr, paths: &[impl AsRef<str> + Sync]) -> Result<Vec<Fetched>> {
    Fetch::new(server).run(host, paths)
}

/// SHA-256 of a file, in the form of [`Fetched::sha256`].
///
/// # Errors
/// When the file cannot be read.
pub fn file_sha256(path: impl AsRef<std::path::Path>) -> Result<String> {
    let path = path.as_ref();
    let mut hash = Sha256::new();
    let read = std::fs::File::open(path).and_then(|mut file| std::io::copy(&mut file, &mut hash));
    read.with_context(|| format!("reading {}", path.display()))?;
    Ok(hex(hash))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Fetch {
    #[must_use]
    pub fn new(server: SocketAddr) -> Self {
        let timeout = Duration::from_secs(30); // enough on a busy machine; a response that hangs would never continue
        let (pause, stall) = (Duration::ZERO, Duration::ZERO);
        Self {
            server,
            headers: Vec::new(),
            timeout,
            pause,
            read_bytes: 256 << 10,
            pipeline: false,
            got: Arc::default(),
            hold: Arc::new(AtomicU64::new(u64::MAX)),
            stall,
            mss: None,
        }
    }

    /// GETs `paths` over one connection out of `host`.
    ///
    /// # Errors
    /// When the connection fails or a response is broken.
    pub fn run(&self, host: &Host, paths: &[impl AsRef<str> + Sync]) -> Result<Vec<Fetched>> {
        host.run(|| self.fetch_all(paths))?
    }

    fn fetch_all(&self, paths: &[impl AsRef<str>]) -> Result<Vec<Fetched>> {
        let mut stream = self.connect().with_context(|| format!("connecting to {}", self.server))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.timeout))?;
        let mut buffer = Buffer { bytes: vec![0; self.read_bytes], filled: 0..0 };
        let request = |path| get_request(self.server, path, &self.headers);
        if self.pipeline {
            let all: String = paths.iter().map(|path| request(path.as_ref())).collect();
            stream.write_all(all.as_bytes())?;
        }
        let mut fetched = Vec::with_capacity(paths.len());
        for path in paths.iter().map(AsRef::as_ref) {
            let begin = Instant::now();
            if !self.pipeline {
                stream.write_all(request(path).as_bytes())?;
            }
            if !self.stall.is_zero() {
                std::thread::sleep(self.stall);
            }
            let one = self.read_one(&mut stream, &mut buffer, path, begin);
            let one = one.with_context(|| format!("response {} ({path}) from {}", fetched.len() + 1, self.server))?;
            fetched.push(one);
        }
        ensure!(buffer.filled.is_empty(), "{} bytes after the last response", buffer.filled.len());
        Ok(fetched)
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let Some(mss) = self.mss else { return TcpStream::connect(self.server) };
        let family = if self.server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_max_segment(&socket, mss)?;
        rustix::net::connect(&socket, &self.server)?;
        Ok(socket.into())
    }

    fn read_one(&self, stream: &mut TcpStream, buffer: &mut Buffer, path: &str, begin: Instant) -> Result<Fetched> {
        let (mut reader, mut hash, mut length) = (ResponseReader::default(), Sha256::new(), 0);
        let (mut last, mut longest_pause) = (begin, Duration::ZERO);
        while !reader.is_done() {
            if buffer.filled.is_empty() {
                while self.got.load(Ordering::Relaxed) >= self.hold.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                    last = Instant::now(); // no pause of the service
                }
                let read = match stream.read(&mut buffer.bytes) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        bail!("nothing for {:?} after {length} bytes of the body", self.timeout)
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    read => read.with_context(|| format!("reading after {length} bytes of the body"))?,
                };
                buffer.filled = 0..read;
                longest_pause = longest_pause.max(last.elapsed());
                last = Instant::now();
                if read == 0 {
                    reader.closed().with_context(|| format!("after {length} bytes of the body"))?;
                    break;
                }
                if !self.pause.is_zero() {
                    std::thread::sleep(self.pause);
                }
            }
            let used = reader.feed(&buffer.bytes[buffer.filled.clone()], &mut |bytes| {
                hash.update(bytes);
                length += bytes.len() as u64;
                self.got.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            })?;
            buffer.filled.start += used;
        }
        Ok(Fetched {
            path: path.to_owned(),
            status: reader.status(),
            fields: reader.into_fields(),
            length,
            sha256: hex(hash),
            elapsed: begin.elapsed(),
            longest_pause,
        })
    }
}

/// Bytes that were read and not yet used. The next response may begin among them.
struct Buffer {
    bytes: Vec<u8>,
    filled: std::ops::Range<usize>,
}
