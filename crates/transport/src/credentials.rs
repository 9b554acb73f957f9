//! Identities of agents: X.509 certificates (RFC 5280) and TLS 1.3, which both ends use to identify each other.
//!
//! An agent's identity is the DNS name in its certificate, which the authority of the configuration (`ca`) has signed.
//! Neither its address nor the name that it gives in messages counts. TLS sessions are not resumed. So both ends'
//! certificates are checked for each connection, against the files that [tls] in the configuration names, as they were
//! last read.

mod trust;
mod words;

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::{Resumption, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;

use shunt_config::{TlsConfig, server_name};
use trust::Trust;
pub use words::in_words;

/// Name of the agents' protocol for ALPN (RFC 7301). Because of it, nobody can redirect a connection to a server of
/// another protocol that has a certificate of the same name (the ALPACA attack).
pub const ALPN: &[u8] = b"shunt/1";
/// Mode bits of a key file that must be 0: the group may only read it, and others may do nothing.
const FOREIGN_BITS: u32 = 0o037;
/// Time before a certificate's end at which the agent begins to warn of it.
const SOON: Duration = Duration::from_secs(14 * 24 * 3600);

/// Why the files of `[tls]` cannot be used. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read {path}: {error}; check the file that [tls] in the configuration names")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error of open(2), read(2) or stat(2).
        error: io::Error,
    },
    /// A file does not hold the kind of object that it should.
    #[error("{path}, which [tls] in the configuration names, holds no {what} in PEM{instead}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The kind of object that should be there.
        what: &'static str,
        /// End of the message: what is there instead, and what to check. Empty if what is there explains nothing.
        instead: &'static str,
    },
    /// The key file's mode lets its group write it, or others use it.
    #[error("{path} has mode {mode:04o}, and others can read the key: chmod 0600 {path}")]
    Mode {
        /// The key file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The certificate does not have this agent's name.
    #[error("{path} is not the certificate of \"{name}\": issue one whose DNS name is the agent's `name`")]
    Name {
        /// The certificate's file.
        path: PathBuf,
        /// This agent's name.
        name: String,
    },
    /// `ca` names the agent's own certificate instead of the authority's.
    #[error(
        "{path} holds this agent's own certificate: `ca` must name the certificate of the authority that signs all \
         agents' certificates"
    )]
    Own {
        /// The file that `ca` of [tls] names.
        path: PathBuf,
    },
    /// The key is not that of the certificate.
    #[error(
        "{key} is not the key of the certificate in {certificate}: name a key and a certificate that were issued \
         together"
    )]
    Pair {
        /// The file that `certificate` of [tls] names.
        certificate: PathBuf,
        /// The file that `key` of [tls] names.
        key: PathBuf,
    },
    /// The new certificate has expired or is not valid yet, and would take the place of a valid one.
    #[error("{path} {why}")]
    Time {
        /// The certificate's file.
        path: PathBuf,
        /// Sentence that says what is wrong and what to do.
        why: &'static str,
    },
    /// rustls refuses the certificate, the key or the authority.
    #[error("[tls] in the configuration: {0}")]
    Tls(#[from] rustls::Error),
    /// The verifier cannot be built with this authority.
    #[error("{path} cannot be an authority: {error}")]
    Authority {
        /// The file that `ca` of [tls] names.
        path: PathBuf,
        /// rustls's reason.
        error: rustls::server::VerifierBuilderError,
    },
}

/// Certificate, key and authority, as they were read from the configuration's files.
pub struct Credentials {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    trust: Trust,
    not_before: SystemTime,
    not_after: SystemTime,
}

