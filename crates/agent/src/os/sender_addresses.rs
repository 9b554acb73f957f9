//! Addresses of this machine's senders: one for clients of each IP version, whichever version the agents' session uses.
//! A payload for a client of IPv6 travels as IPv6, because the client knows its frontend by an address of that version.
//! A *sender* is this machine's kernel socket for a client of a frontend, and a *session* is the connection with a peer
//! (another machine's agent).
//!
//! The configuration names the addresses (`[backend] addresses`), or the agent finds them. For the IP version of the
//! session it takes the session's own address, unless that is link-local. Otherwise, and for the other version, it
//! takes the first usable address on the session's interface, or else on an interface that payloads leave by.

use std::io;
use std::net::IpAddr;

use if_addrs::Interface;
use shunt_logic::peers::SenderAddresses;
use shunt_logic::store::ends::{is_link_local, is_usable};

use shunt_config::BackendConfig;

/// Returns the addresses of this machine's senders towards a peer. `session` is this machine's address in the session
/// with that peer.
///
/// # Errors
/// Returns the kernel's error of getifaddrs(3).
pub(crate) fn find(backend: &BackendConfig, session: IpAddr) -> io::Result<SenderAddresses> {
    if backend.addresses.is_empty() {
        return Ok(among(&if_addrs::get_if_addrs()?, &backend.interfaces, session));
    }
    Ok(named(&backend.addresses))
}

fn named(addresses: &[IpAddr]) -> SenderAddresses {
    let first = |ipv6: bool| addresses.iter().copied().find(|address| address.is_ipv6() == ipv6);
    SenderAddresses { ipv4: first(false), ipv6: first(true) }
}

fn among(all: &[Interface], ports: &[String], session: IpAddr) -> SenderAddresses {
    let port = all.iter().find(|interface| interface.ip() == session).map(|interface| &interface.name);
    let of = |ipv6: bool| {
        if session.is_ipv6() == ipv6 && !is_link_local(session) {
            return Some(session);
        }
        let usable = |interface: &&Interface| interface.ip().is_ipv6() == ipv6 && is_usable(interface.ip());
        let beside = all.iter().filter(|interface| Some(&interface.name) == port).find(usable);
        let leaving = || all.iter().filter(|interface| ports.contains(&interface.name)).find(usable);
        beside.or_else(leaving).map(Interface::ip)
    };
    SenderAddresses { ipv4: of(false), ipv6: of(true) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use if_addrs::{IfAddr, IfOperStatus, Ifv4Addr, Ifv6Addr};
    use shunt_wire::Address;

    fn interface(name: &str, address: &str) -> Interface {
        let addr = match address.parse().unwrap() {
            IpAddr::V4(ip) => {
                IfAddr::V4(Ifv4Addr { ip, netmask: [255, 255, 255, 0].into(), prefixlen: 24, broadcast: None })
            }
            IpAddr::V6(ip) => IfAddr::V6(Ifv6Addr { ip, netmask: ip, prefixlen: 64, broadcast: None }),
        };
        Interface { name: name.into(), addr, index: None, oper_status: IfOperStatus::Up, is_p2p: false }
    }

    fn ip(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    #[test]
    fn the_other_version_is_found_beside_the_session_or_where_payloads_leave() {
        let mut all = vec![
            interface("lo", "127.0.0.1"),
            interface("lo", "::1"),
            interface("wan0", "fd00:5::4"),
            interface("eth0", "fe80::4"),
            interface("eth0", "10.0.0.4"),
            interface("eth0", "fd00:1::4"),
        ];
        let ports = ["wan0".to_owned()];
        let found = among(&all, &ports, ip("10.0.0.4"));
        assert_eq!(found, SenderAddresses { ipv4: Some(ip("10.0.0.4")), ipv6: Some(ip("fd00:1::4")) });
        all.pop();
        let found = among(&all, &ports, ip("10.0.0.4"));
        assert_eq!(found.towards(ip("fd00:9::1").into()), Some(ip("fd00:5::4")));
        let found = among(&all, &[], ip("10.0.0.4"));
        assert_eq!(found.on_the_wire(), [ip("10.0.0.4").into(), Address::NONE]);
    }

    #[test]
    fn a_link_local_session_is_no_place_for_senders() {
        let all = [interface("eth0", "fe80::4"), interface("eth0", "10.0.0.4")];
        let found = among(&all, &[], ip("fe80::4"));
        assert_eq!(found, SenderAddresses { ipv4: Some(ip("10.0.0.4")), ipv6: None });
    }

    #[test]
    fn only_configured_addresses_are_used() {
        let found = named(&[ip("fd00::4")]);
        assert_eq!(found, SenderAddresses { ipv4: None, ipv6: Some(ip("fd00::4")) });
        assert_eq!(found.towards(ip("10.0.0.9").into()), None);
    }
}
