//! The service that faults are injected into: two backends behind one frontend, and paths to each of them. Its timeouts
//! are so short that a cell of the table (one fault at one step of a response) ends in seconds. A *shortcut* is a
//! response whose body bypasses tiers. A *sender* is the kernel socket from which a backend sends such a body. An
//! *agent* is Shunt's daemon on a machine. Under `shunt run`, a *store* on each machine has the bodies that its
//! programs have written, and *references* to them go through the tiers. A body arrives as *absent* memory, which gets
//! its bytes when somebody touches it.
//!
//! ```text
//!  client --- frontend --- intermediate1 --- backend1      /t/...      the path that meets the fault
//!               | \------------------------- backend2      /other/...  a bystander's shortcut
//!               \--------------------------- backend2      /plain/...  a bystander that is relayed
//!  client ---------------------------------- backend2      straight    a bystander that bypasses the frontend
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

/// nginx's `send_timeout`, `proxy_read_timeout` and `proxy_send_timeout`, and the `progress` timeout of the backends'
/// agents.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// Files of the service: name, and size in bytes.
pub(super) const FILES: &[(&str, u64)] =
    &[(QUEUED_FILE.0, QUEUED_FILE.1), (LONG_FILE.0, LONG_FILE.1), ("64k", 64 << 10)];

/// Directory, among the service's files, at which the disk that may fail is mounted.
pub(crate) const DISK: &str = "disk";
/// File that fits into a sender's send buffer: an agent has queued all of it before the client reads.
pub(crate) const QUEUED_FILE: (&str, u64) = ("1m", 1 << 20);
/// File that does not fit into a sender's send buffer.
pub(crate) const LONG_FILE: (&str, u64) = ("24m", 24 << 20);

/// Settings with short timeouts, and with locations that lead to either backend.
pub(crate) fn settings() -> Settings {
    Settings {
        agent_frontend: "flow_quiet = \"1s\"\n",
        agent_backend: "park = \"2s\"\nprogress = \"3s\"\noffer_lifetime = \"4s\"\nsend_buffer_bytes = 4194304\n",
        http: &["send_timeout 3s", "proxy_read_timeout 3s", "proxy_send_timeout 3s", "proxy_connect_timeout 2s"],
        locations: Some(locations),
        ..Settings::default()
    }
}

/// Files of the service: name, and size in bytes.
pub(crate) fn files() -> Vec<(String, u64)> {
    FILES.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
}

const SHORTCUTS: &str = "servers.shortcuts";
const RECEIVED_ABSENT: &str = "store.by_program.nginx.received_absent";

/// Time after a repair in which responses may still be cut short. A process that has lost its connection to a store
/// tries again one second after its last attempt. Until then, bodies that arrive as references to that store are cut
/// short.
const STORE_SETTLES: Duration = Duration::from_secs(3);
/// Longest wait until the service works, at its start and after a repair.
const RECOVERY_LIMIT: Duration = Duration::from_secs(20);

fn locations(lab: &Lab, host: &Host) -> String {
    ways(lab, host, |second| way("/plain/", second, "            shunt off;\n"))
}

/// nginx locations of a host: the intermediate's lead to the first backend, the frontend's to the second one. `more`
/// returns further locations for the frontend, given the address of the second backend.
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

/// Path on which a bystander downloads while a fault lasts. Which path it is depends on the part of the service that
/// has the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// A shortcut through the same frontend, from the other backend.
    Other,
    /// A response without a shortcut, through the same frontend, from the other backend: for faults of the frontend's
    /// agent.
    Plain,
    /// Straight from the other backend: for faults of the frontend.
    Straight,
}

impl Way {
    /// Description of the path, as docs/faults.md has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "shortcut of another backend",
            Self::Plain => "relayed by the frontend",
            Self::Straight => "not through the frontend",
        }
    }
}

/// A running service that faults are injected into.
pub struct Bed<'lab> {
    pub(super) lab: &'lab Lab,
    pub(crate) service: Service<'lab>,
    /// Files of the service: name, and size in bytes.
    files: Vec<(String, u64)>,
    directory: PathBuf,
    /// Name of a counter of the frontend's agent. A response raises it only if everything works.
    counter: &'static str,
    /// Time after a repair in which a response may still be cut short.
    settles: Duration,
    /// Disk that may fail, with the same files. It is mounted at [`DISK`] when it is first needed.
    disk: Option<Disk>,
    /// Listeners that use up ports, as long as the fault `no-ports` lasts.
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

    /// Starts a service with other files and options. The options must have nginx locations by which `/t/` leads to the
    /// first backend and `/other/` to the second one, as by [`Self::locations`].
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

    /// nginx locations of a host that lead to the backends.
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

    /// The first backend, whose path meets the fault.
    pub(crate) fn backend(&self) -> &'lab Host {
        self.lab.backend()
    }

    pub(crate) fn frontend(&self) -> &'lab Host {
        self.lab.frontend()
    }

    pub(crate) fn intermediate(&self) -> &'lab Host {
        self.lab.intermediates()[0]
    }

    /// Returns the disk at [`DISK`]. Mounts the disk first if this was not done before.
    pub(crate) fn disk(&mut self) -> Result<&Disk> {
        let disk = match self.disk.take() {
            Some(disk) => disk,
            None => Disk::mount(&self.directory, &self.directory.join(DISK))?,
        };
        Ok(self.disk.insert(disk))
    }

    /// Address that clients send their requests to.
    #[must_use]
    pub fn server(&self) -> SocketAddr {
        self.service.chain().server()
    }

    /// Address that a bystander sends its request to, and the path of the file in that request.
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

    /// Fetches every file on the paths to both backends, and compares all bytes. So caches are as full before a cell of
    /// the table as after it.
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

    /// Waits until the service works as before a fault. Returns how long this took.
    ///
    /// # Errors
    /// When a part has ended or does not find the others, or a response on a new connection is not whole. Also when the
    /// service does not work in time.
    pub fn recover(&mut self) -> Result<Duration> {
        let begin = Instant::now();
        self.service.wait_for_agents()?;
        self.service.check_running().context("after the service was repaired")?;
        self.wait_until_it_works()?;
        Ok(begin.elapsed())
    }

    /// Waits until new responses on the paths to both backends are shortcuts or, under `shunt run`, arrive as absent
    /// memory. All must be whole, except in the first [`STORE_SETTLES`] under `shunt run`.
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
        ensure!(ending == Ending::Whole, "{way}{file} in the working service: {ending}{}", self.service.explain());
        Ok(count()? > before)
    }

    /// Number of shortcuts that the frontend's agent has counted.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn shortcuts(&self) -> Result<u64> {
        Ok(self.service.stats(self.frontend())?.count(SHORTCUTS))
    }
}
