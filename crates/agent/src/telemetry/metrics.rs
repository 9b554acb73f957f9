//! HTTP endpoint for Prometheus, on separate threads. However many clients ask, and however slowly they read, the
//! agent's loop gets one request at a time, as from `shunt stats`. It gets none while the newest page is fresh.
//!
//! A few threads wait in accept(2) from the start. So there are never more connections than threads. Each connection
//! ends after some seconds, however slowly its client sends or takes. Only the head of one request is read, and only
//! counters and peers' names are sent.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use serde_json::Value;
use shunt_wire::local::{Header, MAX_STATS_BYTES, kind};
use zerocopy::{FromBytes, IntoBytes};

use crate::os::threads;
use crate::telemetry::exposition::{CONTENT_TYPE, exposition};
use shunt_host::packets;

const THREADS: usize = 4;
/// Time in which a request's head must arrive, and in which a client must take the whole answer.
const PATIENCE: Duration = Duration::from_secs(5);
const HEAD_BYTES: usize = 8 << 10;
const HEADERS: usize = 64;
/// Time that the agent may take to answer a thread. The agent answers at once, unless it is ending.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Age up to which the newest page is sent again, instead of a new one.
const FRESH: Duration = Duration::from_millis(200);

/// Path of the agent's socket, and the newest page, for all threads.
struct Asker {
    socket: PathBuf,
    page: Mutex<Option<(Instant, String)>>,
}

/// Listening socket, before its threads run.
pub struct Endpoint {
    listener: Arc<TcpListener>,
    asker: Arc<Asker>,
}

impl Endpoint {
    /// Listens at `address`. `socket` is the path of the agent's Unix socket.
    ///
    /// # Errors
    /// Returns the kernel's error of bind(2) or listen(2).
    pub fn listen(address: SocketAddr, socket: &Path) -> io::Result<Self> {
        let listener = Arc::new(TcpListener::bind(address)?);
        Ok(Self { listener, asker: Arc::new(Asker { socket: socket.to_owned(), page: Mutex::new(None) }) })
    }

    /// Starts the threads, which serve until the process ends. Call it once the agent has given up its own
    /// capabilities, and before it restricts its system calls.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be made.
    pub fn serve(self) -> io::Result<()> {
        let work = |_| {
            let (listener, asker) = (self.listener.clone(), self.asker.clone());
            move || answer_all(&listener, &asker)
        };
        threads::start("metrics", "cannot start the thread that serves counters", (0..THREADS).map(work).collect())
    }
}

fn answer_all(listener: &TcpListener, asker: &Asker) -> ! {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let _ = answer(stream, asker);
            }
            // accept(2) has failed, most often because there are no more descriptors.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut stream: TcpStream, asker: &Asker) -> io::Result<()> {
    let mut head = [0; HEAD_BYTES];
    let (status, content_type, body) = match read_head(&mut stream, &mut head)? {
        Request::Metrics => match asker.page() {
            Ok(page) => ("200 OK", CONTENT_TYPE, page),
            Err(error) => ("503 Service Unavailable", "text/plain", format!("the agent does not answer: {error}\n")),
        },
        Request::OtherPath => ("404 Not Found", "text/plain", "counters are at /metrics\n".to_owned()),
        Request::OtherMethod => ("405 Method Not Allowed", "text/plain", "only GET is supported\n".to_owned()),
        Request::Bad => ("400 Bad Request", "text/plain", "this is no HTTP request\n".to_owned()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    write(&mut stream, &[head.as_bytes(), body.as_bytes()].concat(), Instant::now() + PATIENCE)
}

/// Writes an answer. A client that reads, but so slowly that the deadline passes, gets only a part.
fn write(stream: &mut TcpStream, mut answer: &[u8], deadline: Instant) -> io::Result<()> {
    while !answer.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(answer) {
            Ok(written) => answer = &answer[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Request {
    Metrics,
    OtherPath,
    OtherMethod,
    Bad,
}

/// Reads to the end of a request's head, within limits of time and size.
fn read_head(stream: &mut TcpStream, head: &mut [u8; HEAD_BYTES]) -> io::Result<Request> {
    let deadline = Instant::now() + PATIENCE;
    let mut filled = 0;
    loop {
        match parse(&head[..filled]) {
            Some(request) => return Ok(request),
            None if filled == HEAD_BYTES => return Ok(Request::Bad),
            None => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut head[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            // With a timeout set, this also happens when the process was stopped and continues (signal(7)).
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Parses a request's head. Returns `None` if more has to be read.
fn parse(head: &[u8]) -> Option<Request> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => None,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default().split('?').next();
            Some(match (request.method, path) {
                (Some("GET"), Some("/metrics")) => Request::Metrics,
                (Some("GET"), _) => Request::OtherPath,
                _ => Request::OtherMethod,
            })
        }
        Err(_) => Some(Request::Bad),
    }
}

impl Asker {
    /// Returns the page of counters. If another thread is just asking the agent, waits for that answer.
    fn page(&self) -> io::Result<String> {
        let mut page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, text)) = page.as_ref()
            && when.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let text = exposition(&self.ask()?);
        *page = Some((Instant::now(), text.clone()));
        Ok(text)
    }

    /// Asks the agent, as `shunt stats` does.
    fn ask(&self) -> io::Result<Value> {
        let agent = packets::connect(&self.socket)?;
        set_socket_timeout(&agent, Timeout::Recv, Some(ANSWER_LIMIT))?;
        let request = Header { kind: kind::STATS, size: size_of::<Header>() as u32 };
        rustix::net::send(&agent, request.as_bytes(), SendFlags::NOSIGNAL)?;
        let mut answer = vec![0; MAX_STATS_BYTES];
        let (length, _) = retry_on_intr(|| rustix::net::recv(&agent, &mut answer[..], RecvFlags::empty()))?;
        match Header::read_from_prefix(&answer[..length]) {
            Ok((header, text)) if header.kind == kind::STATS_TEXT => Ok(serde_json::from_slice(text)?),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart_however_they_come() {
        let cases: [(&[u8], Option<Request>); 8] = [
            (b"", None),
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n", None),
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Some(Request::Metrics)),
            (b"GET /metrics?name[]=x HTTP/1.0\r\n\r\n", Some(Request::Metrics)),
            (b"GET / HTTP/1.1\r\n\r\n", Some(Request::OtherPath)),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", Some(Request::OtherMethod)),
            (b"\x16\x03\x01\x02\x00", Some(Request::Bad)),
            (b"GET /metrics\r\n\r\n", Some(Request::Bad)),
        ];
        for (head, expected) in cases {
            assert_eq!(parse(head), expected, "{:?}", String::from_utf8_lossy(head));
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(HEADERS + 1));
        assert_eq!(parse(many.as_bytes()), Some(Request::Bad));
    }

    #[test]
    fn a_client_that_reads_slowly_does_not_keep_the_thread() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        // A read each 10 ms lets some write succeed in any 200 ms. The whole answer would take minutes.
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while matches!(client.read(&mut part), Ok(1..)) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let end = write(&mut stream, &vec![b'x'; 64 << 20], Instant::now() + Duration::from_millis(200));
        let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(end.is_err_and(|error| kinds.contains(&error.kind())));
    }
}
