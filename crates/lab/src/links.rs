//! Joins the hosts of a lab: network namespaces, links, addresses, and the kernel's settings for them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use shunt_sys::tap::Tap;

use crate::host::{Host, Port, Role};
use crate::link::{Cable, Link, Whose};
use crate::neighbour::{known_neighbour, link_address};
use crate::router;
use crate::topology::HostPlan;
use crate::wire::Wire;
use shunt_testbed::LabId;

/// Network sysctls of every host. Hosts use cubic, because the machine's default congestion control may be BBR, which
/// paces packets. Both of the frontend's ports are on one bridge, so each must answer ARP for its own address only.
const HOST_SYSCTLS: &[(&str, &str)] = &[
    ("ipv4/tcp_congestion_control", "cubic"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
    ("ipv4/ip_local_port_range", "20000 60999"),
];

/// Network sysctls of hosts without IPv6, and of a switch that is a bridge: the kernel sends no IPv6 packet of its own
/// accord.
const WITHOUT_IPV6: &[(&str, &str)] = &[("ipv6/conf/all/disable_ipv6", "1"), ("ipv6/conf/default/disable_ipv6", "1")];

/// Network sysctls of hosts with IPv6. The lab's addresses are used at once, without a check for duplicates, and router
/// advertisements add no others.
const WITH_IPV6: &[(&str, &str)] = &[
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
];

/// Network sysctls of the switch: netfilter does not see frames that cross the bridge.
const SWITCH_NETFILTER: &[(&str, &str)] = &[
    ("bridge/bridge-nf-call-iptables", "0"),
    ("bridge/bridge-nf-call-ip6tables", "0"),
    ("bridge/bridge-nf-call-arptables", "0"),
];

/// `ip` commands that make the switch's bridge: a cable with many ends, without spanning tree, forwarding delay and
/// multicast snooping.
const BRIDGE: &str = "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
                      link set bridge up\nlink set lo up\n";

/// Number of frames that may wait in a TAP device for its link's thread. It is large, because only the link may lose
/// frames.
const TAP_FRAMES: u32 = 16384;

/// Makes an empty network namespace for each host.
pub(crate) fn make_namespaces<'a>(plans: impl IntoIterator<Item = &'a HostPlan>, lab: &LabId) -> Result<()> {
    let batch: String = plans.into_iter().map(|plan| format!("netns add {}\n", plan.namespace(lab))).collect();
    ip_batch(None, &batch)
}

/// Description of how a lab's hosts are joined.
pub(crate) struct Joins<'a> {
    /// Plans from which the hosts were made.
    pub(crate) plans: &'a [HostPlan],
    pub(crate) switch: &'a Host,
    pub(crate) wire: Wire,
    /// Links of some hosts; all other hosts have veth pairs.
    pub(crate) links: &'a [(Whose, Link)],
    pub(crate) ipv6: bool,
    /// Whether the switch is a router instead of a bridge.
    pub(crate) routed: bool,
}

impl Joins<'_> {
    /// Joins `hosts` through the switch. The threads of links run on `core`.
    pub(crate) fn join(&self, hosts: &[Host], lab: &LabId, core: usize) -> Result<Vec<Cable>> {
        allow_cubic()?;
        let ipv6 = if self.ipv6 { WITH_IPV6 } else { WITHOUT_IPV6 };
        for host in hosts {
            host.sysctls(&[HOST_SYSCTLS, ipv6].concat())?;
        }
        if self.routed {
            self.switch.sysctls(&[ipv6, router::SYSCTLS].concat())?;
            ip_batch(Some(self.switch), router::BEGIN)?;
        } else {
            self.switch.sysctls(WITHOUT_IPV6)?;
            ip_batch(Some(self.switch), BRIDGE)?;
        }
        let cables = self.cables(hosts, core)?;
        ip_batch(Some(self.switch), &self.switch_links(lab))?;
        if !self.routed && Path::new("/proc/sys/net/bridge").exists() {
            self.switch.sysctls(SWITCH_NETFILTER)?;
        }
        let neighbours = if self.links.is_empty() { &[] } else { hosts };
        for host in hosts {
            let mut batch = host_links(host, self.link_of(host.name(), host.role()));
            match self.routed {
                true => batch.push_str(&router::host(host, !neighbours.is_empty())),
                false => batch.push_str(&(host_routes(host) + &known_neighbours(host, neighbours))),
            }
            ip_batch(Some(host), &batch)?;
        }
        for host in hosts.iter().chain([self.switch]) {
            for port in host.ports() {
                self.wire.configure(host, &port.device)?;
            }
        }
        Ok(cables)
    }

    fn link_of(&self, name: &str, role: Role) -> Option<Link> {
        self.links.iter().find(|(whose, _)| whose.has(name, role)).map(|(_, link)| *link)
    }

    /// For each port of a host with a [`Link`], makes a TAP device at both ends. Starts a thread that carries frames
    /// between the two devices. Other hosts have veth pairs.
    fn cables(&self, hosts: &[Host], core: usize) -> Result<Vec<Cable>> {
        let mut cables = Vec::new();
        for (host, plan) in hosts.iter().zip(self.plans) {
            let Some(link) = self.link_of(host.name(), host.role()) else { continue };
            let seed = link.seed_or_random();
            eprintln!("the link of {}: SHUNT_SEED={seed}, {link:?}", host.name());
            for port in host.ports() {
                let tap = |at: &Host, device: &str| {
                    at.run(|| Tap::make(device))?.with_context(|| format!("making TAP device {device}"))
                };
                let ends = [tap(host, &port.device)?, tap(self.switch, &plan.switch_device(port))?];
                cables.push(Cable::start(host.name(), link, seed, cables.len() as u64, ends, core)?);
            }
        }
        Ok(cables)
    }

    /// Returns the commands that make the veth pairs, and that join every link's end in the switch to the bridge or
    /// router.
    fn switch_links(&self, lab: &LabId) -> String {
        let mut batch = String::new();
        for plan in self.plans {
            let link = self.link_of(plan.name(), plan.role());
            for port in plan.ports() {
                let (device, peer, namespace) = (plan.switch_device(port), &port.device, plan.namespace(lab));
                match link {
                    None => {
                        let _ = writeln!(batch, "link add {device} type veth peer name {peer} netns {namespace}");
                    }
                    Some(link) => batch.push_str(&tap_settings(&device, link)),
                }
                if self.routed {
                    batch.push_str(&router::device(&device, port, !self.links.is_empty()));
                } else {
                    let _ = writeln!(batch, "link set {device} master bridge up");
                }
            }
        }
        batch
    }
}

