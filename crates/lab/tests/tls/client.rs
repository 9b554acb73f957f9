//! A TLS client made with rustls. It does what ordinary programs do not: it stops, asks for key updates, damages
//! records, and reveals its secrets to the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CipherSuite, ClientConfig, ClientConnection, KeyLog, RootCertStore};
use sha2::{Digest, Sha256};

use crate::bed::authority;
use crate::service::{Running, same_file, socket_at};

/// The server's first application traffic secret.
#[derive(Debug, Default)]
struct Secret(Mutex<Vec<u8>>);

impl KeyLog for Secret {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if label == "SERVER_TRAFFIC_SECRET_0" {
            *self.0.lock().unwrap() = secret.to_vec();
        }
    }
}

/// Data that a client needs to connect to a service, and to compare the bodies.
#[derive(Debug, Clone)]
pub struct Target {
    address: Ipv4Addr,
    pub port: u16,
    authority: PathBuf,
    pub files: PathBuf,
}

impl Target {
    pub fn of(service: &Running<'_>) -> Self {
        Self {
            address: service.lab.frontend().address(),
            port: 443,
            authority: authority(service),
            files: service.files.clone(),
        }
    }
}

/// One connection. To be used on the client's host ([`shunt_lab::Host::run`]).
pub struct Client {
    pub stream: TcpStream,
    pub tls: ClientConnection,
    secret: Arc<Secret>,
    /// Decrypted bytes that have not been used.
    input: Vec<u8>,
    /// If true, one bit of the next bytes that are read from the socket is inverted.
    pub damage: bool,
    /// If true, the client sends nothing for now.
    pub hold: bool,
}

/// Response body that is being read.
pub struct Body {
    /// The response's header, in lower case.
    pub header: String,
    pub left: u64,
    hash: Sha256,
}

/// Data needed to decrypt the records that a server sent on one connection.
#[derive(Debug, Clone)]
pub struct Told {
    pub client_port: u16,
    /// The server's first application traffic secret.
    pub secret: Vec<u8>,
    pub suite: Option<CipherSuite>,
    /// The connection was reset, so its last record may be cut.
    pub reset: bool,
}

/// Data that connections share: the trusted authority, sessions to resume, and the last connection's secret.
#[derive(Clone)]
pub struct Shared {
    config: Arc<ClientConfig>,
    secret: Arc<Secret>,
}

impl Shared {
    pub fn new(target: &Target) -> Result<Self> {
        Self::of(target, rustls::crypto::ring::default_provider())
    }

    fn of(target: &Target, provider: CryptoProvider) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&target.authority)?)?;
        let config = ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions()?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        let secret = Arc::new(Secret::default());
        config.key_log = secret.clone();
        Ok(Self { config: Arc::new(config), secret })
    }

    /// Returns data for connections that offer one cipher suite only.
    pub fn with_suite(target: &Target, suite: CipherSuite) -> Result<Self> {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites.retain(|offered| offered.suite() == suite);
        Self::of(target, provider)
    }

    /// Lets a connection that resumes a session send early data.
    #[must_use]
    pub fn with_early_data(mut self) -> Self {
        Arc::make_mut(&mut self.config).enable_early_data = true;
        self
    }
}

pub fn request(path: &str) -> String {
    format!("GET /{path} HTTP/1.1\r\nHost: frontend\r\n\r\n")
}

/// Connects to a port of the frontend, from a local port that the client may use for other connections, too.
pub fn connect_from(port: u16, target: &Target, to: u16) -> Result<TcpStream> {
    let socket = socket_at(Some(port))?;
    rustix::net::connect(&socket, &SocketAddr::from((target.address, to)))?;
    Ok(socket.into())
}

impl Client {
    pub fn connect(target: &Target) -> Result<Self> {
        Self::connect_with(target, &Shared::new(target)?)
    }

    pub fn connect_with(target: &Target, shared: &Shared) -> Result<Self> {
        Self::over(TcpStream::connect((target.address, target.port))?, target, shared)
    }

    /// Makes a TLS connection from a local port that the client may use for connections to other ports, too.
    pub fn connect_from(port: u16, target: &Target) -> Result<Self> {
        Self::over(connect_from(port, target, target.port)?, target, &Shared::new(target)?)
    }

    fn over(stream: TcpStream, target: &Target, shared: &Shared) -> Result<Self> {
        let tls = ClientConnection::new(shared.config.clone(), IpAddr::from(target.address).into())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self { stream, tls, secret: shared.secret.clone(), input: Vec::new(), damage: false, hold: false })
    }

    /// Returns the data for decrypting records. Call it after the handshake, and before another connection is made with
    /// the same [`Shared`], which has room for one secret only.
    pub fn told(&self) -> Result<Told> {
        let secret = self.secret.0.lock().unwrap().clone();
        let suite = self.tls.negotiated_cipher_suite().map(|suite| suite.suite());
        Ok(Told { client_port: self.stream.local_addr()?.port(), secret, suite, reset: false })
    }

    pub fn flush(&mut self) -> Result<()> {
        while !self.hold && self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream)?;
        }
        Ok(())
    }

    /// Reads once. Returns `false` at the end of the stream.
    fn fill(&mut self) -> Result<bool> {
        self.flush()?;
        let mut bytes = [0; 16 << 10];
        let read = match self.stream.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
            read => read?,
        };
        if std::mem::take(&mut self.damage) {
            bytes[read / 2] ^= 1;
        }
        let mut wire = &bytes[..read];
        while !wire.is_empty() {
            self.tls.read_tls(&mut wire)?;
            let state = self.tls.process_new_packets();
            let plain = match state {
                Ok(state) => state.plaintext_bytes_to_read(),
                Err(error) => {
                    self.flush()?; // sends the alert
                    return Err(error.into());
                }
            };
            let begin = self.input.len();
            self.input.resize(begin + plain, 0);
            self.tls.reader().read_exact(&mut self.input[begin..])?;
        }
        Ok(read > 0)
    }

    /// Sends a request, and reads the header of the response.
    pub fn ask(&mut self, path: &str) -> Result<Body> {
        self.tls.writer().write_all(request(path).as_bytes())?;
        self.answer()
    }

    /// Reads the header of a response.
    pub fn answer(&mut self) -> Result<Body> {
        let end = loop {
            if let Some(at) = self.input.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            ensure!(self.fill()?, "closed before the header's end");
        };
        let header = String::from_utf8(self.input.drain(..end).collect())?.to_lowercase();
        ensure!(header.starts_with("http/1.1 200"), "{header}");
        let length = header.lines().find_map(|line| line.strip_prefix("content-length: ")).context("no length")?;
        Ok(Body { left: length.parse()?, hash: Sha256::new(), header })
    }

    /// Reads a body until `left` bytes of it are still to be read.
    pub fn read(&mut self, body: &mut Body, left: u64) -> Result<()> {
        while body.left > left {
            if self.input.is_empty() {
                ensure!(self.fill()?, "closed with {} bytes of the body to come", body.left);
            }
            let most = usize::try_from(body.left - left)?.min(self.input.len());
            body.hash.update(&self.input[..most]);
            self.input.drain(..most);
            body.left -= most as u64;
        }
        Ok(())
    }

    /// Reads the rest of a body, and asserts that the whole body is the file `path`.
    pub fn finish(&mut self, target: &Target, mut body: Body, path: &str) -> Result<()> {
        self.read(&mut body, 0)?;
        let got: String = body.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        same_file(&target.files, path, &got)
    }

    pub fn get(&mut self, target: &Target, path: &str) -> Result<()> {
        let body = self.ask(path)?;
        self.finish(target, body, path)
    }
}
