//! A small certificate authority for trials: a directory with one key that signs the certificates of agents.
//!
//! ```text
//! DIR/ca.pem      certificate of the authority: every agent's `ca`
//! DIR/ca.key      key of the authority: stays in this directory
//! DIR/crl.pem     the authority's list of revoked certificates: every agent's `crl`
//! DIR/NAME.pem    certificate of the agent NAME
//! DIR/NAME.key    key of the agent NAME: to be moved to its machine and deleted here
//! ```
//!
//! Only the list of revoked certificates is ever overwritten. So no command can replace a certificate or key that a
//! running service uses. A certificate says one thing: its holder is the agent of that name (a DNS name in
//! subjectAltName, RFC 5280, 4.2.1.6). Its holder may use it as TLS client and as TLS server.
#![forbid(unsafe_code)]

mod revoked;

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use shunt_wire::peer::is_name;
use time::{Duration, OffsetDateTime};

use revoked::Revoked;

const AUTHORITY: &str = "ca";
const AUTHORITY_DAYS: u32 = 3650;
/// Certificates and lists of revoked ones are backdated by this time, because the machines' clocks differ.
const CLOCKS_DIFFER: Duration = Duration::hours(1);

/// Reasons why the authority could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The name is not one that an agent can have.
    #[error("\"{0}\" cannot be an agent's name: write a DNS name of 1 to 63 characters of a-z 0-9 . _ -")]
    Name(String),
    /// The validity is not 1 to 3650 days.
    #[error("{0} days: must be 1 to 3650")]
    Days(u32),
    /// A file exists already.
    #[error("{0} exists and is not overwritten: choose another name or directory, or move the file away")]
    Exists(PathBuf),
    /// There is no authority in this directory.
    #[error("{path}: {error}; run `shunt ca init` to make an authority")]
    Missing {
        /// File that could not be read.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The authority's certificate or key cannot be parsed.
    #[error("{path} was not written by `shunt ca init`: {error}")]
    Broken {
        /// File that cannot be parsed.
        path: PathBuf,
        /// The parser's error.
        error: rcgen::Error,
    },
    /// The list of revoked certificates cannot be parsed.
    #[error("{0} was not written by `shunt ca init` or `shunt ca revoke`")]
    NotAList(PathBuf),
    /// The certificate to be revoked does not exist or cannot be parsed.
    #[error("{path}: {error}; name an agent that has a certificate from `shunt ca issue`")]
    NotIssued {
        /// File of the certificate.
        path: PathBuf,
        /// Error of reading or parsing that file.
        error: String,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {path}: {error}")]
    Write {
        /// File or directory.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The certificate library failed.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// Files of a certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Certificate in PEM.
    pub certificate: PathBuf,
    /// Key in PEM, PKCS #8, mode 0600.
    pub key: PathBuf,
}

impl Files {
    fn of(directory: &Path, name: &str) -> Self {
        Self { certificate: directory.join(format!("{name}.pem")), key: directory.join(format!("{name}.key")) }
    }

    /// Writes both files. The key is written first: without it, the certificate would be of no use.
    fn write(&self, certificate: &str, key: &KeyPair) -> Result<(), CaError> {
        for path in [&self.certificate, &self.key] {
            if path.exists() {
                return Err(CaError::Exists(path.clone()));
            }
        }
        write_new(&self.key, 0o600, &key.serialize_pem())?;
        write_new(&self.certificate, 0o644, certificate).inspect_err(|_| drop(std::fs::remove_file(&self.key)))
    }

    /// Removes both files, which this command has written. Otherwise they would be in the way of the next attempt.
    fn take_back(&self) {
        for path in [&self.certificate, &self.key] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Contents of a certificate to be issued.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the agent.
    pub name: String,
    /// IP addresses that the certificate also lists. Agents check only the name; the addresses are for tools that show
    /// certificates.
    pub addresses: Vec<IpAddr>,
    /// Validity in days.
    pub days: u32,
}

/// Directory of an authority.
#[derive(Clone, Debug)]
pub struct Authority {
    directory: PathBuf,
}

impl Authority {
    /// Makes an authority in a directory, which is created where it is missing.
    ///
    /// # Errors
    /// Returns [`CaError::Exists`] if the directory has an authority already. Returns another [`CaError`] if the
    /// authority cannot be made.
    pub fn create(directory: &Path) -> Result<Self, CaError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.map_err(|error| CaError::Write { path: directory.into(), error })?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named("Shunt agents' authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        good_for(&mut params, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?;
        let files = Files::of(directory, AUTHORITY);
        files.write(&certificate.pem(), &key)?;
        let authority = Self { directory: directory.into() };
        authority.write_empty_list().inspect_err(|_| files.take_back())?;
        Ok(authority)
    }

    fn write_empty_list(&self) -> Result<(), CaError> {
        write_new(&self.list(), 0o644, &Revoked::none().sign(&self.issuer()?)?)
    }

    /// Returns the authority that [`Authority::create`] has made in a directory. Reads no file yet.
    pub fn open(directory: &Path) -> Self {
        Self { directory: directory.into() }
    }

    /// Path of the authority's certificate.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        Files::of(&self.directory, AUTHORITY).certificate
    }

    /// Path of the list of revoked certificates.
    #[must_use]
    pub fn list(&self) -> PathBuf {
        self.directory.join("crl.pem")
    }

    /// Revokes an agent's certificate. Returns the number of revoked certificates on the list after that.
    ///
    /// # Errors
    /// Returns a [`CaError`]: there is no such authority or certificate, or a file cannot be written. The list is
    /// unchanged then.
    pub fn revoke(&self, name: &str) -> Result<usize, CaError> {
        if !is_name(name) || name == AUTHORITY {
            return Err(CaError::Name(name.into()));
        }
        let issuer = self.issuer()?;
        let mut revoked = Revoked::read(&self.list())?;
        revoked.add(&self.files_of(name).certificate)?;
        let count = revoked.len();
        replace(&self.list(), &revoked.sign(&issuer)?)?;
        Ok(count)
    }

    /// Paths at which an agent's certificate and key are, once they are issued.
    #[must_use]
    pub fn files_of(&self, name: &str) -> Files {
        Files::of(&self.directory, name)
    }

    /// Makes a key and a certificate for an agent.
    ///
    /// # Errors
    /// Returns a [`CaError`]: the name or the validity is not allowed, the files exist, or they cannot be made.
    pub fn issue(&self, request: &Request) -> Result<Files, CaError> {
        if !(1..=AUTHORITY_DAYS).contains(&request.days) {
            return Err(CaError::Days(request.days));
        }
        self.sign(request, agent_params(request)?)
    }

    /// Makes a key and a certificate with this validity, for tests of clocks and dates.
    ///
    /// # Errors
    /// Returns a [`CaError`]: the name is not allowed, the files exist, or they cannot be made.
    pub fn issue_between(&self, request: &Request, from: SystemTime, until: SystemTime) -> Result<Files, CaError> {
        let mut params = agent_params(request)?;
        (params.not_before, params.not_after) = (from.into(), until.into());
        self.sign(request, params)
    }

    fn sign(&self, request: &Request, params: CertificateParams) -> Result<Files, CaError> {
        let issuer = self.issuer()?;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?;
        let files = Files::of(&self.directory, &request.name);
        files.write(&certificate.pem(), &key)?;
        Ok(files)
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, CaError> {
        let own = Files::of(&self.directory, AUTHORITY);
        let broken = |path: &Path| {
            let path = path.to_owned();
            move |error| CaError::Broken { path, error }
        };
        let key = KeyPair::from_pem(&read(&own.key)?).map_err(broken(&own.key))?;
        Issuer::from_ca_cert_pem(&read(&own.certificate)?, key).map_err(broken(&own.certificate))
    }
}

fn agent_params(request: &Request) -> Result<CertificateParams, CaError> {
    let bad_name = || CaError::Name(request.name.clone());
    if !is_name(&request.name) || request.name == AUTHORITY {
        return Err(bad_name());
    }
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&request.name);
    let name = request.name.as_str().try_into().map_err(|_| bad_name())?;
    params.subject_alt_names = vec![SanType::DnsName(name)];
    params.subject_alt_names.extend(request.addresses.iter().map(|address| SanType::IpAddress(*address)));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    good_for(&mut params, request.days);
    Ok(params)
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn good_for(params: &mut CertificateParams, days: u32) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCKS_DIFFER;
    params.not_after = now + Duration::days(days.into());
}

fn read(path: &Path) -> Result<String, CaError> {
    std::fs::read_to_string(path).map_err(|error| CaError::Missing { path: path.into(), error })
}

/// Replaces a file in one step (rename(2)), because others may be reading it.
fn replace(path: &Path, text: &str) -> Result<(), CaError> {
    let next = path.with_extension("new");
    let _ = std::fs::remove_file(&next); // left by a command that was interrupted
    write_new(&next, 0o644, text)?;
    std::fs::rename(&next, path).map_err(|error| CaError::Write { path: path.into(), error })
}

/// Writes a new file. If the text cannot be written, no part of the file is left.
fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), CaError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => CaError::Exists(path.into()),
        _ => CaError::Write { path: path.into(), error },
    };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.inspect_err(|_| drop(std::fs::remove_file(path))).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn request(name: &str) -> Request {
        Request { name: name.into(), addresses: Vec::new(), days: 30 }
    }

    #[test]
    fn keys_are_for_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trial");
        let files = Authority::create(&path).unwrap().issue(&request("fe1")).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&files.key), mode(&path.join("ca.key"))), (0o600, 0o600));
        assert_eq!(mode(&path), 0o700);
    }

    #[test]
    fn nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        let before = std::fs::read(authority.certificate()).unwrap();
        assert!(matches!(Authority::create(dir.path()), Err(CaError::Exists(_))));
        assert_eq!(std::fs::read(authority.certificate()).unwrap(), before);
        let files = authority.issue(&request("fe1")).unwrap();
        let before = std::fs::read(&files.key).unwrap();
        assert!(matches!(authority.issue(&request("fe1")), Err(CaError::Exists(_))));
        assert_eq!(std::fs::read(&files.key).unwrap(), before);
    }

    /// Limits the length of files in place of a full disk: `ulimit -f` counts in blocks of 512 bytes. With 0, the key
    /// cannot be written. With 1 the key can be written, but the longer certificate cannot.
    #[test]
    fn a_full_disk_leaves_nothing_in_the_way_of_the_next_attempt() {
        const CHILDS: &str = "SHUNT_TEST_DIRECTORY";
        const OWN: &str = "tests::a_full_disk_leaves_nothing_in_the_way_of_the_next_attempt";
        if let Some(directory) = std::env::var_os(CHILDS) {
            assert!(matches!(Authority::create(Path::new(&directory)), Err(CaError::Write { .. })));
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        for blocks in [0, 1] {
            let mut child = std::process::Command::new("dash");
            let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
            child.args(["-c", &limited, "dash"]).arg(std::env::current_exe().unwrap());
            let output = child.args(["--exact", OWN]).env(CHILDS, dir.path()).output().unwrap();
            assert!(
                output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"),
                "{output:?}"
            );
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{blocks}");
        }
        std::fs::create_dir(dir.path().join("crl.pem")).unwrap();
        assert!(matches!(Authority::create(dir.path()), Err(CaError::Exists(_))));
        std::fs::remove_dir(dir.path().join("crl.pem")).unwrap();
        Authority::create(dir.path()).unwrap();
    }

    #[test]
    fn a_revoked_certificate_stays_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        let serials = || {
            let text = std::fs::read(authority.list()).unwrap();
            let (_, pem) = x509_parser::pem::parse_x509_pem(&text).unwrap();
            let (_, list) = x509_parser::parse_x509_crl(&pem.contents).unwrap();
            let serials: Vec<Vec<u8>> = list.iter_revoked_certificates().map(|one| one.raw_serial().to_vec()).collect();
            (list.crl_number().unwrap().to_string(), serials)
        };
        assert_eq!(serials(), ("1".into(), vec![]));
        for name in ["fe1", "be1", "be2"] {
            authority.issue(&request(name)).unwrap();
        }
        assert_eq!(authority.revoke("be1").unwrap(), 1);
        let (_, first) = serials();
        assert_eq!(authority.revoke("fe1").unwrap(), 2);
        assert_eq!(authority.revoke("be1").unwrap(), 2, "once is enough");
        let (number, all) = serials();
        assert_eq!((number.as_str(), all.len(), &all[0]), ("4", 2, &first[0]));
        let before = std::fs::read(authority.list()).unwrap();
        assert!(authority.revoke("be9").unwrap_err().to_string().contains("be9.pem"));
        assert!(matches!(authority.revoke("ca"), Err(CaError::Name(_))));
        assert_eq!(std::fs::read(authority.list()).unwrap(), before);
    }

    #[test]
    fn names_that_no_agent_can_have_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        for name in ["", "ca", "../fe1", "FE1", "fe 1", "*", &"x".repeat(64)] {
            assert!(matches!(authority.issue(&request(name)), Err(CaError::Name(_))), "{name:?}");
        }
    }

    #[test]
    fn without_an_authority_it_says_how_to_make_one() {
        let dir = tempfile::tempdir().unwrap();
        let error = Authority::open(dir.path()).issue(&request("fe1")).unwrap_err();
        assert!(error.to_string().contains("shunt ca init"), "{error}");
    }
}
