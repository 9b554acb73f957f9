//! The service that faults are injected into: two backends behind one frontend, ways to each of them, and timeouts so
//! short that a cell of the table ends in seconds.
//!
//! ```text
//!  client --- frontend --- intermediate1 --- backend1      /t/...      the way that meets the fault
//!               | \------------------------- backend2      /other/...  a bystander's shortcut
//!               \--------------------------- backend2      /plain/...  a bystander that is relayed
//!  client ---------------------------------- backend2      straight    a bystander past the whole frontend
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::{Client, Ending};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::nginx::PROXY_SETTINGS;
use crate::service::{Options, Service, Settings};

/// nginx's `send_timeout` and `proxy_read_timeout`, and the agents' `progress`.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// Files of the service, by name and size.
pub(super) const FILES: &[(&str, u64)] =
    &[(QUEUED_FILE.0, QUEUED_FILE.1), (LONG_FILE.0, LONG_FILE.1), ("64k", 64 << 10)];

/// Fits into a sender's send buffer: an agent has queued it as a whole before the client reads.
pub(super) const QUEUED_FILE: (&str, u64) = ("1m", 1 << 20);
/// Does not.
pub(super) const LONG_FILE: (&str, u64) = ("24m", 24 << 20);

fn options() -> Options {
    let settings = Settings {
        agent_frontend: "flow_quiet = \"1s\"\n",
        agent_backend: "park = \"2s\"\nprogress = \"3s\"\noffer_lifetime = \"4s\"\n",
        http: &["send_timeout 3s", "proxy_read_timeout 3s", "proxy_send_timeout 3s", "proxy_connect_timeout 2s"],
        locations: Some(locations),
    };
    Options { settings, ..Options::shunt() }
}

/// A worker asks an agent that is back after 5 seconds at the latest (docs/nginx.md, `shunt_agent`), and so does an
/// agent another one.
const RECOVERY_LIMIT: Duration = Duration::from_secs(20);

fn locations(lab: &Lab, host: &Host) -> String {
    let backend = |number: usize| lab.hosts_of(Role::Backend).nth(number).map(Host::address);
    let (Some(first), Some(second)) = (backend(0), backend(1)) else { return String::new() };
    let way = |path: &str, to: std::net::Ipv4Addr, more: &str| {
        format!(
            "        location {path} {{\n            proxy_pass http://{to}:80/;\n{PROXY_SETTINGS}{more}        }}\n"
        )
    };
    match host.role() {
        Role::Frontend => way("/other/", second, "") + &way("/plain/", second, "            shunt off;\n"),
        Role::Intermediate => way("/t/", first, ""),
        _ => String::new(),
    }
}

/// Who else downloads while a fault is there, and how far from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// A shortcut through the same frontend, from the other backend.
    Other,
    /// Relayed by the same frontend, from the other backend: the frontend's agent is not in order.
    Plain,
    /// From the other backend itself: the frontend is not in order.
    Straight,
}

/// A running service for faults.
pub struct Bed<'lab> {
    pub(super) lab: &'lab Lab,
    pub(super) service: Service<'lab>,
}

/// Builds the hosts.
///
/// # Errors
/// As [`crate::LabBuilder::build`].
pub fn build_lab() -> Result<Lab> {
    Lab::builder().intermediates(1).backends(2).build()
}

impl<'lab> Bed<'lab> {
    /// Starts the service.
    ///
    /// # Errors
    /// When a part does not start, or the service does not work.
    pub fn start(lab: &'lab Lab) -> Result<Self> {
        let files = lab.files(FILES)?;
        let service = Service::start(lab, &files, options())?;
        let bed = Self { lab, service };
        bed.wait_for_shortcuts()?;
        Ok(bed)
    }

    /// The backend that meets the fault.
    pub(super) fn backend(&self) -> &'lab Host {
        self.lab.backend()
    }

    pub(super) fn frontend(&self) -> &'lab Host {
        self.lab.frontend()
    }

    pub(super) fn intermediate(&self) -> &'lab Host {
        self.lab.intermediates()[0]
    }

    pub(super) fn server(&self) -> SocketAddr {
        self.service.chain().server()
    }

    /// Where a bystander asks, and for what.
    pub(super) fn bystander(&self, way: Way, file: &str) -> (SocketAddr, String) {
        match way {
            Way::Other => (self.server(), format!("/other/{file}")),
            Way::Plain => (self.server(), format!("/plain/{file}")),
            Way::Straight => {
                let other = self.lab.hosts_of(Role::Backend).nth(1).unwrap_or(self.backend());
                (SocketAddr::new(other.address().into(), self.server().port()), format!("/{file}"))
            }
        }
    }

    /// Fetches every file on both ways, so that caches are as full before a cell as after it; all bytes are compared.
    pub(super) fn warm(&self) -> Result<()> {
        for way in ["/t/", "/other/"] {
            let mut client = Client::connect(self.lab.client(), self.server(), None)?;
            for (file, size) in FILES {
                client.ask(&format!("{way}{file}"), file, *size);
                let ending = client.finish(RECOVERY_LIMIT)?;
                ensure!(ending == Ending::Whole, "{way}{file} after the service was repaired: {ending}");
            }
        }
        Ok(())
    }

    /// Waits until new responses on both ways are shortcuts.
    pub(super) fn wait_for_shortcuts(&self) -> Result<()> {
        let deadline = Instant::now() + RECOVERY_LIMIT;
        let mut missing: BTreeSet<&str> = ["/t/64k", "/other/64k"].into();
        loop {
            for path in missing.clone() {
                if self.is_shortcut(path).unwrap_or(false) {
                    missing.remove(path);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "no shortcut for {missing:?} within {RECOVERY_LIMIT:?} after the service was repaired{}",
                self.service.explain()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_shortcut(&self, path: &str) -> Result<bool> {
        let shortcuts = || Ok::<_, anyhow::Error>(self.service.stats(self.frontend())?.count("servers.shortcuts"));
        let before = shortcuts()?;
        let mut client = Client::connect(self.lab.client(), self.server(), None)?;
        client.ask(path, "64k", 64 << 10);
        let ending = client.finish(RECOVERY_LIMIT)?;
        ensure!(!matches!(ending, Ending::Wrong(_)), "{path}: {ending}");
        Ok(ending == Ending::Whole && shortcuts()? > before)
    }

    /// # Errors
    /// With what every part wrote last, when a server or an agent has ended.
    pub(super) fn check_running(&mut self) -> Result<()> {
        self.service.check_running().context("after the service was repaired")
    }
}
