//! A host of the lab: one network namespace, and one control group for its servers. An *agent* is Shunt's daemon on a
//! host.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags, openat};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use shunt_sys::cgroup;
use shunt_sys::netns::{Netns, detached_sysfs};

use crate::process::Process;
use shunt_testbed::LabId;

fn make_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))
}

/// Part that a host plays in the lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Client,
    Frontend,
    Intermediate,
    Backend,
    /// The bridge or router that joins all other hosts.
    Switch,
}

impl Role {
    /// Whether a host of this role is a part of the service.
    #[must_use]
    pub fn is_tier(self) -> bool {
        matches!(self, Self::Frontend | Self::Intermediate | Self::Backend)
    }
}

/// A network device inside a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub device: String,
    /// `None` for the switch's ports.
    pub address: Option<Ipv4Addr>,
    /// `None` if the lab has no IPv6.
    pub ipv6: Option<Ipv6Addr>,
}

/// A version of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    #[default]
    V4,
    V6,
}

impl Port {
    /// Address of the port in one IP version.
    #[must_use]
    pub fn address_of(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.address.map(IpAddr::V4),
            Family::V6 => self.ipv6.map(IpAddr::V6),
        }
    }
}

/// One network namespace, and the handles that a thread needs to work in it.
#[derive(Debug)]
pub struct Host {
    name: String,
    role: Role,
    namespace: String,
    netns: Netns,
    /// Sysfs as seen from inside the namespace, for the devices' queues and counters.
    sysfs: OwnedFd,
    /// Control group of the host's servers. BPF programs that the host's agent attaches to the group run for these
    /// servers only.
    cgroup: PathBuf,
    ports: Vec<Port>,
    dir: PathBuf,
    core: Mutex<Option<usize>>,
    logs: AtomicUsize,
}

impl Host {
    pub(crate) fn open(name: &str, role: Role, namespace: String, ports: Vec<Port>, lab: &LabId) -> Result<Self> {
        let netns = Netns::named(&namespace).with_context(|| format!("opening namespace {namespace}"))?;
        let sysfs = netns.run(detached_sysfs)?.context("mounting sysfs")?;
        let cgroup = lab.cgroup(&cgroup::root().context("looking for cgroup v2")?, name);
        make_dir(&cgroup)?;
        let dir = lab.dir().join(name);
        make_dir(&dir)?;
        let (core, logs) = (Mutex::new(None), AtomicUsize::new(0));
        Ok(Self { name: name.to_owned(), role, namespace, netns, sysfs, cgroup, ports, dir, core, logs })
    }