fn tap_settings(device: &str, link: Link) -> String {
    format!("link set {device} mtu {} txqueuelen {TAP_FRAMES}\n", link.mtu)
}

/// Returns the commands that set up a host's ports, with their addresses.
fn host_links(host: &Host, link: Option<Link>) -> String {
    host.ports().iter().fold("link set lo up\n".to_owned(), |batch, port| batch + &port_links(port, link))
}

fn port_links(Port { device, address, ipv6 }: &Port, link: Option<Link>) -> String {
    let mut batch: String = link.map(|link| tap_settings(device, link)).into_iter().collect();
    let Some(address) = address else { return batch };
    let _ = writeln!(batch, "link set {device} address {}", link_address(*address));
    let _ = writeln!(batch, "addr add {address}/24 dev {device}");
    batch.extend(ipv6.map(|address| format!("addr add {address}/64 dev {device} nodad\n")));
    let _ = writeln!(batch, "link set {device} up");
    batch
}

/// Deletes a port of a host. The lab's switch must be a bridge.
pub(crate) fn delete(host: &Host, device: &str) -> Result<()> {
    ip_batch(Some(host), &format!("link del {device}\n"))
}

/// Makes a deleted port again, and joins it to the switch's bridge.
pub(crate) fn make(host: &Host, device: &str, switch: &Host, switch_device: &str) -> Result<()> {
    let namespace = host.namespace();
    let pair = format!("link add {switch_device} type veth peer name {device} netns {namespace}\n");
    ip_batch(Some(switch), &(pair + &format!("link set {switch_device} master bridge up\n")))?;
    let port = host.ports().iter().find(|port| port.device == device).context("a port of this host")?;
    ip_batch(Some(host), &(port_links(port, None) + &host_routes(host)))
}

/// Returns the commands for a route to the lab's other network. A host with one port has an address in one of the lab's
/// two networks only, but both networks are on the same link.
fn host_routes(host: &Host) -> String {
    let [Port { device, address: Some(address), ipv6 }] = host.ports() else { return String::new() };
    let other = 1 - address.octets()[2];
    let ipv6 = ipv6.map(|_| format!("route add fd77:0:0:{other}::/64 dev {device}\n")).unwrap_or_default();
    format!("route add 10.77.{other}.0/24 dev {device} scope link\n{ipv6}")
}

/// Returns the commands that tell a host the other hosts' link addresses. On real networks a router nearby answers for
/// hosts that are far away. A host that had to ask over a long link would wait a round trip before its first packet,
/// and a second after a lost answer.
fn known_neighbours(host: &Host, neighbours: &[Host]) -> String {
    let ports = neighbours.iter().flat_map(Host::ports).filter_map(|port| Some((port, port.address?)));
    let others = ports.filter(|(_, address)| host.ports().iter().all(|port| port.address != Some(*address)));
    let mut batch = String::new();
    for (other, address) in others {
        let network = |port: &&Port| port.address.is_some_and(|own| own.octets()[..3] == address.octets()[..3]);
        let Some(port) = host.ports().iter().find(network).or(host.ports().first()) else { continue };
        batch.push_str(&known_neighbour(other, &link_address(address), &port.device));
    }
    batch
}

/// Allows cubic to everyone on the machine: only an allowed algorithm can be a namespace's default (tcp_cong.c,
/// `tcp_set_default_congestion_control`). This is the only trace that a lab leaves: cubic stays allowed.
fn allow_cubic() -> Result<()> {
    const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
    // Only the machine's first network namespace has this file. If the lab was started in another namespace, it cannot
    // change the file.
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
