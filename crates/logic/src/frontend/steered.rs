//! Targets of clients' ACKs: addresses and TCP port of each peer's senders, and the network interfaces towards them. A
//! *peer* is another machine's agent, and a *session* the use of the connection with it. A *sender* is a peer's kernel
//! socket for a client of this machine. The *steering programs* are the BPF programs that send the client's ACKs on to
//! the sender. A *handoff* lets a peer's senders send a payload on the client's connection.

use std::net::IpAddr;

use shunt_wire::local::BoardHead;
use shunt_wire::peer::Hello;

/// Senders of one peer for clients of one IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Senders {
    /// Address of the senders.
    pub address: IpAddr,
    /// Index of the network interface towards `address`, or 0 if there is no route or the route is not known yet.
    pub interface: u32,
}

/// Entry of one peer, for the steering programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steered {
    /// TCP port of the peer's senders.
    pub port: u16,
    /// There is a session with the peer, so new handoffs may begin where an interface is known.
    pub is_up: bool,
    /// Senders for clients with IPv4 addresses, if the peer has any.
    pub ipv4: Option<Senders>,
    /// Senders for clients with IPv6 addresses, if the peer has any.
    pub ipv6: Option<Senders>,
    /// Whether an answer about the routes to the senders has come. `None`: the routes were not asked for yet.
    asked: Option<bool>,
}

impl Steered {
    fn has_route(&self) -> bool {
        [self.ipv4, self.ipv6].into_iter().flatten().any(|senders| senders.interface != 0)
    }
}

/// Steering entries of all peers.
#[derive(Debug)]
pub struct SteeredPeers(Vec<Steered>);

impl SteeredPeers {
    /// Returns a table for this number of peers, each with an empty entry.
    pub fn new(peers: usize) -> Self {
        Self(vec![Steered::default(); peers])
    }

    /// Adds an empty entry for one more peer.
    pub fn add(&mut self) {
        self.0.push(Steered::default());
    }

    /// Returns a peer's entry.
    pub fn entry(&self, peer: usize) -> &Steered {
        &self.0[peer]
    }

    /// Takes a peer's senders from its HELLO. For each IP version, handoffs may begin as soon as the interface towards
    /// the senders is known. An interface that is known already for the same address stays. Returns whether an
    /// interface is known, so that the steering programs are to be told of the entry. Otherwise they keep their earlier
    /// entry, so that handoffs from before this agent's start continue.
    pub fn begin(&mut self, peer: usize, hello: &Hello) -> bool {
        let before = self.0[peer];
        let senders = |address: Option<IpAddr>, before: Option<Senders>| {
            let known = before.filter(|before| Some(before.address) == address);
            address.map(|address| Senders { address, interface: known.map_or(0, |known| known.interface) })
        };
        self.0[peer] = Steered {
            port: hello.sender_port.get(),
            is_up: true,
            ipv4: senders(hello.ipv4(), before.ipv4),
            ipv6: senders(hello.ipv6(), before.ipv6),
            asked: Some(false),
        };
        self.0[peer].has_route()
    }

    /// Sets the interface towards an address of a peer's senders, or 0 if there is no route. Clients' ACKs leave by
    /// this interface from now on, also those of handoffs under way. Returns whether the peer has this address.
    pub fn set_interface(&mut self, peer: usize, address: IpAddr, interface: u32) -> bool {
        let entry = &mut self.0[peer];
        entry.asked = entry.asked.map(|_| true);
        let found = [&mut entry.ipv4, &mut entry.ipv6].into_iter().flatten().find(|senders| senders.address == address);
        found.map(|senders| senders.interface = interface).is_some()
    }

    /// Notes that the session is lost, so that no new handoff begins. Handoffs in progress are still steered, because
    /// the peer's kernel may still send their payloads. Returns whether there was a session.
    pub fn lose(&mut self, peer: usize) -> bool {
        std::mem::take(&mut self.0[peer].is_up)
    }

    /// Returns the IP versions of the clients that a peer can send to (`SHUNT_FAMILY_*`).
    pub fn families(&self, peer: usize) -> u32 {
        let entry = &self.0[peer];
        let bit = |senders: Option<Senders>, bit| {
            if entry.is_up && senders.is_some_and(|senders| senders.interface != 0) { bit } else { 0 }
        };
        bit(entry.ipv4, BoardHead::IPV4) | bit(entry.ipv6, BoardHead::IPV6)
    }

    /// Returns whether the routes to a peer's senders were asked for, and no answer has come yet.
    pub fn is_asking(&self, peer: usize) -> bool {
        self.0[peer].asked == Some(false)
    }

    /// Returns whether an answer about the routes to a peer's senders has come, and the peer can send to no client: no
    /// route leads there, or the session is lost.
    pub fn is_unreachable(&self, peer: usize) -> bool {
        self.0[peer].asked == Some(true) && self.families(peer) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_wire::Address;
    use zerocopy::FromZeros;

    fn hello(ipv4: &str, ipv6: Option<&str>) -> Hello {
        let address = |text: &str| Address::from(text.parse::<IpAddr>().unwrap());
        let mut hello = Hello::new_zeroed();
        hello.sender_port = 61000.into();
        hello.sender_ipv4 = address(ipv4);
        hello.sender_ipv6 = ipv6.map_or(Address::NONE, address);
        hello
    }

    #[test]
    fn handoffs_begin_once_the_port_is_known() {
        let mut peers = SteeredPeers::new(1);
        let (ipv4, ipv6) = ("10.0.0.4", "fd00::4");
        assert!(!peers.begin(0, &hello(ipv4, Some(ipv6))));
        assert!(peers.is_asking(0) && !peers.is_unreachable(0) && peers.families(0) == 0);
        assert!(peers.set_interface(0, ipv4.parse().unwrap(), 3));
        assert_eq!(peers.families(0), BoardHead::IPV4);
        assert!(peers.set_interface(0, ipv6.parse().unwrap(), 3));
        assert_eq!(peers.families(0), BoardHead::IPV4 | BoardHead::IPV6);
        assert!(!peers.set_interface(0, "10.0.0.5".parse().unwrap(), 4), "it has said another address since");
        assert!(peers.set_interface(0, ipv4.parse().unwrap(), 0));
        assert_eq!((peers.families(0), peers.is_unreachable(0)), (BoardHead::IPV6, false));
        assert!(peers.set_interface(0, ipv6.parse().unwrap(), 0) && peers.is_unreachable(0));
    }

    #[test]
    fn a_port_outlives_a_session_and_not_an_address() {
        let mut peers = SteeredPeers::new(1);
        peers.begin(0, &hello("10.0.0.4", None));
        peers.set_interface(0, "10.0.0.4".parse().unwrap(), 3);
        assert!(peers.lose(0) && !peers.lose(0) && peers.families(0) == 0);
        assert!(peers.begin(0, &hello("10.0.0.4", None)), "the programs are told at once");
        assert_eq!(peers.families(0), BoardHead::IPV4);
        assert!(!peers.begin(0, &hello("10.0.0.9", None)));
        assert_eq!(peers.families(0), 0);
    }
}
