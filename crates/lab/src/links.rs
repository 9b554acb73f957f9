//! How the hosts of a lab are joined: namespaces, links, addresses, and the kernel's settings for them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cleanup::LabId;
use crate::host::{Host, Port};
use crate::topology::HostPlan;
use crate::wire::Wire;

/// Network sysctls of every host: a machine's default may be BBR, which paces; both of the frontend's ports are on one
/// bridge, so each must answer ARP for its own address only.
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

/// Makes the hosts' namespaces, empty.
pub(crate) fn make_namespaces<'a>(plans: impl IntoIterator<Item = &'a HostPlan>, lab: &LabId) -> Result<()> {
    let batch: String = plans.into_iter().map(|plan| format!("netns add {}\n", plan.namespace(lab))).collect();
    ip_batch(None, &batch)
}

/// Joins `hosts`, made by `plans`, through the switch.
pub(crate) fn join(hosts: &[Host], plans: &[HostPlan], switch: &Host, lab: &LabId, wire: Wire) -> Result<()> {
    allow_cubic()?;
    switch.sysctls(SWITCH_SYSCTLS)?;
    for host in hosts {
        host.sysctls(HOST_SYSCTLS)?;
    }
    ip_batch(Some(switch), &switch_links(plans, lab))?;
    if Path::new("/proc/sys/net/bridge").exists() {
        switch.sysctls(SWITCH_NETFILTER)?;
    }
    for host in hosts {
        ip_batch(Some(host), &host_links(host))?;
    }
    for host in hosts.iter().chain([switch]) {
        for port in host.ports() {
            wire.configure(host, &port.device)?;
        }
    }
    Ok(())
}

/// Makes every link, its ends in the switch and in a host.
fn switch_links(plans: &[HostPlan], lab: &LabId) -> String {
    // No spanning tree, no ageing surprises, no snooping: a cable with many ends.
    let mut batch = "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
                     link set bridge up\nlink set lo up\n"
        .to_owned();
    for plan in plans {
        for port in plan.ports() {
            let (device, peer, namespace) = (plan.switch_device(port), &port.device, plan.namespace(lab));
            let _ = writeln!(batch, "link add {device} type veth peer name {peer} netns {namespace}");
            let _ = writeln!(batch, "link set {device} master bridge up");
        }
    }
    batch
}

/// Sets up the ends in a host: addresses, and a route to the network that it has none in.
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