    /// Name of the host: `client`, `frontend`, `intermediate1`, `backend`, `switch`...
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Name of the network namespace, by which iproute2 knows it.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    #[must_use]
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Directory of this host's files and logs.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The control group of this host's servers.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// The address at which other hosts reach this one. For the frontend it is the address of its client port.
    ///
    /// # Panics
    /// On the switch, which has no address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.ports.iter().find_map(|port| port.address).expect("the switch has no address")
    }

    /// The address on the network of the tiers (the service network), if the host is on it.
    #[must_use]
    pub fn service_address(&self) -> Option<Ipv4Addr> {
        self.ports.iter().find(|port| port.device == "service0").and_then(|port| port.address)
    }

    /// Like [`Self::address`], in the IP version `family`.
    ///
    /// # Errors
    /// When the host has no such address.
    pub fn address_of(&self, family: Family) -> Result<IpAddr> {
        self.first_address(family, |_| true)
    }

    /// Like [`Self::service_address`], in the IP version `family`.
    ///
    /// # Errors
    /// When the host has no such address.
    pub fn service_address_of(&self, family: Family) -> Result<IpAddr> {
        self.first_address(family, |port| port.device == "service0")
    }

    fn first_address(&self, family: Family, wanted: impl Fn(&Port) -> bool) -> Result<IpAddr> {
        let found = self.ports.iter().filter(|port| wanted(port)).find_map(|port| port.address_of(family));
        found.with_context(|| format!("{} has no such {family:?} address", self.name))
    }

    /// Core on which the host's processes run; `None`: they may run on all cores.
    #[must_use]
    pub fn core(&self) -> Option<usize> {
        *self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on a thread inside the namespace, on the host's core.
    ///
    /// # Errors
    /// When the thread cannot start, or cannot enter the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let core = self.core();
        let run = self.netns.run(|| {
            pin(None, core)?;
            Ok(work())
        });
        run.with_context(|| format!("entering {}", self.name))?
    }

    /// Starts `command` in the namespace, on the host's core, in a new process group. Its output goes to a log file in
    /// [`Self::dir`].
    ///
    /// # Errors
    /// When the command cannot be started.
    pub fn spawn(&self, mut command: Command) -> Result<Process> {
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = self.logs.fetch_add(1, Ordering::Relaxed);
        let log = self.dir.join(format!("{program}-{number}.log"));
        let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        command.stdin(Stdio::null()).stderr(output.try_clone()?).stdout(output);
        cgroup::start_in(&mut command, &self.cgroup).with_context(|| format!("opening {}", self.cgroup.display()))?;
        Process::start(format!("{program} on {}", self.name), log, |command| self.run(|| command.spawn()), command)
    }

    /// Starts a server and waits until it listens at `address`.
    ///
    /// # Errors
    /// When the server cannot be started, ends, or does not listen.
    pub fn serve(&self, command: Command, address: SocketAddr) -> Result<Process> {
        let mut process = self.spawn(command)?;
        let listening = self.wait_listening(address);
        // This check comes before the result of the wait: if the server has ended, the error of the check has the
        // server's log.
        process.check_running()?;
        listening?;
        Ok(process)
    }

    /// Kills a server of this host if it still runs, starts it again, and waits until it listens at `address`.
    ///
    /// # Errors
    /// When the server cannot be started, ends, or does not listen.
    pub fn serve_again(&self, process: &mut Process, address: SocketAddr) -> Result<()> {
        process.start_again(|command| self.run(|| command.spawn()))?;
        let listening = self.wait_listening(address);
        process.check_running()?;
        listening
    }

    /// Runs `command` to its end in the namespace and returns what it wrote.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub fn output(&self, mut command: Command) -> Result<Output> {
        self.run(|| command.output())?.with_context(|| format!("running {command:?} on {}", self.name))
    }

    /// Like [`Self::output`], and fails unless the command succeeds; returns its standard output.
    ///
    /// # Errors
    /// When the command cannot be started or fails; the error contains its standard error.
    pub fn check(&self, command: Command) -> Result<String> {
        let shown = format!("{command:?}");
        let output = self.output(command)?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{shown} on {} failed ({}): {}", self.name, output.status, error.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Writes network sysctls, such as `ipv4/tcp_congestion_control`.
    pub(crate) fn sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            for (key, value) in settings {
                let path = format!("/proc/sys/net/{key}");
                std::fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))?;
            }
            Ok(())
        })?
    }

    /// Waits until something in the namespace listens at `address`, without connecting to it.
    ///
    /// # Errors
    /// When nothing listens there within 30 seconds.
    pub fn wait_listening(&self, address: SocketAddr) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let file = if address.is_ipv4() { "tcp" } else { "tcp6" };
            let table = self.run(|| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")))??;
            if listens(&table, address) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("nothing listens at {address} on {}", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads a number from a file of the namespace's sysfs, such as `class/net/service0/statistics/rx_bytes`.
    pub(crate) fn sysfs_number(&self, path: &str) -> Result<u64> {
        let mut text = String::new();
        self.sysfs_open(path, OFlags::RDONLY)?.read_to_string(&mut text)?;
        text.trim().parse().with_context(|| format!("{path} holds {text:?}"))
    }

    fn sysfs_open(&self, path: &str, flags: OFlags) -> Result<File> {
        let file = openat(self.sysfs.as_fd(), path, flags | OFlags::CLOEXEC, Mode::empty());
        Ok(File::from(file.with_context(|| format!("opening sysfs {path} of {}", self.name))?))
    }

    /// Pins the host's processes and its reception of packets to `core`. `None`: the processes may run on all cores,
    /// and packets are received on the sender's core.
    pub(crate) fn place(&self, core: Option<usize>) -> Result<()> {
        *self.core.lock().unwrap_or_else(PoisonError::into_inner) = core;
        let mask = core.map_or("0".to_owned(), |core| format!("{:x}", 1_u64 << core));
        for port in &self.ports {
            for queue in 0.. {
                let path = format!("class/net/{}/queues/rx-{queue}/rps_cpus", port.device);
                match self.sysfs_open(&path, OFlags::WRONLY) {
                    Ok(mut file) => file.write_all(mask.as_bytes()).with_context(|| format!("writing {path}"))?,
                    Err(error) if queue == 0 => return Err(error),
                    Err(_) => break,
                }
            }
        }
        for pid in self.pids()? {
            for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let tid = task.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
                // A task may have ended meanwhile, so errors are ignored.
                let _ = pin(tid, core);
            }
        }
        Ok(())
    }

    /// The processes in the namespace, except the calling one.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn pids(&self) -> Result<Vec<i32>> {
        let link = format!("net:[{}]", self.netns.inode()?);
        let mut pids = Vec::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            let inside = std::fs::read_link(entry.path().join("ns/net")).is_ok_and(|seen| seen.as_os_str() == &*link);
            if inside && pid.unsigned_abs() != std::process::id() {
                pids.push(pid);
            }
        }
        Ok(pids)
    }
}

