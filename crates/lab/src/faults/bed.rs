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
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::Client;
use crate::answer::Ending;
use crate::disk::Disk;
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::nginx::PROXY_SETTINGS;
use crate::service::{ALONE_LENGTH, Options, Service, Settings};

/// nginx's `send_timeout` and `proxy_read_timeout`, and the agents' `progress`.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// Files of the service, by name and size.
pub(super) const FILES: &[(&str, u64)] =
    &[(QUEUED_FILE.0, QUEUED_FILE.1), (LONG_FILE.0, LONG_FILE.1), ("64k", 64 << 10)];

/// A directory of the service, of a file system of its own.
pub(crate) const DISK: &str = "disk";
/// Fits into a sender's send buffer: an agent has queued it as a whole before the client reads.
pub(crate) const QUEUED_FILE: (&str, u64) = ("1m", 1 << 20);
/// Does not.
pub(crate) const LONG_FILE: (&str, u64) = ("24m", 24 << 20);

/// Short timeouts, and what leads to either backend.
pub(crate) fn settings() -> Settings {
    Settings {
        agent_frontend: "flow_quiet = \"1s\"\n",
        agent_backend: "park = \"2s\"\nprogress = \"3s\"\noffer_lifetime = \"4s\"\nsend_buffer_bytes = 4194304\n",
        http: &["send_timeout 3s", "proxy_read_timeout 3s", "proxy_send_timeout 3s", "proxy_connect_timeout 2s"],
        locations: Some(locations),
        ..Settings::default()
    }
}

/// By name and size.
pub(crate) fn files() -> Vec<(String, u64)> {
    FILES.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
}

const SHORTCUTS: &str = "servers.shortcuts";
const RECEIVED_ABSENT: &str = "store.by_program.nginx.received_absent";

/// A process tries again a second after an attempt to reach a store that it has lost. Until then what comes by reference to that
/// store's bodies is cut short.
const STORE_SETTLES: Duration = Duration::from_secs(3);
/// Nobody waits for so long.
const RECOVERY_LIMIT: Duration = Duration::from_secs(20);

fn locations(lab: &Lab, host: &Host) -> String {
    ways(lab, host, |second| way("/plain/", second, "            shunt off;\n"))
}

/// The lines that lead to either backend. What `more` says of the second is for the frontend alone.
pub(crate) fn ways(lab: &Lab, host: &Host, more: impl FnOnce(Ipv4Addr) -> String) -> String {
    let backend = |number: usize| lab.hosts_of(Role::Backend).nth(number).map(Host::address);
    let (Some(first), Some(second)) = (backend(0), backend(1)) else { return String::new() };
    match host.role() {
        Role::Frontend => way("/other/", second, "") + &more(second),
        Role::Intermediate => way("/t/", first, ""),
        _ => String::new(),
    }
}

fn way(path: &str, to: Ipv4Addr, more: &str) -> String {
    format!("        location {path} {{\n            proxy_pass http://{to}:80/;\n{PROXY_SETTINGS}{more}        }}\n")
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

impl Way {
    /// What a bystander has that notices nothing.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "shortcut of another backend",
            Self::Plain => "relayed by the frontend",
            Self::Straight => "not through the frontend",
        }
    }
}

/// A running service for faults.
pub struct Bed<'lab> {
    pub(super) lab: &'lab Lab,
    pub(crate) service: Service<'lab>,
    /// By name and size.
    files: Vec<(String, u64)>,
    directory: PathBuf,
    /// The counter of the frontend's agent that grows only where all works.
    counter: &'static str,
    /// So long after a repair a response may still be cut short.
    settles: Duration,
    /// The same files on a disk that may fail, once that is needed: below [`DISK`].
    disk: Option<Disk>,
    /// While a fault lasts that has used them up.
    pub(super) taken_ports: Vec<TcpListener>,
}

/// Builds the hosts.
///
/// # Errors
/// As [`crate::LabBuilder::build`].
pub fn build_lab() -> Result<Lab> {
    Lab::builder().intermediates(1).backends(2).build()
}

impl<'lab> Bed<'lab> {
    /// Starts the service for the fault table.
    ///
    /// # Errors
    /// When a part does not start, or the service does not work.
    pub fn start(lab: &'lab Lab) -> Result<Self> {
        Self::start_with(lab, files(), Options { settings: settings(), ..Options::shunt() })
    }