impl Credentials {
    /// Reads the files that the configuration names. `name` is this agent's name.
    ///
    /// # Errors
    /// See [`CredentialsError`].
    pub fn read(config: &TlsConfig, name: &str) -> Result<Self, CredentialsError> {
        let chain = certificates(&config.certificate)?;
        let first = chain.first().ok_or_else(|| no_certificate(&config.certificate))?.clone();
        if !names(&first, name) {
            return Err(CredentialsError::Name { path: config.certificate.clone(), name: name.into() });
        }
        if certificates(&config.ca)?.contains(&first) {
            return Err(CredentialsError::Own { path: config.ca.clone() });
        }
        let key = private_key(&config.key)?;
        let (not_before, not_after) = validity(&first).ok_or_else(|| no_certificate(&config.certificate))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let trust = Trust::read(config, &provider)?;
        let pair = |error| match error {
            rustls::Error::InconsistentKeys(_) => {
                CredentialsError::Pair { certificate: config.certificate.clone(), key: config.key.clone() }
            }
            error => error.into(),
        };
        Ok(Self {
            client: Arc::new(client(&provider, &trust, chain.clone(), key.clone_key()).map_err(pair)?),
            server: Arc::new(server(&provider, &trust, chain, key).map_err(pair)?),
            trust,
            not_before,
            not_after,
        })
    }

    /// Reads the files again. A certificate that has expired or is not valid yet does not replace a valid one. Where
    /// the present certificate is not valid either, the new one replaces it, because the authorities and lists in the
    /// files may have changed.
    ///
    /// # Errors
    /// See [`CredentialsError`]. The caller keeps the present credentials.
    pub fn renewed(&self, config: &TlsConfig, name: &str, now: SystemTime) -> Result<Self, CredentialsError> {
        let new = Self::read(config, name)?;
        match new.fault(now) {
            Some(why) if self.fault(now).is_none() => {
                Err(CredentialsError::Time { path: config.certificate.clone(), why })
            }
            _ => Ok(new),
        }
    }

    /// Returns why no agent accepts this agent's certificate at the time `now`, and what to do. `None` where the time
    /// is within its validity.
    fn fault(&self, now: SystemTime) -> Option<&'static str> {
        if self.seconds_until_good(now) > 0 {
            return Some(
                "is not valid yet and no agent accepts it: set this machine's clock, or issue another certificate and \
                 send SIGHUP",
            );
        }
        (self.seconds_left(now) <= 0)
            .then_some("has expired and no agent accepts it: issue another certificate and send SIGHUP")
    }

    /// Returns the TLS state for a connection to the agent with this name.
    ///
    /// # Errors
    /// Returns an error where a certificate cannot have this name.
    pub fn dial(&self, name: &str) -> Result<ClientConnection, rustls::Error> {
        let name = server_name(name).ok_or_else(|| rustls::Error::General(format!("\"{name}\" is no DNS name")))?;
        ClientConnection::new(self.client.clone(), name.to_owned())
    }

    /// Returns the TLS state for an accepted connection. The certificate that comes during the handshake tells which
    /// agent the other end is.
    ///
    /// # Errors
    /// Returns rustls's error.
    pub fn accept(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.server.clone())
    }

    /// Checks whether these credentials accept the other end of a connection that began with older ones. `name` is the
    /// name of the agent there.
    ///
    /// # Errors
    /// Returns why not: that agent's certificate is revoked or has expired, or its authority is no longer in `ca`.
    pub fn accepts(&self, connection: &Connection, name: &str) -> Result<(), rustls::Error> {
        self.trust.accepts(connection, name)
    }

    /// Returns the seconds until this agent's certificate expires; negative once it has expired.
    pub fn seconds_left(&self, now: SystemTime) -> i64 {
        match self.not_after.duration_since(now) {
            Ok(left) => left.as_secs() as i64,
            Err(past) => -(past.duration().as_secs() as i64),
        }
    }

    /// Returns the seconds until this agent's certificate becomes valid; 0 from then on.
    pub fn seconds_until_good(&self, now: SystemTime) -> u64 {
        self.not_before.duration_since(now).map_or(0, |left| left.as_secs().max(1))
    }

    /// Returns the length of the validity period of this agent's certificate.
    pub fn lifetime(&self) -> Duration {
        self.not_after.duration_since(self.not_before).unwrap_or_default()
    }

    /// Returns a warning for the operator: that this agent's certificate is not valid or expires soon, or that a list
    /// of revoked certificates is past its next update. `None` if there is nothing to warn of.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        if let Some(why) = self.fault(now) {
            return Some(format!("our certificate {why}"));
        }
        let left = self.seconds_left(now);
        match left {
            _ if (left as u64) < SOON.as_secs() => Some(format!(
                "our certificate expires in {} hours: issue another certificate and send SIGHUP",
                left / 3600
            )),
            _ if self.trust.next_list.is_some_and(|next| next < now) => Some(
                "the list of revoked certificates is past its next update: fetch a newer one from the authority and \
                 send SIGHUP"
                    .into(),
            ),
            _ => None,
        }
    }
}

