//! Checks of other agents' certificates: the authority must have signed them, and not revoked them (RFC 5280, 5).

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateRevocationListDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{Connection, RootCertStore};
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

use super::{CredentialsError, certificates, no_certificate, not_there, read, server_name, time_of};
use shunt_config::TlsConfig;

/// The authority and its list of revoked certificates, as they were in the files when the files were read.
pub(super) struct Trust {
    /// Checks the certificates of agents that this agent has dialled.
    pub(super) servers: Arc<WebPkiServerVerifier>,
    /// Checks the certificates of agents whose connections this agent has accepted.
    pub(super) clients: Arc<dyn ClientCertVerifier>,
    /// Earliest time by which an authority has promised a newer list.
    pub(super) next_list: Option<SystemTime>,
}

impl Trust {
    pub(super) fn read(config: &TlsConfig, provider: &Arc<CryptoProvider>) -> Result<Self, CredentialsError> {
        let roots = Arc::new(authority(&config.ca)?);
        let lists = config.crl.as_deref().map(lists).transpose()?.unwrap_or_default();
        let failed = |error| match (error, &config.crl) {
            (VerifierBuilderError::InvalidCrl(_), Some(path)) => no_list(path),
            (error, _) => CredentialsError::Authority { path: config.ca.clone(), error },
        };
        let next_list = lists.iter().filter_map(next_update).min();
        let servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(lists.clone())
            .only_check_end_entity_revocation()
            .build()
            .map_err(&failed)?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(lists)
            .only_check_end_entity_revocation()
            .build()
            .map_err(&failed)?;
        Ok(Self { servers, clients, next_list })
    }

    /// Checks whether the other end's certificate, which was good when the connection began, is still good. `name` is
    /// the name of the other agent.
    pub(super) fn accepts(&self, connection: &Connection, name: &str) -> Result<(), rustls::Error> {
        let Some([first, between @ ..]) = connection.peer_certificates() else {
            return Err(rustls::Error::NoCertificatesPresented);
        };
        let now = UnixTime::now();
        match connection {
            Connection::Client(_) => {
                let name = server_name(name).ok_or(rustls::Error::UnsupportedNameType)?;
                self.servers.verify_server_cert(first, between, &name, &[], now).map(|_| ())
            }
            Connection::Server(_) => self.clients.verify_client_cert(first, between, now).map(|_| ()),
        }
    }
}

fn authority(path: &Path) -> Result<RootCertStore, CredentialsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate)?;
    }
    if roots.is_empty() { Err(no_certificate(path)) } else { Ok(roots) }
}

fn no_list(path: &Path) -> CredentialsError {
    not_there(path, "list of revoked certificates")
}

fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let all: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&read(path)?).collect();
    all.ok().filter(|all| !all.is_empty()).ok_or_else(|| no_list(path))
}

fn next_update(list: &CertificateRevocationListDer<'_>) -> Option<SystemTime> {
    let (_, parsed) = CertificateRevocationList::from_der(list).ok()?;
    parsed.next_update().map(time_of)
}
