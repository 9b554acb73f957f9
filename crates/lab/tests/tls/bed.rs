//! A service whose frontend also speaks TLS.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use shunt_ca::{Authority, Request};
use shunt_lab::{Host, Lab, LabBuilder, Options, Role, Settings, Stats, file_sha256};

use crate::service::{Running, start_on};

/// Around the sizes of a record, of the shortest offer, and well above.
pub const FILES: &[(&str, u64)] = &[
    ("1k", 1 << 10),
    ("16k-1", (16 << 10) - 1),
    ("16k", 16 << 10),
    ("16k+1", (16 << 10) + 1),
    ("64k", 64 << 10),
    ("1m", 1 << 20),
    ("64m", 64 << 20),
];

/// A frontend that also listens on 443, with a certificate for its address.
fn tls_frontend(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Frontend {
        return String::new();
    }
    let address = host.address();
    let authority = Authority::create(&host.dir().join("tls")).expect("a directory of our own");
    let request = Request { name: "frontend".into(), addresses: vec![address.into()], days: 1 };
    let files = authority.issue(&request).expect("a certificate");
    format!(
        "        listen {address}:443 ssl;\n        ssl_certificate {};\n        ssl_certificate_key {};\n        \
         ssl_protocols TLSv1.2 TLSv1.3;\n",
        files.certificate.display(),
        files.key.display()
    )
}

pub fn on_tls(intermediates: u8, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    on_tls_in(Lab::builder().intermediates(intermediates), test)
}

pub fn on_tls_in(builder: LabBuilder, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    let settings = Settings { locations: Some(tls_frontend), ..Settings::default() };
    let options = Options { offer_min: Some(1 << 10), settings, ..Options::shunt() };
    start_on(builder, FILES, options, test)
}

/// The certificate that clients are to trust.
pub fn authority(service: &Running<'_>) -> PathBuf {
    Authority::open(&service.lab.frontend().dir().join("tls")).certificate()
}

/// The files' URLs, small and large in turn, over and over.
pub fn urls(service: &Running<'_>, count: usize) -> Vec<(String, String)> {
    let address = service.lab.frontend().address();
    let names = FILES.iter().chain(FILES.iter().rev()).cycle().map(|(name, _)| *name);
    names.take(count).map(|name| (name.to_owned(), format!("https://{address}/{name}"))).collect()
}

/// Runs a client that writes one file per URL into a directory, and compares them: what the frontend counted.
pub fn compare(
    service: &Running<'_>,
    urls: &[(String, String)],
    client: impl FnOnce(&Host, &str) -> Result<()>,
) -> Result<Counted> {
    let directory = tempfile::tempdir()?;
    let before = service.frontend_stats()?;
    client(service.lab.client(), directory.path().to_str().context("a temporary path in UTF-8")?)?;
    for (index, (name, _)) in urls.iter().enumerate() {
        let got = file_sha256(directory.path().join(index.to_string()))?;
        ensure!(got == file_sha256(service.files.join(name))?, "{name} (number {index}): other bytes");
    }
    Ok(Counted { before, after: service.frontend_stats()? })
}

/// What the frontend's servers counted in between.
pub struct Counted {
    pub before: Stats,
    pub after: Stats,
}

impl Counted {
    pub fn grown(&self, name: &str) -> u64 {
        let name = format!("servers.{name}");
        self.after.count(&name) - self.before.count(&name)
    }

    pub fn ensure(&self, name: &str, count: usize) -> Result<()> {
        let all = self.after.grown(&self.before, "");
        ensure!(self.grown(name) == count as u64, "{} {name}, not {count}: {all:?}", self.grown(name));
        Ok(())
    }
}
