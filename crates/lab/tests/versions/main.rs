//! Tests that this version works with an older one, on one machine and between machines. scripts/build-older builds the
//! older version.

mod layouts;
mod load;
mod mixed;
mod programs;
mod rolling;
#[path = "../service/mod.rs"]
mod service;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::{Running, same_file};
use shunt_lab::{Lab, file_sha256, tls_authority};

/// Data that clients need to connect to a service, and to compare the bodies.
struct Target<'lab> {
    lab: &'lab Lab,
    server: SocketAddr,
    tls_url: String,
    files: PathBuf,
}

impl<'lab> Target<'lab> {
    fn of(service: &Running<'lab>) -> Self {
        let chain = service.service.chain();
        let (server, tls_url) = (chain.server(), chain.tls_url(""));
        Self { lab: service.lab, server, tls_url, files: service.files.clone() }
    }
}

/// Severities in nginx's error log. No change of versions may cause a line with one of them.
const NGINX_ERRORS: [&str; 4] = ["[error]", "[crit]", "[alert]", "[emerg]"];

/// Part of the line that nginx logs while no agent runs. When an agent is replaced, none runs for a moment.
const NO_AGENT: &str = "shunt: no agent at";

/// Asserts that no agent and no nginx has logged an error, not even a process that has ended.
fn no_errors(service: &Running<'_>) -> Result<()> {
    no_errors_but(service, &[])
}

/// Like [`no_errors`], but allows lines with one of these texts.
fn no_errors_but(service: &Running<'_>, allowed: &[&str]) -> Result<()> {
    for host in service.lab.tiers() {
        for entry in std::fs::read_dir(host.dir())? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "log") {
                continue;
            }
            let log = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
            let is_error = |line: &&str| {
                line.contains(" ERROR ")
                    || line.contains("panicked")
                    || NGINX_ERRORS.iter().any(|word| line.contains(word))
            };
            let errors: Vec<&str> =
                log.lines().filter(is_error).filter(|line| !allowed.iter().any(|text| line.contains(text))).collect();
            ensure!(errors.is_empty(), "{}: {}", path.display(), errors.join("\n"));
        }
    }
    Ok(())
}

/// Downloads files over one TLS connection with curl, and compares each with the original.
fn curl(target: &Target<'_>, paths: &[&str]) -> Result<()> {
    let (directory, frontend) = (tempfile::tempdir()?, target.lab.frontend());
    let mut curl = Command::new("curl");
    curl.args(["--fail", "--silent", "--show-error", "--max-time", "50", "--cacert"]).arg(tls_authority(frontend));
    for (index, path) in paths.iter().enumerate() {
        curl.arg("-o").arg(directory.path().join(index.to_string())).arg(format!("{}{path}", target.tls_url));
    }
    target.lab.client().check(curl)?;
    for (index, path) in paths.iter().enumerate() {
        let got = file_sha256(directory.path().join(index.to_string()))?;
        same_file(&target.files, &path[1..], &got).with_context(|| format!("number {index}, over TLS"))?;
    }
    Ok(())
}
