//! Link (Ethernet) addresses of ports. Each is made from the port's IPv4 address, so every host can compute it.

use std::net::Ipv4Addr;

use crate::host::{Family, Port};

/// Returns the `ip` commands that tell a host the link address of a port, for each of the port's IP addresses.
pub(crate) fn known_neighbour(port: &Port, link_address: &str, device: &str) -> String {
    let addresses = [Family::V4, Family::V6].into_iter().filter_map(|family| port.address_of(family));
    let known = |address| format!("neigh replace {address} lladdr {link_address} dev {device} nud permanent\n");
    addresses.map(known).collect()
}

/// Link address of a port, made from its IPv4 address, so that every host can know it.
pub(crate) fn link_address(address: Ipv4Addr) -> String {
    let [_, _, network, node] = address.octets();
    format!("02:00:0a:4d:{network:02x}:{node:02x}")
}
