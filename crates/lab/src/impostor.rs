//! A hostile program that speaks the protocol of the agents (Shunt's daemons) by hand. It has a certificate of the
//! lab's authority (stolen, or with another name), a certificate of its own authority, or none. A *session* is the use
//! of a connection between two agents.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use shunt_ca::{Authority, CaError, Files, Request};
use shunt_wire::peer::kind;

use crate::host::Host;
use crate::lab::Lab;

/// Longest wait for an agent: agents answer at once, or give up after 5 seconds.
const PATIENCE: Duration = Duration::from_secs(8);

/// TLS settings of a hostile program, with its certificate.
pub struct Impostor {
    config: Arc<ClientConfig>,
}

/// A connection to an agent.
pub struct Connection {
    tls: Box<dyn Stream>,
    socket: TcpStream,
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// Address at which a host's agent listens for other agents.
pub fn agents_address(host: &Host) -> Result<SocketAddr> {
    let address = host.service_address().with_context(|| format!("{} is not on the service network", host.name()))?;
    Ok(SocketAddr::from((address, 7440)))
}

impl Impostor {
    /// Uses a certificate of this name from the lab's authority. If an agent of the lab has this name, the program uses
    /// that agent's certificate, as if it were stolen. Otherwise the authority issues a new certificate.
    pub fn with_certificate_of(lab: &Lab, name: &str) -> Result<Self> {
        let directory = lab.dir().join("ca");
        let authority = Authority::open(&directory);
        let files = match authority.issue(&request(name)) {
            Err(CaError::Exists(_)) => authority.files_of(name),
            issued => issued?,
        };
        Self::with(&files, &authority.certificate())
    }

    /// Uses a certificate with an agent's name that another authority than the lab's has signed.
    pub fn with_own_authority(lab: &Lab, name: &str) -> Result<Self> {
        let directory = lab.dir().join(format!("ca-of-another-than-{name}"));
        let files = Authority::create(&directory)?.issue(&request(name))?;
        Self::with(&files, &lab.dir().join("ca/ca.pem"))
    }

    /// Uses no certificate.
    pub fn without_certificate(lab: &Lab) -> Result<Self> {
        let config = builder(&lab.dir().join("ca/ca.pem"))?.with_no_client_auth();
        Ok(Self { config: speaking(config) })
    }

    fn with(files: &Files, ca: &Path) -> Result<Self> {
        let certificate = CertificateDer::from_pem_file(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)?;
        Ok(Self { config: speaking(builder(ca)?.with_client_auth_cert(vec![certificate], key)?) })
    }

    /// Connects from one host to another host's agent. If the agent refuses the connection, this shows only in the next
    /// read.
    pub fn connect(&self, from: &Host, to: &Host) -> Result<Connection> {
        let address = agents_address(to)?;
        let stream = from.run(|| TcpStream::connect_timeout(&address, PATIENCE))??;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let tls = ClientConnection::new(self.config.clone(), ServerName::try_from(to.name().to_owned())?)?;
        Ok(Connection { socket: stream.try_clone()?, tls: Box::new(StreamOwned::new(tls, stream)) })
    }
}

fn request(name: &str) -> Request {
    Request { name: name.to_owned(), addresses: Vec::new(), days: 1 }
}

fn builder(ca: &Path) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca)?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
    Ok(builder.with_root_certificates(roots))
}

fn speaking(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![b"shunt/1".to_vec()];
    Arc::new(config)
}

impl Connection {
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.tls.write_all(bytes)?;
        Ok(self.tls.flush()?)
    }

    /// Returns the next frame (message of the agents' protocol), with its header. `None` if the agent has closed the
    /// connection, or has sent nothing for [`PATIENCE`].
    pub fn frame(&mut self) -> Result<Option<Vec<u8>>> {
        let mut frame = vec![0; 8];
        if self.tls.read_exact(&mut frame).is_err() {
            return Ok(None);
        }
        let length = u32::from_le_bytes(frame[..4].try_into()?) as usize;
        frame.resize(length, 0);
        self.tls.read_exact(&mut frame[8..]).context("a frame without its end")?;
        Ok(Some(frame))
    }

    /// Waits until the agent sends PING, which it does in a session only.
    pub fn wait_for_ping(&mut self) -> Result<()> {
        loop {
            let frame = self.frame()?.context("no session began")?;
            if frame[4] == kind::PING as u8 {
                return Ok(());
            }
        }
    }

    /// Sends bytes, and returns everything that comes back until the agent closes the connection. If the agent had
    /// refused the connection, nothing comes back. Without bytes, this end sends no more after the TLS handshake.
    pub fn ask(mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.send(bytes)?;
        if bytes.is_empty() {
            self.tls.flush()?;
            self.socket.shutdown(Shutdown::Write)?;
        }
        Ok(self.rest())
    }

    /// Returns everything that comes until the agent closes or breaks the connection.
    pub fn rest(mut self) -> Vec<u8> {
        let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(bytes @ 1..) = self.tls.read(&mut buffer) {
            all.extend_from_slice(&buffer[..bytes]);
        }
        all
    }
}

/// A listener in place of an agent that has ended: other agents connect to it.
pub struct Listening {
    listener: TcpListener,
    config: Arc<ServerConfig>,
}

impl Listening {
    /// Listens at the address of the host's agent, with that agent's certificate and key.
    pub fn at(lab: &Lab, host: &Host) -> Result<Self> {
        let files = Authority::open(&lab.dir().join("ca")).files_of(host.name());
        let chain = vec![CertificateDer::from_pem_file(&files.certificate)?];
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
        // Agents that connect need no certificate. The tests are about what these agents check.
        let mut config =
            builder.with_no_client_auth().with_single_cert(chain, PrivateKeyDer::from_pem_file(&files.key)?)?;
        config.alpn_protocols = vec![b"shunt/1".to_vec()];
        let address = agents_address(host)?;
        Ok(Self { listener: host.run(|| TcpListener::bind(address))??, config: Arc::new(config) })
    }

    /// Accepts the connection of the next agent.
    pub fn accept(&self) -> Result<Connection> {
        let stream = self.listener.accept()?.0;
        stream.set_read_timeout(Some(PATIENCE))?;
        let tls = rustls::ServerConnection::new(self.config.clone())?;
        Ok(Connection { socket: stream.try_clone()?, tls: Box::new(StreamOwned::new(tls, stream)) })
    }
}
