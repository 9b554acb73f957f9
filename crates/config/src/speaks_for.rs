//! `speaks_for`: source addresses that this backend may use for payloads that a frontend's agent claims.
//!
//! A claim is a frontend's message that asks for a payload. The claim names the address and port that the client knows
//! as the server's. The backend's BPF program on egress writes this address and port into every segment. Without
//! `speaks_for`, one frontend's agent could make backends send payloads in the name of any other machine.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::Deserialize;
use shunt_wire::prefixes::{MAPPED_BITS, Prefix};

/// One entry of `speaks_for`. It covers all ports of an address or a prefix (`"192.0.2.10"`, `"192.0.2.0/24"`,
/// `"2001:db8::/64"`), or one port of an address (`"192.0.2.10:443"`, `"[2001:db8::1]:443"`).
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct SpeaksFor(Prefix);

impl TryFrom<String> for SpeaksFor {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let with_port = text.parse::<SocketAddr>().ok().filter(|at| at.port() != 0);
        let parsed = with_port.map(|at| Self::new(at.ip().to_canonical().into(), at.port()));
        let parsed = parsed.or_else(|| text.parse().ok().map(Self::address));
        let parsed = parsed.or_else(|| text.parse().ok().map(|addresses| Self::new(addresses, 0)));
        let example = "\"192.0.2.10\", \"192.0.2.10:443\", \"2001:db8::/64\"";
        parsed
            .ok_or_else(|| format!("\"{text}\" is not an address, a prefix, or an address and port, such as {example}"))
    }
}

impl SpeaksFor {
    /// Makes an entry for these addresses. `port` 0 stands for all ports.
    fn new(addresses: IpNet, port: u16) -> Self {
        let bits = if addresses.addr().is_ipv4() { MAPPED_BITS } else { 0 } + addresses.prefix_len();
        Self(Prefix { address: addresses.network().into(), bits, pad: 0, port: port.to_be_bytes() })
    }

    /// Makes an entry for one address and all its ports.
    pub fn address(address: IpAddr) -> Self {
        Self::new(IpNet::from(address.to_canonical()), 0)
    }

    /// Returns whether this entry covers the address and port `server`.
    pub fn covers(&self, server: SocketAddr) -> bool {
        self.0.covers(server)
    }

    /// Returns the entry in the form in which this agent sends it to the peer.
    pub fn prefix(&self) -> Prefix {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(text: &str, server: &str) -> bool {
        SpeaksFor::try_from(text.to_owned()).unwrap().covers(server.parse().unwrap())
    }

    #[test]
    fn an_address_stands_for_itself_and_a_prefix_for_its_addresses() {
        assert!(covers("192.0.2.10", "192.0.2.10:80") && !covers("192.0.2.10", "192.0.2.11:80"));
        assert!(covers("192.0.2.0/24", "192.0.2.200:443") && !covers("192.0.2.0/24", "192.0.3.1:443"));
        assert!(covers("2001:db8::/64", "[2001:db8::77]:443") && !covers("2001:db8::/64", "[2001:db8:1::]:443"));
        assert!(!covers("0.0.0.0/0", "[2001:db8::1]:443") && !covers("::/0", "192.0.2.1:443"));
    }

    #[test]
    fn a_port_narrows_it() {
        assert!(covers("192.0.2.10:443", "192.0.2.10:443") && !covers("192.0.2.10:443", "192.0.2.10:80"));
        assert!(covers("[2001:db8::1]:443", "[2001:db8::1]:443") && !covers("[2001:db8::1]:443", "[2001:db8::1]:80"));
    }

    #[test]
    fn an_ipv4_address_is_the_same_in_ipv6_clothes() {
        assert!(covers("192.0.2.10", "[::ffff:192.0.2.10]:80") && covers("::ffff:192.0.2.10", "192.0.2.10:80"));
    }

    #[test]
    fn text_that_is_neither_is_refused_with_an_example() {
        for text in ["", "fe1", "192.0.2.10:0", "192.0.2.0/33", "192.0.2.10:http", "2001:db8::/64:443"] {
            let error = SpeaksFor::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains("192.0.2.10:443"), "{error}");
        }
    }
}