/// Shows no key.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

/// Returns whether a certificate has this agent name. Does not verify the certificate.
pub fn names(certificate: &CertificateDer<'_>, name: &str) -> bool {
    let (Ok(parsed), Some(name)) = (ParsedCertificate::try_from(certificate), server_name(name)) else {
        return false;
    };
    verify_server_name(&parsed, &name).is_ok()
}

fn client(
    provider: &Arc<CryptoProvider>,
    trust: &Trust,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_webpki_verifier(trust.servers.clone())
        .with_client_auth_cert(chain, key)?;
    config.resumption = Resumption::disabled();
    // Programs under `shunt run` read bodies from other machines' stores. The agent makes the connections for that, and
    // passes them to the programs, which then need the keys (`Transport::into_channel`).
    config.enable_secret_extraction = true;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn server(
    provider: &Arc<CryptoProvider>,
    trust: &Trust,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(trust.clients.clone())
        .with_single_cert(chain, key)?;
    config.send_tls13_tickets = 0;
    config.enable_secret_extraction = true;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn read(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    std::fs::read(path).map_err(|error| CredentialsError::Read { path: path.into(), error })
}

fn no_certificate(path: &Path) -> CredentialsError {
    not_there(path, "certificate")
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    all.map_err(|_| no_certificate(path))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    let failed = |error| CredentialsError::Read { path: path.into(), error };
    let mode = std::fs::metadata(path).map_err(failed)?.mode() & 0o7777;
    let key = PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|_| not_there(path, PRIVATE_KEY))?;
    if mode & FOREIGN_BITS != 0 {
        return Err(CredentialsError::Mode { path: path.into(), mode });
    }
    Ok(key)
}

const PRIVATE_KEY: &str = "private key";

/// Returns the error for a file that does not hold the kind of object `what`. If two files of [tls] seem to be
/// exchanged, a frequent mistake, the error says so.
fn not_there(path: &Path, what: &'static str) -> CredentialsError {
    let file = read(path).unwrap_or_default();
    let holds = |text: &[u8]| file.windows(text.len()).any(|part| part == text);
    let instead = match what {
        PRIVATE_KEY if holds(b"BEGIN CERTIFICATE") => {
            ", but a certificate: check that `certificate` and `key` are not exchanged"
        }
        PRIVATE_KEY => "",
        _ if holds(b"PRIVATE KEY") => ", but a private key: check that two of the files are not exchanged",
        _ => "",
    };
    CredentialsError::Pem { path: path.into(), what, instead }
}

/// Returns the begin and the end of a certificate's validity period, which rustls checks but does not tell.
fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some((time_of(parsed.validity().not_before), time_of(parsed.validity().not_after)))
}