    /// Starts one with other files and options: these keep [`Self::locations`].
    ///
    /// # Errors
    /// When a part does not start, or the service does not work.
    pub fn start_with(lab: &'lab Lab, files: Vec<(String, u64)>, options: Options) -> Result<Self> {
        let directory = lab.files(&files)?;
        let (counter, settles) = match options.on_demand {
            Some(_) => (RECEIVED_ABSENT, STORE_SETTLES),
            None => (SHORTCUTS, Duration::ZERO),
        };
        let service = Service::start(lab, &directory, options)?;
        let bed = Self { lab, service, files, directory, counter, settles, disk: None, taken_ports: Vec::new() };
        bed.wait_until_it_works()?;
        Ok(bed)
    }

    /// What leads to either backend.
    #[must_use]
    pub fn locations(lab: &Lab, host: &Host) -> String {
        locations(lab, host)
    }

    #[must_use]
    pub fn lab(&self) -> &'lab Lab {
        self.lab
    }

    #[must_use]
    pub fn service(&self) -> &Service<'lab> {
        &self.service
    }

    /// The backend that meets the fault.
    pub(crate) fn backend(&self) -> &'lab Host {
        self.lab.backend()
    }

    pub(crate) fn frontend(&self) -> &'lab Host {
        self.lab.frontend()
    }

    pub(crate) fn intermediate(&self) -> &'lab Host {
        self.lab.intermediates()[0]
    }

    /// The disk below [`DISK`].
    pub(crate) fn disk(&mut self) -> Result<&Disk> {
        let disk = match self.disk.take() {
            Some(disk) => disk,
            None => Disk::mount(&self.directory, &self.directory.join(DISK))?,
        };
        Ok(self.disk.insert(disk))
    }

    /// Where clients ask.
    #[must_use]
    pub fn server(&self) -> SocketAddr {
        self.service.chain().server()
    }

    /// Where a bystander asks, and for what.
    pub(crate) fn bystander(&self, way: Way, file: &str) -> (SocketAddr, String) {
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
    pub(crate) fn warm(&self) -> Result<()> {
        let disk = self.disk.as_ref().map(|_| format!("/t/{DISK}/"));
        for way in ["/t/", "/other/"].into_iter().chain(disk.as_deref()) {
            let mut client = Client::connect(self.lab.client(), self.server(), None)?;
            for (file, size) in &self.files {
                client.ask(&format!("{way}{file}"), file, *size);
                let ending = client.finish(RECOVERY_LIMIT)?;
                ensure!(ending == Ending::Whole, "{way}{file} after the service was repaired: {ending}");
            }
        }
        Ok(())
    }

    /// Waits until the service works as before a fault, and says how long that took.
    ///
    /// # Errors
    /// When a part has ended, or does not find the others, or a response on a new connection is not whole.
    pub fn recover(&mut self) -> Result<Duration> {
        let begin = Instant::now();
        self.service.wait_for_agents()?;
        self.service.check_running().context("after the service was repaired")?;
        self.wait_until_it_works()?;
        Ok(begin.elapsed())
    }

    /// Waits until new responses on both ways are shortcuts, or come absent. All are to be whole.
    fn wait_until_it_works(&self) -> Result<()> {
        let (began, deadline) = (Instant::now(), Instant::now() + RECOVERY_LIMIT);
        let mut missing: BTreeSet<&str> = ["/t/", "/other/"].into();
        loop {
            for way in missing.clone() {
                if self.is_counted(way, began)? {
                    missing.remove(way);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{} does not grow by {missing:?} within {RECOVERY_LIMIT:?} after the service was repaired{}",
                self.counter,
                self.service.explain()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_counted(&self, way: &str, began: Instant) -> Result<bool> {
        let long_enough = |file: &&(String, u64)| file.1 >= ALONE_LENGTH;
        let (file, size) = self.files.iter().find(long_enough).context("no file is long enough for a shortcut")?;
        let count = || Ok::<_, anyhow::Error>(self.service.stats(self.frontend())?.count(self.counter));
        let before = count()?;
        let mut client = Client::connect(self.lab.client(), self.server(), None)?;
        client.ask(&format!("{way}{file}"), file, *size);
        let ending = client.finish(RECOVERY_LIMIT)?;
        if ending != Ending::Whole && began.elapsed() < self.settles {
            return Ok(false);
        }
        ensure!(ending == Ending::Whole, "{way}{file} once the service works: {ending}{}", self.service.explain());
        Ok(count()? > before)
    }

    /// How many the frontend's agent has counted.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn shortcuts(&self) -> Result<u64> {
        Ok(self.service.stats(self.frontend())?.count(SHORTCUTS))
    }
}
