//! The hosts of a lab and how they are joined.
//!
//! ```text
//!  client                 frontend           intermediateN        backend
//!  client0 10.77.0.10+    client0 10.77.0.1                                     clients' network 10.77.0.0/24
//!     |                      |  service0        service0          service0
//!     |                      |  10.77.1.1       10.77.1.11+       10.77.1.101+  service network 10.77.1.0/24
//!  ===+======================+=====+===============+=================+========  one bridge, in the switch
//! ```
//!
//! One bridge carries both networks and every host has both on its links, so that a backend can send to a client
//! straight, with the frontend's source address, and nothing on the way objects.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::cleanup::{LabId, Watchdog};
use crate::host::{Host, Port, Role};
use crate::placement::{Cores, Placement};
use crate::wire::Wire;

/// Network sysctls of every host. The lab's own: BBR is this machine's default and paces; both of the frontend's ports
/// are on one bridge, so each must answer ARP for its own address only.
const HOST_SYSCTLS: &[(&str, &str)] = &[
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv4/tcp_congestion_control", "cubic"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
    ("ipv4/ip_local_port_range", "20000 60999"),
];

/// Frames cross the switch and meet nothing else.
const SWITCH_SYSCTLS: &[(&str, &str)] = &[("ipv6/conf/all/disable_ipv6", "1"), ("ipv6/conf/default/disable_ipv6", "1")];
const SWITCH_NETFILTER: &[(&str, &str)] = &[
    ("bridge/bridge-nf-call-iptables", "0"),
    ("bridge/bridge-nf-call-ip6tables", "0"),
    ("bridge/bridge-nf-call-arptables", "0"),
];

/// What a lab is to have.
#[derive(Debug, Clone)]
pub struct LabBuilder {
    clients: u8,
    intermediates: u8,
    backends: u8,
    wire: Wire,
    placement: Placement,
    cores: Cores,
}

impl LabBuilder {
    /// Client hosts; one unless told otherwise.
    #[must_use]
    pub fn clients(mut self, count: u8) -> Self {
        self.clients = count;
        self
    }

    /// Hosts between frontend and backend; none unless told otherwise.
    #[must_use]
    pub fn intermediates(mut self, count: u8) -> Self {
        self.intermediates = count;
        self
    }

    /// Backend hosts; one unless told otherwise.
    #[must_use]
    pub fn backends(mut self, count: u8) -> Self {
        self.backends = count;
        self
    }

    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Where processes and receive work go; see [`Lab::place`].
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    #[must_use]
    pub fn cores(mut self, cores: Cores) -> Self {
        self.cores = cores;
        self
    }

    /// Builds the lab.
    ///
    /// # Errors
    /// Without root, and when the kernel or `ip` refuses a step.
    pub fn build(self) -> Result<Lab> {
        ensure!(rustix::process::geteuid().is_root(), "the lab needs root: it makes network namespaces");
        for (count, limit, what) in
            [(self.clients, 64, "clients"), (self.backends, 64, "backends"), (self.intermediates, 64, "intermediates")]
        {
            ensure!(count <= limit, "at most {limit} {what}");
        }
        ensure!(self.clients > 0 && self.backends > 0, "a lab needs a client and a backend");
        let id = LabId::fresh();
        let watchdog = Watchdog::start(&id, std::env::var_os("SHUNT_LAB_KEEP").is_some_and(|keep| keep == "1"))?;
        allow_cubic()?;
        let plans = self.plans();
        let switch_ports = plans.iter().flat_map(Plan::switch_ports).collect::<Vec<_>>();
        let switch = Plan { name: "switch".into(), short: "sw".into(), role: Role::Switch, ports: switch_ports };

        let prefix = id.namespace_prefix();
        let all = || plans.iter().chain([&switch]);
        let names: String = all().fold(String::new(), |mut batch, plan| {
            let _ = writeln!(batch, "netns add {prefix}{}", plan.short);
            batch
        });
        ip_batch(None, &names)?;
        let open = |plan: &Plan| {
            Host::open(&plan.name, plan.role, format!("{prefix}{}", plan.short), plan.ports.clone(), &id.dir())
        };
        let switch = open(&switch)?;
        switch.sysctls(SWITCH_SYSCTLS)?;
        let hosts = plans.iter().map(open).collect::<Result<Vec<_>>>()?;
        for host in &hosts {
            host.sysctls(HOST_SYSCTLS)?;
        }
        ip_batch(Some(&switch), &switch_links(&plans, &prefix))?;
        if Path::new("/proc/sys/net/bridge").exists() {
            switch.sysctls(SWITCH_NETFILTER)?;
        }
        for host in &hosts {
            ip_batch(Some(host), &host_links(host))?;
        }
        for host in hosts.iter().chain([&switch]) {
            for port in host.ports() {
                self.wire.configure(host, &port.device)?;
            }
        }
        let lab = Lab { hosts, switch, wire: self.wire, cores: self.cores, id, _watchdog: watchdog };
        lab.write_description()?;
        lab.place(&self.placement)?;
        Ok(lab)
    }

