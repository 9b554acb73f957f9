//! A service with Shunt in a *lab* (hosts as network namespaces), and checks of it. Each test starts its own. A body
//! takes the *shortcut* if the backend sends it straight to the client. A body is *relayed* if it comes through all
//! tiers, and *fetched* if it comes through both agents to the frontend's server. A *sender* is a backend's socket for
//! a client; a *parked* one waits for the next body.
#![allow(dead_code, unused_imports, reason = "each test uses a part of it")]

pub mod held;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
pub use shunt_lab::impostor;
use shunt_lab::{
    Cores, Fetched, Host, Lab, LabBuilder, Options, Placement, Service, ShuntPart, Stats, Wire, fetch, file_sha256,
};
pub use shunt_testbed::needs_root;
use shunt_testbed::{wait_at_most, wait_for, wait_or_fail};

/// Asserts that a body with this hash is the file `name`.
pub fn same_file(files: &Path, name: &str, sha256: &str) -> Result<()> {
    ensure!(sha256 == file_sha256(files.join(name))?, "{name}: other bytes");
    Ok(())
}

/// Names and lengths of files. The least length for a shortcut is 32 KiB: two files are shorter, one has just this
/// length, and three are longer.
pub const FILES: &[(&str, u64)] = &[
    ("1k", 1 << 10),
    ("32k-1", (32 << 10) - 1),
    ("32k", 32 << 10),
    ("64k", 64 << 10),
    ("1m", 1 << 20),
    ("7m", 7 << 20),
];

/// Value of [`shunt_lab::Settings::http`] with which a body that is alone on its connection takes the shortcut, too.
pub const ALONE: &[&str] = &["shunt_alone_length 0"];

/// A lab, the directory of its files, and its service.
pub struct Running<'lab> {
    pub lab: &'lab Lab,
    pub files: PathBuf,
    pub service: Service<'lab>,
}

