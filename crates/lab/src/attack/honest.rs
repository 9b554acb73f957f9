//! Honest clients: they ask for bodies of mixed lengths over plain connections and TLS, compare every byte, and note
//! every latency.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::stalled;
use crate::answer::{Answer, Ending};
use crate::host::Host;
use crate::http::get_request;
use crate::lab::Lab;
use crate::random::Random;
use crate::tls;

/// Files: name, size in bytes, and number of requests out of 100 that ask for it.
pub(super) const FILES: &[(&str, u64, usize)] =
    &[("1k", 1 << 10, 30), ("64k", 64 << 10, 35), ("256k", 256 << 10, 22), ("1m", 1 << 20, 10), ("4m", 4 << 20, 3)];
/// Number of clients at the same time.
const CLIENTS: usize = 10;
/// Largest number of responses on one connection.
const LONGEST: usize = 12;
/// Longest wait for a connection, or for more bytes of a response.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time without a byte after which a client notes the state of the connection on each machine.
const QUIET: Duration = Duration::from_secs(5);
const THINK: Duration = Duration::from_millis(25);

/// Results of all honest clients.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) responses: u64,
    pub(super) bytes: u64,
    /// Responses that were not whole, and connections that could not be made, each described in words.
    pub(super) wrong: Vec<String>,
    /// Latency from request to last byte, in nanoseconds.
    pub(super) latency_ns: Histogram<u64>,
}

/// The service, and the host on which its clients run.
struct Service<'a> {
    lab: &'a Lab,
    client: &'a Host,
    host: String,
    plain: SocketAddr,
    encrypted: SocketAddr,
    tls: Arc<ClientConfig>,
}

/// Loads the service of a lab for `time`.
pub(super) fn load(lab: &Lab, client: &Host, server: SocketAddr, time: Duration, seed: u64) -> Result<Seen> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(tls::tls_authority(lab.frontend()))?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
    let tls = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let encrypted = SocketAddr::new(server.ip(), tls::PORT);
    let service = Service { lab, client, host: lab.frontend().name().to_owned(), plain: server, encrypted, tls };
    let over = AtomicBool::new(false);
    let seen = Mutex::new(Seen { responses: 0, bytes: 0, wrong: Vec::new(), latency_ns: Histogram::new(3)? });
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (service, seen, over) = (&service, &seen, &over);
                let mut random = Random::new(seed, 1000 + number as u64);
                scope.spawn(move || client.run(|| live(service, number % 2 == 1, &mut random, seen, over))?)
            })
            .collect();
        std::thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        for client in clients {
            match client.join() {
                Ok(lived) => lived?,
                Err(_) => bail!("an honest client panicked"),
            }
        }
        Ok(())
    })?;
    Ok(seen.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Sends requests on one connection after another until `over` is set.
fn live(
    service: &Service<'_>,
    encrypted: bool,
    random: &mut Random,
    seen: &Mutex<Seen>,
    over: &AtomicBool,
) -> Result<()> {
    let note = |wrong: String| {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.responses += 1;
        seen.wrong.push(wrong);
    };
    while !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let stream = match connect(service, encrypted) {
            Ok(stream) => stream,
            Err(error) => {
                note(format!("no connection after {:.1?}: {error:#}", begin.elapsed()));
                continue;
            }
        };
        let mut stream = stream;
        for _ in 0..1 + random.below(LONGEST) {
            let (file, size) = draw(random);
            let begin = Instant::now();
            let mut looked = String::new();
            let ending = ask(&mut *stream, service, file, size, &mut looked)?;
            let took = begin.elapsed();
            if ending != Ending::Whole {
                note(format!("{file}{}: {ending} after {took:.1?}{looked}", if encrypted { " over TLS" } else { "" }));
                break;
            }
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.responses += 1;
            seen.bytes += size;
            let _ = seen.latency_ns.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            drop(seen);
            if over.load(Ordering::Relaxed) {
                return Ok(());
            }
            std::thread::sleep(THINK.mul_f64(2.0 * random.part()));
        }
    }
    Ok(())
}

trait Stream: Read + Write {
    /// Addresses of the client's end and of the server's end.
    fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)>;
}

impl Stream for TcpStream {
    fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.local_addr()?, self.peer_addr()?))
    }
}

impl Stream for StreamOwned<ClientConnection, TcpStream> {
    fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        self.sock.ends()
    }
}

fn connect(service: &Service<'_>, encrypted: bool) -> Result<Box<dyn Stream>> {
    let address = if encrypted { service.encrypted } else { service.plain };
    let stream = TcpStream::connect_timeout(&address, PATIENCE).context("connecting")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    if !encrypted {
        stream.set_read_timeout(Some(QUIET))?;
        return Ok(Box::new(stream));
    }
    let name = ServerName::try_from(service.host.clone())?;
    let mut stream = StreamOwned::new(ClientConnection::new(service.tls.clone(), name)?, stream);
    // The handshake does not count as part of a response's time.
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).context("the TLS handshake")?;
    }
    stream.sock.set_read_timeout(Some(QUIET))?;
    Ok(Box::new(stream))
}

fn draw(random: &mut Random) -> (&'static str, u64) {
    let mut left = random.below(100);
    for (file, size, share) in FILES {
        match left.checked_sub(*share) {
            Some(rest) => left = rest,
            None => return (file, *size),
        }
    }
    (FILES[0].0, FILES[0].1)
}

/// Asks for a file. Each time that nothing has come for [`QUIET`], appends to `looked` the state that each machine has
/// for the connection. After [`PATIENCE`] without a byte, returns [`Ending::Hang`] instead.
fn ask(stream: &mut dyn Stream, service: &Service<'_>, file: &str, size: u64, looked: &mut String) -> Result<Ending> {
    let (mut answer, mut waited) = (Answer::of(file, size), Duration::ZERO);
    if stream
        .write_all(get_request(service.plain, &format!("/{file}"), &[]).as_bytes())
        .and_then(|()| stream.flush())
        .is_err()
    {
        return Ok(Ending::Unanswered);
    }
    let mut buffer = [0; 64 << 10];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(answer.closed()),
            Ok(bytes) => {
                waited = Duration::ZERO;
                answer.feed(&buffer[..bytes])?;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                waited += QUIET;
                if waited >= PATIENCE {
                    return Ok(Ending::Hang(answer.body_bytes()));
                }
                if let Ok((local, remote)) = stream.ends() {
                    looked.push_str(&stalled::look(service.lab, service.client, local, remote));
                }
            }
            Err(_) => return Ok(answer.reset()),
        }
        if let Some(ending) = answer.ending() {
            return Ok(ending);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_asked_for() {
        assert_eq!(FILES.iter().map(|file| file.2).sum::<usize>(), 100);
        let mut random = Random::new(1, 1);
        let drawn: std::collections::BTreeSet<_> = (0..1000).map(|_| draw(&mut random).0).collect();
        assert_eq!(drawn.len(), FILES.len());
    }
}
