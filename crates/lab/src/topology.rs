//! The hosts of a lab (test hosts as network namespaces), their names, ports and addresses.
//!
//! ```text
//!  client                 frontend           intermediateN        backend
//!  client0 10.77.0.10+    client0 10.77.0.1                                     clients' network 10.77.0.0/24
//!     |                      |  service0        service0          service0
//!     |                      |  10.77.1.1       10.77.1.11+       10.77.1.101+  service network 10.77.1.0/24
//!  ===+======================+=====+===============+=================+========  one bridge, in the switch
//! ```
//!
//! One bridge carries both networks, and every host reaches both on each of its links. So a backend can send directly
//! to a client with the frontend's source address, and nothing on the path drops these packets. In a routed lab the
//! switch is a router instead: no two hosts share a link, and each reaches the others through the router only.
//! Addresses are the same.
//!
//! With IPv6, the host 10.77.N.H also has the address fd77:0:0:N::H.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::host::{Host, Port, Role};
use shunt_testbed::LabId;

/// The service network, whose addresses the tiers trust, in both IP versions.
pub(crate) const SERVICE_NETWORKS: [&str; 2] = ["10.77.1.0/24", "fd77:0:0:1::/64"];

/// IPv6 address of a host, made from its IPv4 address.
fn ipv6(address: Ipv4Addr) -> Ipv6Addr {
    let [_, _, network, host] = address.octets();
    Ipv6Addr::new(0xfd77, 0, 0, network.into(), 0, 0, 0, host.into())
}

/// A host's port on the clients' network, given the last byte of its IPv4 address.
fn client_port(host: u8) -> Port {
    Port { device: "client0".to_owned(), address: Some(Ipv4Addr::new(10, 77, 0, host)), ipv6: None }
}

fn service_port(host: u8) -> Port {
    Port { device: "service0".to_owned(), address: Some(Ipv4Addr::new(10, 77, 1, host)), ipv6: None }
}

/// Plan of a host.
pub(crate) struct HostPlan {
    name: String,
    /// Short name of the host, for the names of devices: the kernel limits their length.
    short: String,
    role: Role,
    ports: Vec<Port>,
}

impl HostPlan {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    pub(crate) fn ports(&self) -> &[Port] {
        &self.ports
    }

    pub(crate) fn namespace(&self, lab: &LabId) -> String {
        format!("{}{}", lab.namespace_prefix(), self.short)
    }

    /// Device at the switch's end of a port's link.
    pub(crate) fn switch_device(&self, port: &Port) -> String {
        format!("{}-{}", self.short, port.device.trim_end_matches('0'))
    }

    /// Gives each port with an IPv4 address an IPv6 address as well.
    pub(crate) fn add_ipv6(&mut self) {
        self.ports.iter_mut().for_each(|port| port.ipv6 = port.address.map(ipv6));
    }

    /// Opens the host, whose namespace must exist.
    pub(crate) fn open(&self, lab: &LabId) -> Result<Host> {
        Host::open(&self.name, self.role, self.namespace(lab), self.ports.clone(), lab)
    }
}

/// Plans of the hosts, from the clients to the backends.
pub(crate) fn hosts(clients: u8, intermediates: u8, backends: u8) -> Vec<HostPlan> {
    // A client or backend that is the only one has no number.
    let numbered = |name: &str, count: u8, number: u8| match count {
        1 => name.to_owned(),
        _ => format!("{name}{number}"),
    };
    let client = |n| HostPlan {
        name: numbered("client", clients, n),
        short: numbered("cl", clients, n),
        role: Role::Client,
        ports: vec![client_port(9 + n)],
    };
    let frontend = HostPlan {
        name: "frontend".to_owned(),
        short: "fe".to_owned(),
        role: Role::Frontend,
        ports: vec![client_port(1), service_port(1)],
    };
    let intermediate = |n| HostPlan {
        name: format!("intermediate{n}"),
        short: format!("is{n}"),
        role: Role::Intermediate,
        ports: vec![service_port(10 + n)],
    };
    let backend = |n| HostPlan {
        name: numbered("backend", backends, n),
        short: numbered("be", backends, n),
        role: Role::Backend,
        ports: vec![service_port(100 + n)],
    };
    let tiers = [frontend].into_iter().chain((1..=intermediates).map(intermediate)).chain((1..=backends).map(backend));
    (1..=clients).map(client).chain(tiers).collect()
}

/// Plan of the switch that joins the hosts.
pub(crate) fn switch(hosts: &[HostPlan]) -> HostPlan {
    let ports_of = |host: &HostPlan| -> Vec<Port> {
        host.ports.iter().map(|port| Port { device: host.switch_device(port), address: None, ipv6: None }).collect()
    };
    let ports = hosts.iter().flat_map(ports_of).collect();
    HostPlan { name: "switch".to_owned(), short: "sw".to_owned(), role: Role::Switch, ports }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_where_there_are_several() {
        let names = |hosts: Vec<HostPlan>| hosts.into_iter().map(|host| host.name).collect::<Vec<_>>();
        assert_eq!(names(hosts(1, 0, 1)), ["client", "frontend", "backend"]);
        let several = ["client1", "client2", "frontend", "intermediate1", "backend1", "backend2"];
        assert_eq!(names(hosts(2, 1, 2)), several);
    }

    #[test]
    fn no_two_ports_share_an_address_or_a_device_of_the_switch() {
        let hosts = hosts(64, 64, 64);
        let addresses: std::collections::BTreeSet<_> =
            hosts.iter().flat_map(|host| &host.ports).map(|port| port.address).collect();
        let switch = switch(&hosts);
        let devices: std::collections::BTreeSet<_> = switch.ports.iter().map(|port| &port.device).collect();
        assert_eq!((addresses.len(), devices.len()), (64 * 3 + 2, 64 * 3 + 2));
        // IFNAMSIZ is 16, including the NUL.
        assert!(devices.iter().all(|device| device.len() < 16));
    }
}