fn time_of(time: ASN1Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(time.timestamp().max(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_ca::{Authority, Request};
    use std::os::unix::fs::PermissionsExt;

    fn issued(directory: &Path, name: &str) -> TlsConfig {
        let authority = Authority::create(directory).unwrap();
        let files = authority.issue(&Request { name: name.into(), addresses: Vec::new(), days: 1 }).unwrap();
        let (ca, crl) = (authority.certificate(), Some(authority.list()));
        TlsConfig { certificate: files.certificate, key: files.key, ca, crl }
    }

    #[test]
    fn an_agents_own_certificate_is_no_authority() {
        let dir = tempfile::tempdir().unwrap();
        let config = issued(dir.path(), "fe1");
        let own = TlsConfig { ca: config.certificate.clone(), crl: None, ..config };
        let error = Credentials::read(&own, "fe1").unwrap_err().to_string();
        assert!(error.contains("`ca` must name the certificate of the authority"), "{error}");
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config = issued(dir.path(), "fe1");
        assert!(Credentials::read(&config, "fe1").is_ok());
        for (mode, good) in [(0o644, false), (0o604, false), (0o660, false), (0o640, true), (0o400, true)] {
            std::fs::set_permissions(&config.key, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = Credentials::read(&config, "fe1");
            assert_eq!(read.is_ok(), good, "{mode:o}: {:?}", read.err());
        }
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let ours = issued(&dir.path().join("one"), "fe1");
        let other = issued(&dir.path().join("two"), "fe1");
        let said = |config: &TlsConfig, name| Credentials::read(config, name).unwrap_err().to_string();
        assert!(said(&ours, "fe2").contains("not the certificate of \"fe2\""));
        let missing = TlsConfig { ca: dir.path().join("none.pem"), ..ours.clone() };
        assert!(said(&missing, "fe1").contains("none.pem"));
        let no_key = TlsConfig { key: ours.ca.clone(), ..ours.clone() };
        std::fs::set_permissions(&no_key.key, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(said(&no_key, "fe1").contains("no private key in PEM"));
        assert!(said(&no_key, "fe1").contains("check that `certificate` and `key` are not exchanged"));
        let no_list = TlsConfig { crl: Some(ours.ca.clone()), ..ours.clone() };
        let no_list = said(&no_list, "fe1");
        assert!(
            no_list.contains("ca.pem, which") && no_list.contains("holds no list of revoked certificates"),
            "{no_list}"
        );
        let mixed = TlsConfig { key: other.key, ..ours };
        let not_the_key =
            format!("{} is not the key of the certificate in {}", mixed.key.display(), mixed.certificate.display());
        assert!(said(&mixed, "fe1").starts_with(&not_the_key), "a key of another certificate");
    }

    #[test]
    fn an_end_that_is_near_is_spoken_of() {
        let dir = tempfile::tempdir().unwrap();
        let credentials = Credentials::read(&issued(dir.path(), "fe1"), "fe1").unwrap();
        let now = SystemTime::now();
        assert!((86_000..=86_400).contains(&credentials.seconds_left(now)), "{}", credentials.seconds_left(now));
        assert!(credentials.warning(now).unwrap().contains("expires in 23 hours"));
        assert!(credentials.warning(now + Duration::from_secs(86_401)).unwrap().contains("has expired"));
        assert!(credentials.warning(now - SOON).unwrap().contains("is not valid yet"));
        let credentials = Credentials { not_before: UNIX_EPOCH, ..credentials };
        assert_eq!(credentials.warning(now - SOON), None);
        let old = Credentials {
            trust: Trust { next_list: Some(now), ..credentials.trust },
            not_after: now + SOON,
            ..credentials
        };
        assert!(
            old.warning(now + Duration::from_secs(1)).is_some_and(|text| text.contains("expires in")),
            "the end first"
        );
        let old = Credentials { not_after: now + 2 * SOON, ..old };
        assert!(old.warning(now + Duration::from_secs(1)).unwrap().contains("past its next update"));
        assert_eq!(old.warning(now - Duration::from_secs(1)), None);
    }

    #[test]
    fn an_invalid_certificate_does_not_replace_a_valid_one() {
        let dir = tempfile::tempdir().unwrap();
        let config = issued(dir.path(), "fe1");
        let (now, day) = (SystemTime::now(), Duration::from_secs(24 * 3600));
        let read = || Credentials::read(&config, "fe1").unwrap();
        let good = Credentials { not_before: now - 9 * day, not_after: now + 9 * day, ..read() };
        let said = |at| good.renewed(&config, "fe1", at).unwrap_err().to_string();
        let file = config.certificate.display().to_string();
        let (late, early) = (said(now + 2 * day), said(now - 2 * day));
        assert!(late.starts_with(&file) && late.contains("has expired"), "{late}");
        assert!(early.starts_with(&file) && early.contains("is not valid yet"), "{early}");
        assert!(good.renewed(&config, "fe1", now).is_ok());
        let expired = read();
        assert!(
            expired.renewed(&config, "fe1", now + 2 * day).is_ok(),
            "its list of revoked certificates may be newer"
        );
    }

    #[test]
    fn a_certificate_is_for_its_name_only() {
        let dir = tempfile::tempdir().unwrap();
        let certificate = certificates(&issued(dir.path(), "fe1").certificate).unwrap().remove(0);
        assert!(names(&certificate, "fe1"));
        for other in ["fe", "fe11", "fe1.example", "*", "", "10.0.0.1"] {
            assert!(!names(&certificate, other), "{other:?}");
        }
    }
}
