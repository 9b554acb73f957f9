//! A service whose frontend speaks TLS beside plain HTTP, and comparisons of what its clients get. A *shortcut* is a
//! body that the backend sends straight to the client. An *offer* is a body that the backend holds ready for that.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Host, Lab, LabBuilder, Options, Settings, Stats, file_sha256, tls_authority};

use crate::service::{Running, counted_by_kernel, same_file, start_on};

/// Names and lengths of files: one with the length of the shortest offer (1 KiB), three around the length of a TLS
/// record (16 KiB), and three longer ones.
pub const FILES: &[(&str, u64)] = &[
    ("1k", 1 << 10),
    ("16k-1", (16 << 10) - 1),
    ("16k", 16 << 10),
    ("16k+1", (16 << 10) + 1),
    ("64k", 64 << 10),
    ("1m", 1 << 20),
    ("64m", 64 << 20),
];

pub fn on_tls(intermediates: u8, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    on_tls_in(Lab::builder().intermediates(intermediates), test)
}

pub fn on_tls_in(builder: LabBuilder, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    start_on(builder, FILES, options(), test)
}

pub fn on_tls_with(options: Options, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    start_on(Lab::builder().intermediates(1), FILES, options, test)
}

/// Options for frontends that speak TLS, with shortcuts from 1 KiB on.
pub fn options() -> Options {
    let settings = Settings { tls: Some(""), ..Settings::default() };
    Options { offer_min: Some(1 << 10), settings, ..Options::shunt() }
}

/// Returns the path of the authority's certificate that clients are to trust.
pub fn authority(service: &Running<'_>) -> PathBuf {
    tls_authority(service.lab.frontend())
}

/// Returns `count` names of files with their URLs: from the smallest to the largest, back again, and so on.
pub fn urls(service: &Running<'_>, count: usize) -> Vec<(String, String)> {
    let address = service.lab.frontend().address();
    let names = FILES.iter().chain(FILES.iter().rev()).cycle().map(|(name, _)| *name);
    names.take(count).map(|name| (name.to_owned(), format!("https://{address}/{name}"))).collect()
}

/// Runs a client that writes one file for each URL into a directory, and compares these files with the originals.
/// Returns the frontend's counters before and after the run, and the number of connections that the client made.
pub fn compare(
    service: &Running<'_>,
    urls: &[(String, String)],
    client: impl FnOnce(&Host, &str) -> Result<()>,
) -> Result<Counted> {
    let directory = tempfile::tempdir()?;
    let before = Before::of(service)?;
    client(service.lab.client(), directory.path().to_str().context("a temporary path in UTF-8")?)?;
    for (index, (name, _)) in urls.iter().enumerate() {
        let got = file_sha256(directory.path().join(index.to_string()))?;
        same_file(&service.files, name, &got).with_context(|| format!("number {index}"))?;
    }
    before.counted(service)
}

/// Counters before a client's run.
pub struct Before {
    stats: Stats,
    connections: u64,
}

impl Before {
    pub fn of(service: &Running<'_>) -> Result<Self> {
        Ok(Self { stats: service.frontend_stats()?, connections: made(service.lab.client())? })
    }

    pub fn counted(self, service: &Running<'_>) -> Result<Counted> {
        let connections = made(service.lab.client())? - self.connections;
        Ok(Counted { before: self.stats, after: service.frontend_stats()?, connections })
    }
}

/// Returns the number of TCP connections that a host has made. A client makes them only to the frontend.
fn made(host: &Host) -> Result<u64> {
    counted_by_kernel(host, "snmp", "Tcp", "ActiveOpens")
}

/// Counters of the frontend before and after a client's run, and the number of connections that the client made.
pub struct Counted {
    pub before: Stats,
    pub after: Stats,
    pub connections: u64,
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

    pub fn ensure_one_connection(&self) -> Result<()> {
        ensure!(self.connections == 1, "{} connections", self.connections);
        Ok(())
    }
}
