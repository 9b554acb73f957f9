//! A frontend that also speaks TLS. Its certificate is from another authority than those of the agents (Shunt's
//! daemons).

use std::path::PathBuf;

use anyhow::Result;
use shunt_ca::{Authority, Request};

use crate::host::Host;

/// Port at which frontends speak TLS.
pub(crate) const PORT: u16 = 443;

/// Lines for a frontend's nginx server. They make the server listen for TLS at the frontend's address, with a
/// certificate for this address.
///
/// # Errors
/// When the certificate cannot be made, or was made before.
pub(crate) fn listener(frontend: &Host) -> Result<String> {
    let address = frontend.address();
    let authority = Authority::create(&frontend.dir().join("tls"))?;
    let files = authority.issue(&Request { name: "frontend".into(), addresses: vec![address.into()], days: 1 })?;
    let (certificate, key) = (files.certificate.display(), files.key.display());
    Ok(format!(
        "        listen {address}:{PORT} ssl backlog=4096;\n        ssl_certificate {certificate};\n        \
         ssl_certificate_key {key};\n        ssl_protocols TLSv1.2 TLSv1.3;\n"
    ))
}

/// Path of the certificate that a frontend's clients must trust.
#[must_use]
pub fn tls_authority(frontend: &Host) -> PathBuf {
    Authority::open(&frontend.dir().join("tls")).certificate()
}
