//! Frontends that speak TLS to their clients: nginx and OpenSSL, as Debian ships them.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CipherSuite, ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use shunt_ca::{Files, Request};
use shunt_odb::store::Limits;
use shunt_testbed::assert_same_bytes;

use crate::bed::{Bed, bytes, free_address};
use crate::http::{Client, connect};
use crate::mix::{SIZES, Site, ask_as, files, unchanged};
use crate::nginx::{Tier, proxy_to, tier};

/// Name in the frontend's certificate.
pub const NAME: &str = "frontend";
pub const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];
/// Configuration of proxies that keep each body in memory as a whole.
const WHOLE: &str = "proxy_buffers 32 64k; proxy_busy_buffers_size 256k; proxy_max_temp_file_size 0;";

/// Chain of three nginx. The frontend listens for TLS, too.
struct Chain {
    tls: SocketAddr,
    roots: RootCertStore,
    _tiers: [Tier; 3],
}

/// Returns the frontend's certificate. The first call issues it.
pub fn certificate(bed: &Bed) -> Files {
    let directory = bed.authority.certificate().parent().unwrap().to_owned();
    let [certificate, key] = ["pem", "key"].map(|kind| directory.join(format!("{NAME}.{kind}")));
    if certificate.exists() {
        return Files { certificate, key };
    }
    bed.authority.issue(&Request { name: NAME.into(), addresses: Vec::new(), days: 1 }).unwrap()
}

fn chain(bed: &Bed, certificate: &Files, backend: &str, proxy: &str) -> Chain {
    let backend = tier(bed, "backend", backend, &format!("root {};", files(bed).display()), true);
    let (http, server) = proxy_to(backend.address, proxy);
    let intermediate = tier(bed, "intermediate", &http, &server, true);
    let (http, server) = proxy_to(intermediate.address, proxy);
    let tls = free_address();
    let http = format!(
        "{http} ssl_protocols TLSv1.2 TLSv1.3; ssl_certificate {}; ssl_certificate_key {}; server {{ listen {tls} ssl; {server} }}",
        certificate.certificate.display(),
        certificate.key.display()
    );
    let frontend = tier(bed, "frontend", &http, &server, true);
    Chain { tls, roots: roots(bed), _tiers: [frontend, intermediate, backend] }
}

impl Chain {
    fn client(&self, suites: &[CipherSuite]) -> Client {
        client(self.tls, &self.roots, suites)
    }
}

/// Returns the authority that has issued the certificate, for clients.
pub fn roots(bed: &Bed) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(bed.authority.certificate()).unwrap()).unwrap();
    roots
}

/// Returns a client that offers these suites, and resumes its sessions.
pub fn client(to: SocketAddr, roots: &RootCertStore, suites: &[CipherSuite]) -> Client {
    let mut provider = ring::default_provider();
    provider.cipher_suites.retain(|suite| suites.contains(&suite.suite()));
    let config = ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions();
    let config = Arc::new(config.unwrap().with_root_certificates(roots.clone()).with_no_client_auth());
    Client::by(move || {
        let connection = ClientConnection::new(Arc::clone(&config), ServerName::try_from(NAME).unwrap()).unwrap();
        Box::new(Updating { stream: StreamOwned::new(connection, connect(to)), requests: 0 })
    })
}

/// TLS connection that updates the keys of both directions before every seventh request.
struct Updating {
    stream: StreamOwned<ClientConnection, TcpStream>,
    requests: u32,
}

impl Read for Updating {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.read(to)
    }
}

impl Write for Updating {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.requests += 1;
        if self.requests.is_multiple_of(7) {
            self.stream.conn.refresh_traffic_keys().map_err(io::Error::other)?;
        }
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// nginx copies each body through a buffer of 16 KiB, piece by piece.
#[test]
fn bodies_that_are_copied_are_not_fetched_page_by_page() {
    let bed = Bed::of(3, Limits::default());
    let chain = chain(&bed, &certificate(&bed), "sendfile off;", WHOLE);
    let between = |name| bed.machine_of("frontend").program_counted("nginx", name);
    let (mut client, before) = (chain.client(&SUITES), between("faults"));
    for _ in 0..100 {
        let (_, body) = client.get("/262144");
        assert_same_bytes(&body, &bytes(262_144, 262_144), "the body");
    }
    let (faults, absent) = (between("faults") - before, between("received_absent"));
    println!("{absent} bytes came absent, {faults} faults");
    assert!(absent > 20_000_000, "bodies come absent: {absent}");
    assert!(faults < 20, "{faults} faults for 100 bodies");
}

/// Tests suites, files and ranges, with clients that resume sessions, update keys and connect anew.
fn mixed(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let certificate = certificate(&bed);
    for (turn, (backend, proxy)) in [("sendfile off;", WHOLE), ("sendfile on;", "")].into_iter().enumerate() {
        let chain = chain(&bed, &certificate, backend, proxy);
        for suite in SUITES {
            let site = Site { to: chain.tls, prefixes: &[""], echoes: &[], ranges: true, made: unchanged };
            let seed = u64::from(std::process::id()) + turn as u64;
            ask_as(&site, || chain.client(&[suite]), requests / 6, seed);
        }
    }
}

#[test]
fn a_sample() {
    mixed(300);
}

#[test]
#[ignore = "10,000 requests take a minute"]
fn all() {
    mixed(10_002);
}

/// Tests curl, whose TLS library is OpenSSL, with TLS 1.3 and with TLS 1.2.
#[test]
fn curl_and_openssl_get_the_bytes() {
    let bed = Bed::of(3, Limits::default());
    let chain = chain(&bed, &certificate(&bed), "sendfile off;", WHOLE);
    for version in ["--tlsv1.3", "--tls-max 1.2"] {
        for size in SIZES {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "20", "--cacert"]);
            curl.arg(bed.authority.certificate()).args(version.split(' '));
            curl.args(["--resolve", &format!("{NAME}:{}:127.0.0.1", chain.tls.port())]);
            let got = curl.arg(format!("https://{NAME}:{}/{size}", chain.tls.port())).output().unwrap();
            assert!(got.status.success(), "{}", String::from_utf8_lossy(&got.stderr));
            assert_same_bytes(&got.stdout, &bytes(size as u64, size), version);
        }
    }
}
