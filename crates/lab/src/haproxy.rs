//! Real HAProxy. Benchmarks compare Shunt with HAProxy, as with plain nginx. HAProxy splices bodies from socket to
//! socket.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::chain::{Chain, Families};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::nginx::{NginxChain, nginx};
use crate::process::Process;

/// Starts HAProxy on `host` with the configuration `text` and waits until it listens at `address`.
///
/// # Errors
/// When HAProxy refuses the configuration, ends, or does not listen.
pub fn haproxy(host: &Host, text: &str, address: SocketAddr) -> Result<Process> {
    let file = tempfile::Builder::new().prefix("haproxy-").suffix(".cfg").tempfile_in(host.dir())?;
    let file = file.into_temp_path().keep().context("keeping HAProxy's configuration")?;
    std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    let mut command = Command::new("/usr/sbin/haproxy");
    command.arg("-db").arg("-f").arg(&file);
    host.serve(command, address)
}

/// A chain with HAProxy on the frontend and the intermediates, and nginx without Shunt on the backends.
#[derive(Debug, Clone)]
pub struct HaproxyChain {
    files: PathBuf,
    global: Vec<String>,
}

impl HaproxyChain {
    /// A chain whose backends serve the files of a directory.
    #[must_use]
    pub fn new(files: impl Into<PathBuf>) -> Self {
        Self { files: files.into(), global: Vec::new() }
    }

    /// Adds a line to every HAProxy's `global`.
    #[must_use]
    pub fn global(mut self, line: impl Into<String>) -> Self {
        self.global.push(line.into());
        self
    }

    /// The configuration of one HAProxy, which listens at `listen` and passes requests to `upstream`.
    #[must_use]
    pub fn conf(&self, listen: SocketAddr, upstream: &[SocketAddr]) -> String {
        let mut text = "global\n    maxconn 4000\n    nbthread 1\n".to_owned();
        for line in &self.global {
            let _ = writeln!(text, "    {line}");
        }
        text.push_str(DEFAULTS);
        let _ = writeln!(text, "frontend tier\n    bind {listen} backlog 4096\n    default_backend next\nbackend next");
        for (number, address) in upstream.iter().enumerate() {
            let _ = writeln!(text, "    server next{number} {address} pool-purge-delay 3600s");
        }
        text
    }

    /// Starts the chain, backends first.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn start(&self, lab: &Lab) -> Result<Chain> {
        let backends = NginxChain::new(&self.files);
        Chain::start(lab, Families::default(), |host, listen, upstream| match host.role() {
            Role::Backend => nginx(host, &backends.conf(host, listen, upstream), listen),
            _ => haproxy(host, &self.conf(listen, upstream), listen),
        })
    }
}

const DEFAULTS: &str = "\
defaults
    mode http
    http-reuse always
    option splice-response
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-keep-alive 1h
";
