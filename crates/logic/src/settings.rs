//! Settings of the operator that the logic uses.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_wire::prefixes::Prefix;

use crate::limits::Limits;

/// Settings of one agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of this machine.
    pub name: String,
    /// Longest silence towards a peer (`heartbeat` of the configuration).
    pub heartbeat: Duration,
    /// Section `[limits]` of the configuration.
    pub limits: Limits,
    /// Clients connect to this machine.
    pub is_frontend: bool,
    /// Present where this machine sends payloads.
    pub backend: Option<BackendSettings>,
    /// Programs run under `shunt run` here.
    pub has_store: bool,
    /// The other machines. A peer's number is its index in this list.
    pub peers: Vec<PeerSettings>,
}

/// Settings of a backend.
#[derive(Clone, Copy, Debug)]
pub struct BackendSettings {
    /// Most senders.
    pub senders: usize,
    /// Time that an offer waits for its claim.
    pub offer_lifetime: Duration,
}

/// Settings for one peer.
#[derive(Clone, Debug)]
pub struct PeerSettings {
    /// The peer's name.
    pub name: String,
    /// Whether this agent dials the peer. Otherwise the peer dials this agent.
    pub is_dialled: bool,
    /// TCP port of the senders for its clients, where this machine is a backend.
    pub port: u16,
    /// Addresses that this machine may send as for the peer.
    pub speaks_for: Vec<Prefix>,
    /// Programs of the peer may read from this machine's store.
    pub may_read_store: bool,
    /// The configuration no longer names the peer. Its number is not given to another peer.
    pub is_gone: bool,
}

impl PeerSettings {
    /// Returns whether a session that began under these settings can continue under `other`.
    pub fn allows_session_of(&self, other: &Self) -> bool {
        let same = |of: &Self| (of.port, of.may_read_store, of.is_gone, of.speaks_for.clone());
        same(self) == same(other)
    }

    /// Returns whether the peer may have this machine send to `client` with the source address `server`.
    pub fn may_have_sent(&self, server: SocketAddr, client: IpAddr) -> bool {
        self.speaks_for.iter().any(|prefix| prefix.covers(server)) && can_be_client(client)
    }
}

/// Returns whether `address` can be the address of exactly one other machine.
pub fn can_be_client(address: IpAddr) -> bool {
    let address = address.to_canonical();
    let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || is_broadcast)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_one_other_machine() {
        for bad in ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:127.0.0.1"]
        {
            assert!(!can_be_client(bad.parse().unwrap()), "{bad}");
        }
        assert!(can_be_client("198.51.100.7".parse().unwrap()) && can_be_client("2001:db8::7".parse().unwrap()));
    }
}