    fn plans(&self) -> Vec<Plan> {
        let numbered = |name: &str, count: u8, number: u8| match count {
            1 => name.to_owned(),
            _ => format!("{name}{number}"),
        };
        let port = |device: &str, network: u8, host: u8| Port {
            device: device.to_owned(),
            address: Some(Ipv4Addr::new(10, 77, network, host)),
        };
        let mut plans = Vec::new();
        for n in 1..=self.clients {
            plans.push(Plan {
                name: numbered("client", self.clients, n),
                short: numbered("cl", self.clients, n),
                role: Role::Client,
                ports: vec![port("client0", 0, 9 + n)],
            });
        }
        plans.push(Plan {
            name: "frontend".into(),
            short: "fe".into(),
            role: Role::Frontend,
            ports: vec![port("client0", 0, 1), port("service0", 1, 1)],
        });
        for n in 1..=self.intermediates {
            plans.push(Plan {
                name: format!("intermediate{n}"),
                short: format!("is{n}"),
                role: Role::Intermediate,
                ports: vec![port("service0", 1, 10 + n)],
            });
        }
        for n in 1..=self.backends {
            plans.push(Plan {
                name: numbered("backend", self.backends, n),
                short: numbered("be", self.backends, n),
                role: Role::Backend,
                ports: vec![port("service0", 1, 100 + n)],
            });
        }
        plans
    }
}

/// A host that is to be.
struct Plan {
    name: String,
    /// For names that the kernel limits.
    short: String,
    role: Role,
    ports: Vec<Port>,
}

impl Plan {
    fn switch_ports(&self) -> impl Iterator<Item = Port> {
        self.ports.iter().map(|port| Port { device: self.switch_device(port), address: None })
    }

    fn switch_device(&self, port: &Port) -> String {
        format!("{}-{}", self.short, port.device.trim_end_matches('0'))
    }
}

fn switch_links(plans: &[Plan], prefix: &str) -> String {
    // No spanning tree, no ageing surprises, no snooping: a cable with many ends.
    let mut batch = "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
                     link set bridge up\nlink set lo up\n"
        .to_owned();
    for plan in plans {
        for port in &plan.ports {
            let (device, peer, short) = (plan.switch_device(port), &port.device, &plan.short);
            let _ = writeln!(batch, "link add {device} type veth peer name {peer} netns {prefix}{short}");
            let _ = writeln!(batch, "link set {device} master bridge up");
        }
    }
    batch
}

fn host_links(host: &Host) -> String {
    let mut batch = "link set lo up\n".to_owned();
    for Port { device, address } in host.ports() {
        let Some(address) = address else { continue };
        let [_, _, network, node] = address.octets();
        let _ = writeln!(batch, "link set {device} address 02:00:0a:4d:{network:02x}:{node:02x}");
        let _ = writeln!(batch, "addr add {address}/24 dev {device}");
        let _ = writeln!(batch, "link set {device} up");
    }
    // The network that the host has no address in is on its link all the same.
    if let [Port { device, address: Some(address) }] = host.ports() {
        let other = 1 - address.octets()[2];
        let _ = writeln!(batch, "route add 10.77.{other}.0/24 dev {device} scope link");
    }
    batch
}

/// Only algorithms that the machine allows to everyone can be a namespace's default (tcp_cong.c,
/// `tcp_set_default_congestion_control`). The one trace that a lab leaves: cubic stays allowed.
fn allow_cubic() -> Result<()> {
    const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
    // A namespace other than the machine's first has no such file; then it was allowed before or stays refused.
    let Ok(allowed) = std::fs::read_to_string(ALLOWED) else { return Ok(()) };
    if allowed.split_whitespace().all(|name| name != "cubic") {
        std::fs::write(ALLOWED, format!("{} cubic", allowed.trim())).context("allowing cubic to namespaces")?;
    }
    Ok(())
}

