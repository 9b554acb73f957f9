//! Checks of the routes by which packets leave this machine: to peers, and to clients, which may have any address. A
//! *payload* is the body of a response that a backend sends straight to the client.

use std::fs;
use std::net::IpAddr;

use shunt_wire::peer::Examined;

use super::finding::Finding;
use shunt_config::Config;
use shunt_host::routes::Routes;

/// Address in a network that is reserved for documentation (RFC 5737). No machine has it, so its route is the one to
/// distant clients.
const ANYWHERE: [u8; 4] = [192, 0, 2, 1];

/// Checks the routes to each peer. On a backend, also checks by which interface payload leaves, and whether a filter
/// drops clients' ACKs.
pub(crate) fn all(config: &Config) -> Vec<Finding> {
    let mut routes = match Routes::open() {
        Ok(routes) => routes,
        Err(error) => return vec![Finding::skipped("route", "from here", error.to_string())],
    };
    let to = |peer: &shunt_config::PeerConfig| to_peer(&mut routes, &peer.name, peer.address.ip());
    let mut findings: Vec<Finding> = config.peers.iter().map(to).collect();
    if let Some(backend) = &config.backend {
        findings.push(to_clients(&mut routes, &backend.interfaces));
        findings.extend(config.peers.iter().filter_map(|peer| filtered(&mut routes, peer.address.ip())));
    }
    findings
}

/// Runs the checks of this file for a doctor that runs on the peer's machine, which has the address `peer`. Returns
/// bits of [`Examined::faults`]. `interfaces` are those by which payloads leave; `None` where this machine is no
/// backend.
pub fn seen_from_here(routes: &mut Routes, interfaces: Option<&[String]>, peer: IpAddr) -> u32 {
    let bit = |is_fault: bool, bit| if is_fault { bit } else { 0 };
    let lost = bit(way_to(routes, peer).is_err(), Examined::NO_ROUTE);
    let Some(interfaces) = interfaces else { return lost };
    lost | bit(to_clients(routes, interfaces).is_fault(), Examined::PAYLOAD_ELSEWHERE)
        | bit(filtered(routes, peer).is_some_and(|found| found.is_fault()), Examined::FILTERED)
}

/// Returns the name of the interface by which packets for an address leave. The error is a phrase that says why there
/// is none.
fn way_to(routes: &mut Routes, address: IpAddr) -> Result<String, String> {
    match routes.port_towards(address) {
        Ok(Ok(index)) => Ok(shunt_host::interfaces::interface_name(index)),
        Ok(Err(none)) => Err(none.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

fn to_peer(routes: &mut Routes, name: &str, address: IpAddr) -> Finding {
    let about = format!("to \"{name}\" at {address}");
    let advice = way_to(routes, address).err().map(|why| format!("{why}: see `ip route get {address}`"));
    Finding::of("route", about, advice)
}

/// Checks that payload for distant clients leaves by an interface in `interfaces`. The route to a client decides by
/// which interface its payload leaves. Only `interfaces` have steering programs (BPF). These give the payload's
/// segments the addresses and sequence numbers that the client expects.
fn to_clients(routes: &mut Routes, interfaces: &[String]) -> Finding {
    let about = "by which payloads leave for clients elsewhere";
    let Ok(name) = way_to(routes, ANYWHERE.into()) else {
        return Finding::skipped(
            "route",
            about,
            "there is no default route; payloads leave by the route to each client",
        );
    };
    let advice = (!interfaces.contains(&name)).then(|| {
        format!(
            "{name} has the default route, and [backend] interfaces does not name it: add it, and restart the agent"
        )
    });
    Finding::of("route", format!("{about}: {name}"), advice)
}

/// Checks that rp_filter does not drop clients' ACKs. The frontend (`peer`) forwards them with the clients' source
/// addresses. A strict filter drops a packet if the route to its source leads through another interface than the one by
/// which the packet came (net.ipv4.conf.*.rp_filter; RFC 3704).
fn filtered(routes: &mut Routes, peer: IpAddr) -> Option<Finding> {
    if !peer.is_ipv4() {
        return None;
    }
    let name = way_to(routes, peer).ok()?;
    let strictness = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter")).ok()?;
        text.trim().parse::<u8>().ok()
    };
    let effective = strictness("all")?.max(strictness(&name)?);
    let advice = (effective == 1 && way_to(routes, ANYWHERE.into()).as_ref() != Ok(&name)).then(|| {
        format!(
            "rp_filter is strict, and drops clients' ACKs because the route to clients does not use {name}: `sysctl \
             -w net.ipv4.conf.{name}.rp_filter=2`"
        )
    });
    Some(Finding::of("rp_filter", format!("of {name}, by which ACKs come from {peer}"), advice))
}