/// Starts a service with this number of intermediates, on links without segmentation offload (`Wire::Mtu`). Runs the
/// test, and then checks that all parts of the service still run.
pub fn start<T>(intermediates: u8, test: impl FnOnce(&mut Running<'_>) -> Result<T>) -> Result<T> {
    start_on(Lab::builder().intermediates(intermediates), FILES, Options::shunt(), test)
}

/// Like [`start`], with agents that stay connected on a busy machine ([`Options::steady`]).
pub fn start_steady<T>(intermediates: u8, test: impl FnOnce(&mut Running<'_>) -> Result<T>) -> Result<T> {
    start_on(Lab::builder().intermediates(intermediates), FILES, Options::steady(), test)
}

/// Like [`start`], with another lab, other files and other options.
pub fn start_on<T>(
    builder: LabBuilder,
    files: &[(&str, u64)],
    options: Options,
    test: impl FnOnce(&mut Running<'_>) -> Result<T>,
) -> Result<T> {
    start_prepared(builder, files, options, |_| Ok(()), test)
}

/// Like [`start_on`]. Calls `prepare`, which may change the hosts, before anything is started.
pub fn start_prepared<T>(
    builder: LabBuilder,
    files: &[(&str, u64)],
    options: Options,
    prepare: impl FnOnce(&Lab) -> Result<()>,
    test: impl FnOnce(&mut Running<'_>) -> Result<T>,
) -> Result<T> {
    let lab = builder.wire(Wire::Mtu).placement(Placement::WholeService).cores(Cores::ONE).build()?;
    prepare(&lab)?;
    let files = lab.files(files)?;
    let service = Service::start(&lab, &files, options)?;
    let mut running = Running { lab: &lab, files, service };
    let outcome = test(&mut running)?;
    running.service.check_running()?;
    Ok(outcome)
}

/// Returns a counter of a host's TCP, from `/proc/net/snmp` (group `Tcp`) or `/proc/net/netstat` (`TcpExt`).
pub fn counted_by_kernel(host: &Host, file: &str, group: &str, name: &str) -> Result<u64> {
    let text = host.run(|| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")))??;
    let lines = text.lines().filter_map(|line| line.strip_prefix(group)?.strip_prefix(": "));
    let mut lines = lines.map(|line| line.split(' '));
    let (names, values) = lines.next().zip(lines.next()).with_context(|| format!("no {group}"))?;
    let (_, value) = names.zip(values).find(|(known, _)| *known == name).with_context(|| format!("no {name}"))?;
    Ok(value.parse()?)
}

/// Makes a TCP socket. With `port`, binds it to this port, which other connections may use, too. To be called on the
/// socket's host ([`Host::run`]).
pub fn socket_at(port: Option<u16>) -> std::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let Some(port) = port {
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    }
    Ok(socket)
}

/// Connects to a host's agent by its Unix socket, as a server does.
pub fn connect_to_agent(host: &Host) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(ShuntPart::agent_socket(host))?)?;
    Ok(socket)
}

impl Running<'_> {
    pub fn frontend_stats(&self) -> Result<Stats> {
        self.service.stats(self.lab.frontend())
    }

    /// Returns a counter of the frontend's agent and servers.
    pub fn counted(&self, name: &str) -> Result<u64> {
        Ok(self.frontend_stats()?.count(name))
    }

    /// Asserts that each status is 200, and that each body is the file that its path names.
    pub fn whole(&self, fetched: &[Fetched]) -> Result<()> {
        for one in fetched {
            ensure!(one.status == 200, "{}: status {}", one.path, one.status);
            same_file(&self.files, &one.path[1..], &one.sha256)?;
        }
        Ok(())
    }

    /// Fetches two bodies. Asserts that they are whole and that both take the shortcut.
    pub fn still_good(&self) -> Result<()> {
        let shortcuts = self.shortcuts_of_two()?;
        ensure!(shortcuts == 2, "{shortcuts} shortcuts instead of 2: {}", self.frontend_stats()?.under("servers"));
        Ok(())
    }

    /// Fetches two bodies again and again, until both take the shortcut. Bodies that are relayed until then must be
    /// whole, too.
    pub fn good_again(&self) -> Result<()> {
        wait_or_fail("both bodies take the shortcut", || Ok(self.shortcuts_of_two()? == 2))
    }

    /// Waits until the counter `name`, summed over all agents and servers, is at least `least`.
    pub fn until_counted(&self, name: &str, least: u64) -> Result<()> {
        wait_for(&format!("{least} {name} are counted"), || {
            let counted = self.service.all_stats()?.count(name);
            ensure!(counted >= least, "{counted} of {least} {name}");
            Ok(())
        })
    }

    /// Waits until the backend's agent has senders (`is_sending`), or until it has none, not even parked ones.
    pub fn until_sending(&self, is_sending: bool) -> Result<()> {
        wait_for("the backend's senders have begun or are gone", || {
            let stats = self.service.stats(self.lab.backend())?;
            ensure!((stats.count("agent.senders.now") > 0) == is_sending, "{}", stats.under("agent.senders"));
            Ok(())
        })
    }

    fn shortcuts_of_two(&self) -> Result<u64> {
        let shortcuts = || self.counted("servers.shortcuts");
        let before = shortcuts()?;
        self.whole(&fetch(self.lab.client(), self.service.chain().server(), &["/64k", "/1m"])?)?;
        // The client may have the last byte of a body before the frontend knows that, and counts the body.
        let _ = wait_at_most(Duration::from_secs(3), "both are counted", || Ok(shortcuts()? >= before + 2));
        Ok(shortcuts()?.saturating_sub(before))
    }

    /// Asserts that no body was fetched, and that none was relayed because an agent or a peer was missing or busy.
    pub fn no_fallback(&self) -> Result<()> {
        self.no_fallback_but(0)
    }

    /// Like `no_fallback`, but exactly `fetched` bodies must have been fetched.
    pub fn no_fallback_but(&self, fetched: u64) -> Result<()> {
        let stats = self.service.all_stats()?;
        let none = ["relayed_no_agent", "relayed_no_peer", "relayed_agent_busy", "fetch_failed"].map(|name| (name, 0));
        for (name, allowed) in [("fetched", fetched)].into_iter().chain(none) {
            let count = stats.count(&format!("servers.{name}"));
            ensure!(count == allowed, "{name}: {count}: {}", stats.under("servers"));
        }
        Ok(())
    }
}