/// Pins a task (`None`: the calling thread) to a core (`None`: to all).
pub(crate) fn pin(task: Option<Pid>, core: Option<usize>) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    let all = 0..std::thread::available_parallelism().map_or(1, usize::from).max(CORES_TRIED);
    core.map_or(all, |core| core..core + 1).for_each(|core| set.set(core));
    Ok(sched_setaffinity(task, &set)?)
}

/// Least number of cores that "all cores" covers. The kernel ignores cores that do not exist.
const CORES_TRIED: usize = 64;

/// Returns whether `/proc/net/tcp`, or `tcp6`, shows a listener that accepts connections to `address`.
fn listens(table: &str, address: SocketAddr) -> bool {
    // The table has addresses as words of 32 bits, each in the machine's byte order.
    let hex = |octets: &[u8]| -> String {
        let words = octets.as_chunks().0.iter().map(|word| format!("{:08X}", u32::from_ne_bytes(*word)));
        format!("{}:{:04X}", words.collect::<String>(), address.port())
    };
    let wanted = match address.ip() {
        IpAddr::V4(ip) => [ip, Ipv4Addr::UNSPECIFIED].map(|ip| hex(&ip.octets())),
        IpAddr::V6(ip) => [ip, Ipv6Addr::UNSPECIFIED].map(|ip| hex(&ip.octets())),
    };
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().unwrap_or_default();
        wanted.iter().any(|wanted| wanted == local) && fields.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_is_found_by_address_and_state() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
            0: 0B014D0A:0050 00000000:0000 0A 00000000:00000000\n\
            1: 0C014D0A:0050 0100007F:0000 01 00000000:00000000\n\
            2: 00000000:1F90 00000000:0000 0A 00000000:00000000\n";
        assert!(listens(table, "10.77.1.11:80".parse().unwrap()));
        assert!(!listens(table, "10.77.1.12:80".parse().unwrap()));
        assert!(!listens(table, "10.77.1.11:81".parse().unwrap()));
        assert!(listens(table, "10.77.1.11:8080".parse().unwrap()));
        let table = "  sl  local_address rem_address   st tx_queue\n\
            0: 000077FD000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0\n";
        assert!(listens(table, "[fd77::1]:80".parse().unwrap()));
        assert!(!listens(table, "[fd77::2]:80".parse().unwrap()));
    }
}
