//! Settings of the operator that the logic uses. A *peer* is another machine's agent. A *sender* is this machine's
//! kernel socket for a client of a peer. An *offer* is a payload that a server holds ready, and a *claim* is a peer's
//! message that asks for it. A *store* has the payloads of programs under `shunt run`.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_wire::prefixes::Prefix;

use crate::limits::Limits;

/// Settings of one agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of this machine.
    pub name: String,
    /// Longest time in which this agent sends nothing to a peer (`heartbeat` of the configuration).
    pub heartbeat: Duration,
    /// Section `[limits]` of the configuration.
    pub limits: Limits,
    /// Clients connect to this machine.
    pub is_frontend: bool,
    /// Settings of this machine as a backend. `None` if it sends no payloads.
    pub backend: Option<BackendSettings>,
    /// Whether this machine has a store, for programs under `shunt run`.
    pub has_store: bool,
    /// The other machines. A peer's number is its index in this list.
    pub peers: Vec<PeerSettings>,
}

/// Settings of a backend.
#[derive(Clone, Copy, Debug)]
pub struct BackendSettings {
    /// Most senders that there may be at a time.
    pub senders: usize,
    /// Time that an offer waits for its claim.
    pub offer_lifetime: Duration,
}

/// Settings for one peer.
#[derive(Clone, Debug)]
pub struct PeerSettings {
    /// The peer's name.
    pub name: String,
    /// Address that the peer's agent listens at, for log lines.
    pub address: SocketAddr,
    /// Whether this agent dials the peer. Otherwise the peer dials this agent.
    pub is_dialled: bool,
    /// TCP port of this machine's senders for the peer's clients, if this machine is a backend.
    pub port: u16,
    /// Addresses of the peer's servers. This machine may send with these source addresses to the servers' clients.
    pub speaks_for: Vec<Prefix>,
    /// Programs of the peer's machine may read from this machine's store.
    pub may_read_store: bool,
    /// The configuration no longer names the peer. Its number is not given to another peer.
    pub is_gone: bool,
}

impl PeerSettings {
    /// Returns whether a session that began under these settings can continue under `other`.
    pub fn allows_session_of(&self, other: &Self) -> bool {
        let same = |of: &Self| (of.address, of.port, of.may_read_store, of.is_gone, of.speaks_for.clone());
        same(self) == same(other)
    }

    /// Returns whether this machine may send to `client` with the source address `server` on behalf of the peer.
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
