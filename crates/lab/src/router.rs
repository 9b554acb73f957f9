//! A router in place of the switch's bridge. Each host is alone on its links and reaches all others through the router,
//! as servers in different racks do. The router's kernel forwards packets: it counts down their hop limits, and reports
//! packets that are too long.
//!
//! Hosts keep the addresses and prefix lengths that they have on a bridge. Their routes to the lab's networks lead to
//! the router, and the router has a route for each address. A backend sends packets with the frontend's address. They
//! come in on a device by which the router would not reach this address, so the router must not check sources
//! (rp_filter).

use std::fmt::Write as _;

use crate::host::{Host, Port};
use crate::neighbour::{known_neighbour, link_address};

/// Network sysctls of the router.
pub(crate) const SYSCTLS: &[(&str, &str)] = &[
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
];

pub(crate) const BEGIN: &str = "link set lo up\n";

/// The router's addresses, the same on each of its devices.
const GATEWAY: &str = "10.77.254.1";
const GATEWAY_IPV6: &str = "fe80::1";
const LINK_ADDRESS: &str = "02:00:0a:4d:fe:01";

/// Returns the commands that set up the router's device for a host's port. With `known`, the port's link address is
/// entered as well, so that the router does not have to ask for it.
pub(crate) fn device(device: &str, port: &Port, known: bool) -> String {
    let mut batch = format!("link set {device} address {LINK_ADDRESS}\naddr add {GATEWAY}/32 dev {device}\n");
    if port.ipv6.is_some() {
        let _ = writeln!(batch, "addr add {GATEWAY_IPV6}/64 dev {device} nodad");
    }
    let _ = writeln!(batch, "link set {device} up");
    if let Some(address) = port.address {
        let _ = writeln!(batch, "route add {address}/32 dev {device}");
        if known {
            batch.push_str(&known_neighbour(port, &link_address(address), device));
        }
    }
    batch.extend(port.ipv6.map(|address| format!("route add {address}/128 dev {device}\n")));
    batch
}

/// Returns the commands for a host's routes to both networks of the lab, which all lead to the router. A route uses the
/// host's port in that network or, if there is none, the host's first port.
pub(crate) fn host(host: &Host, known: bool) -> String {
    let mut batch = String::new();
    for network in 0..2 {
        let is_in = |port: &&Port| port.address.is_some_and(|own| own.octets()[2] == network);
        let Some(port) = host.ports().iter().find(is_in).or(host.ports().first()) else { continue };
        let device = &port.device;
        let _ = writeln!(batch, "route replace 10.77.{network}.0/24 via {GATEWAY} dev {device} onlink");
        if port.ipv6.is_some() {
            // The metric makes this route preferred to the kernel's own route for the address's prefix, which
            // `route replace` does not replace in IPv6.
            let _ = writeln!(batch, "route add fd77:0:0:{network}::/64 via {GATEWAY_IPV6} dev {device} metric 1");
        }
    }
    for Port { device, ipv6, .. } in host.ports().iter().filter(|_| known) {
        let gateways = [Some(GATEWAY), ipv6.map(|_| GATEWAY_IPV6)].into_iter().flatten();
        for gateway in gateways {
            let _ = writeln!(batch, "neigh replace {gateway} lladdr {LINK_ADDRESS} dev {device} nud permanent");
        }
    }
    batch
}
