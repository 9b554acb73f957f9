//! List of an authority's revoked certificates (RFC 5280, 5).

use std::path::Path;

use rcgen::{CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber};
use time::{Duration, OffsetDateTime};
use x509_parser::pem::parse_x509_pem;

use crate::{AUTHORITY_DAYS, CLOCKS_DIFFER, CaError, read};

/// Contents of the list's file.
pub(crate) struct Revoked {
    number: u64,
    certificates: Vec<RevokedCertParams>,
}

impl Revoked {
    /// Makes an empty list, for a new authority. Its CRL number is 0, and becomes 1 when [`Self::sign`] signs it.
    pub(crate) fn none() -> Self {
        Self { number: 0, certificates: Vec::new() }
    }

    pub(crate) fn read(path: &Path) -> Result<Self, CaError> {
        let text = read(path)?;
        let broken = || CaError::NotAList(path.into());
        let (_, pem) = parse_x509_pem(text.as_bytes()).map_err(|_| broken())?;
        let (_, list) = x509_parser::parse_x509_crl(&pem.contents).map_err(|_| broken())?;
        let number = list.crl_number().and_then(|number| u64::try_from(number).ok()).ok_or_else(broken)?;
        let certificates = list.iter_revoked_certificates().map(|one| RevokedCertParams {
            serial_number: SerialNumber::from_slice(one.raw_serial()),
            revocation_time: one.revocation_date.to_datetime(),
            reason_code: None,
            invalidity_date: None,
        });
        Ok(Self { number, certificates: certificates.collect() })
    }

    /// Adds a certificate's serial number, unless the list has it already.
    pub(crate) fn add(&mut self, certificate: &Path) -> Result<(), CaError> {
        let text = std::fs::read(certificate)
            .map_err(|error| CaError::NotIssued { path: certificate.into(), error: error.to_string() })?;
        let broken = |error: String| CaError::NotIssued { path: certificate.into(), error };
        let (_, pem) = parse_x509_pem(&text).map_err(|error| broken(error.to_string()))?;
        let serial = pem.parse_x509().map_err(|error| broken(error.to_string()))?.raw_serial().to_vec();
        let serial_number = SerialNumber::from(serial);
        if self.certificates.iter().any(|one| one.serial_number == serial_number) {
            return Ok(());
        }
        self.certificates.push(RevokedCertParams {
            serial_number,
            revocation_time: OffsetDateTime::now_utc(),
            reason_code: None,
            invalidity_date: None,
        });
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.certificates.len()
    }

    /// Signs the list, with the next CRL number. Returns PEM.
    pub(crate) fn sign(self, issuer: &Issuer<'static, KeyPair>) -> Result<String, CaError> {
        let now = OffsetDateTime::now_utc();
        let list = CertificateRevocationListParams {
            this_update: now - CLOCKS_DIFFER,
            next_update: now + Duration::days(AUTHORITY_DAYS.into()),
            crl_number: SerialNumber::from(self.number + 1),
            issuing_distribution_point: None,
            revoked_certs: self.certificates,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(list.signed_by(issuer)?.pem()?)
    }
}