/// Runs many `ip` commands in one process, in `host` if given.
fn ip_batch(host: Option<&Host>, batch: &str) -> Result<()> {
    let run = || {
        let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = ip.stdin.take() {
            stdin.write_all(batch.as_bytes())?;
        }
        ip.wait_with_output()
    };
    let output = match host {
        Some(host) => host.run(run)?,
        None => run(),
    };
    let output = output.context("running ip")?;
    if !output.status.success() {
        bail!("ip refused: {}\nof the commands:\n{batch}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// A set of hosts that runs until it is dropped.
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<Host>,
    switch: Host,
    wire: Wire,
    cores: Cores,
    id: LabId,
    /// Last, so that it cleans up after the hosts' descriptors are closed.
    _watchdog: Watchdog,
}

impl Lab {
    /// One client, a frontend, no intermediate, one backend, a [`Wire::Tso`].
    #[must_use]
    pub fn builder() -> LabBuilder {
        let (wire, placement, cores) = (Wire::default(), Placement::default(), Cores::default());
        LabBuilder { clients: 1, intermediates: 0, backends: 1, wire, placement, cores }
    }

    #[must_use]
    pub fn id(&self) -> &LabId {
        &self.id
    }

    #[must_use]
    pub fn wire(&self) -> Wire {
        self.wire
    }

    #[must_use]
    pub fn cores(&self) -> Cores {
        self.cores
    }

    /// A directory for this lab's files, gone with it unless `SHUNT_LAB_KEEP=1`.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.id.dir()
    }

    /// All hosts from the client to the backend, without the switch.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    #[must_use]
    pub fn switch(&self) -> &Host {
        &self.switch
    }

    /// The hosts of one role.
    pub fn hosts_of(&self, role: Role) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(move |host| host.role() == role)
    }

    /// The tiers, frontend first.
    pub fn tiers(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(|host| host.role().is_tier())
    }

    /// The first client.
    #[must_use]
    pub fn client(&self) -> &Host {
        self.first(Role::Client)
    }

    #[must_use]
    pub fn frontend(&self) -> &Host {
        self.first(Role::Frontend)
    }

    /// Frontend's neighbour first.
    #[must_use]
    pub fn intermediates(&self) -> Vec<&Host> {
        self.hosts_of(Role::Intermediate).collect()
    }

    /// The first backend.
    #[must_use]
    pub fn backend(&self) -> &Host {
        self.first(Role::Backend)
    }

    fn first(&self, role: Role) -> &Host {
        self.hosts_of(role).next().expect("every lab has a client, a frontend and a backend")
    }

    /// A host by its name, the switch included.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn host(&self, name: &str) -> Result<&Host> {
        let found = self.hosts.iter().chain([&self.switch]).find(|host| host.name() == name);
        found.with_context(|| format!("the lab has no host {name:?}"))
    }

    /// Moves every host's processes and receive work to the cores of `placement`; later processes follow.
    ///
    /// # Errors
    /// When the placement names no host of this lab, or the kernel refuses a step.
    pub fn place(&self, placement: &Placement) -> Result<()> {
        let placed = placement.cores_of(self.hosts.iter().chain([&self.switch]), self.cores)?;
        for host in self.hosts.iter().chain([&self.switch]) {
            host.place(placed.get(host.name()).copied().flatten())?;
        }
        Ok(())
    }

    /// Makes files of the given names and sizes, with contents that differ by name and repeat nowhere nearby, in a
    /// directory of the lab; returns that.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn files(&self, files: &[(&str, u64)]) -> Result<PathBuf> {
        let dir = self.dir().join("files");
        std::fs::create_dir_all(&dir)?;
        for (name, size) in files {
            let mut file = std::io::BufWriter::new(std::fs::File::create(dir.join(name))?);
            // xorshift64, seeded by the name.
            let mut state = name
                .bytes()
                .fold(0x9e37_79b9_7f4a_7c15_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
            let mut left = *size;
            while left > 0 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let piece = left.min(8);
                file.write_all(&state.to_le_bytes()[..usize::try_from(piece).unwrap_or(8)])?;
                left -= piece;
            }
            file.flush()?;
        }
        Ok(dir)
    }

    fn write_description(&self) -> Result<()> {
        let of = |host: &Host| HostDescription {
            name: host.name().to_owned(),
            role: host.role(),
            namespace: host.namespace().to_owned(),
            ports: host.ports().to_vec(),
        };
        let description = Description {
            id: self.id.to_string(),
            wire: self.wire,
            hosts: self.hosts.iter().chain([&self.switch]).map(of).collect(),
        };
        std::fs::write(self.dir().join(DESCRIPTION), serde_json::to_vec_pretty(&description)?)?;
        Ok(())
    }
}

const DESCRIPTION: &str = "lab.json";

/// What another process can know of a lab.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    pub id: String,
    pub wire: Wire,
    pub hosts: Vec<HostDescription>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct HostDescription {
    pub name: String,
    pub role: Role,
    pub namespace: String,
    pub ports: Vec<Port>,
}

impl Description {
    /// Reads that of a lab which may belong to another process.
    ///
    /// # Errors
    /// When it has none, for instance while it is being built.
    pub fn of(id: &LabId) -> Result<Self> {
        let path = id.dir().join(DESCRIPTION);
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }
}
