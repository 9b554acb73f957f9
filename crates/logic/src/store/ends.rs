//! Ends: addresses of programs under `shunt run`, on this machine and on peers' machines. A *reference* is sent in
//! place of bytes of a body, which the receiver fetches if it needs them. A connection of a program may carry
//! references if the other end's address is this machine's, or is one that a peer has named. A *peer* is another
//! machine's agent. A *session* is the use of the connection with a peer.
//!
//! Each agent tells its peers the addresses of its machine's programs (ADDRESSES). For an address that a peer has
//! named, the kernel gets a key that only the two agents of that session have. With this key the kernel proves TCP
//! handshakes between programs of the two machines (crates/negotiation/bpf/token.h). Connections with all other
//! machines carry the same bytes as without Shunt. A machine that forges packets with a peer's address has no such key,
//! so connections with it carry no references either.
//!
//! An address has one owner. This machine's own addresses cannot belong to a peer. If two peers name the same address,
//! it belongs to the first, and to the second when the first no longer names it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use shunt_wire::addresses::{ADDRESSES_MAX, Addresses};

use crate::rate::Throttle;
use crate::settings::can_be_client;

/// Key that proves TCP handshakes between programs of two machines, or of one.
pub type Key = [u8; 16];

/// Address that stands for all of this machine's loopback addresses.
pub const LOOPBACK: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);
/// Most ADDRESSES messages per second that are taken from a peer.
const HEARD: u32 = 1;

/// Owner of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    This,
    Peer(usize),
}

/// The addresses that each machine has named, and the owners that follow from these.
#[derive(Debug, Default)]
struct Owners {
    this: Vec<IpAddr>,
    named: BTreeMap<usize, Vec<IpAddr>>,
    owners: BTreeMap<IpAddr, Owner>,
}

impl Owners {
    fn is_named_by(&self, address: IpAddr, owner: Owner) -> bool {
        let is_own = self.this.contains(&address);
        match owner {
            Owner::This => is_own,
            Owner::Peer(peer) => !is_own && self.named.get(&peer).is_some_and(|named| named.contains(&address)),
        }
    }

    /// Computes the owners again, after a machine has named other addresses. Returns the changes.
    fn settle(&mut self) -> Vec<(IpAddr, Option<Owner>)> {
        let before = std::mem::take(&mut self.owners);
        let kept = before.iter().filter(|&(&address, &owner)| self.is_named_by(address, owner));
        let mut owners: BTreeMap<IpAddr, Owner> = kept.map(|(&address, &owner)| (address, owner)).collect();
        owners.extend(self.this.iter().map(|&address| (address, Owner::This)));
        for (&peer, named) in &self.named {
            for &address in named {
                owners.entry(address).or_insert(Owner::Peer(peer));
            }
        }
        let gone = before.keys().filter(|address| !owners.contains_key(address)).map(|&address| (address, None));
        let new = owners.iter().filter(|(address, owner)| before.get(address) != Some(owner));
        let changes = gone.chain(new.map(|(&address, &owner)| (address, Some(owner)))).collect();
        self.owners = owners;
        changes
    }
}

/// State of a session with a peer: its key, and the limit on its ADDRESSES messages.
#[derive(Debug)]
struct Session {
    key: Key,
    addresses: Throttle<Addresses>,
}

/// An address, and the key that proves handshakes with programs at that address from now on. `None` instead of the key:
/// the address no longer has an owner.
pub type Change = (IpAddr, Option<Key>);

/// Owners of addresses, and the keys of the sessions with peers.
#[derive(Debug)]
pub struct Ends {
    owners: Owners,
    own_key: Key,
    /// Addresses of this machine that its configuration names for its peers.
    configured: Vec<IpAddr>,
    sessions: BTreeMap<usize, Session>,
}

impl Ends {
    /// Returns the state of an agent without sessions. `own_key` proves handshakes between programs of this machine.
    /// `configured` has the addresses by which peers know these programs. If it is empty, peers know them by the
    /// addresses of this machine's interfaces.
    pub fn new(own_key: Key, configured: &[IpAddr]) -> Self {
        Self { owners: Owners::default(), own_key, configured: configured.to_vec(), sessions: BTreeMap::new() }
    }

    /// Sets the addresses of this machine's interfaces. Returns the changes.
    #[must_use]
    pub fn set_own(&mut self, addresses: &[IpAddr]) -> Vec<Change> {
        let usable = addresses.iter().filter(|address| is_usable(**address)).count();
        if self.configured.is_empty() && usable > ADDRESSES_MAX {
            tracing::warn!(
                addresses = usable,
                "this machine has more addresses than the {ADDRESSES_MAX} that peers learn: name those of programs in \
                 [store] `addresses`"
            );
        }
        self.owners.this = addresses.iter().chain(&self.configured).copied().chain([LOOPBACK]).collect();
        self.settle()
    }

    /// Notes that a session with a peer begins. Only its two agents have `key`.
    pub fn begin(&mut self, peer: usize, key: Key) {
        self.sessions.insert(peer, Session { key, addresses: Throttle::new(HEARD) });
    }

    /// Forgets a peer's addresses, because its session is over. Returns the changes.
    #[must_use]
    pub fn end(&mut self, peer: usize) -> Vec<Change> {
        self.sessions.remove(&peer);
        self.owners.named.remove(&peer);
        self.settle()
    }

    /// Replaces the addresses of a peer's programs. Returns the changes. Returns `None` if there is no session, or if
    /// the messages come too often: then the newest one is kept for later.
    #[must_use]
    pub fn name(&mut self, peer: usize, addresses: &Addresses, now: Instant) -> Option<Vec<Change>> {
        let addresses = self.sessions.get_mut(&peer)?.addresses.take(*addresses, now)?;
        self.take(peer, &addresses);
        Some(self.settle())
    }

    fn take(&mut self, peer: usize, addresses: &Addresses) {
        let named = addresses.iter().filter(|address| can_be_client(*address) && is_usable(*address)).collect();
        self.owners.named.insert(peer, named);
    }

    /// Takes the ADDRESSES messages that were kept because they came too often, if they are allowed now. Returns the
    /// changes, or `None` if no message was taken.
    #[must_use]
    pub fn tend(&mut self, now: Instant) -> Option<Vec<Change>> {
        let due = |session: &mut Session| session.addresses.take_kept(now);
        let named: Vec<_> =
            self.sessions.iter_mut().filter_map(|(peer, session)| Some((*peer, due(session)?))).collect();
        named.iter().for_each(|(peer, addresses)| self.take(*peer, addresses));
        (!named.is_empty()).then(|| self.settle())
    }

    fn settle(&mut self) -> Vec<Change> {
        let key = |owner: Option<Owner>| match owner? {
            Owner::This => Some(self.own_key),
            Owner::Peer(peer) => self.sessions.get(&peer).map(|session| session.key),
        };
        self.owners.settle().into_iter().map(|(address, owner)| (address, key(owner))).collect()
    }

    /// Returns this machine's addresses for its peers, without those that are valid only on this machine or one link.
    pub fn own(&self) -> Addresses {
        let all = if self.configured.is_empty() { &self.owners.this } else { &self.configured };
        Addresses::of(&all.iter().copied().filter(|address| is_usable(*address)).collect::<Vec<_>>())
    }

    /// Returns all known addresses, each with the peer that owns it, or `None` for this machine.
    pub fn owned(&self) -> Vec<(IpAddr, Option<usize>)> {
        let peer = |owner: &Owner| match owner {
            Owner::This => None,
            Owner::Peer(peer) => Some(*peer),
        };
        self.owners.owners.iter().map(|(address, owner)| (*address, peer(owner))).collect()
    }

    /// Returns the number of addresses that belong to peers now.
    pub fn of_peers(&self) -> usize {
        self.owners.owners.values().filter(|owner| **owner != Owner::This).count()
    }
}

/// Returns whether programs on other machines can connect to this address, also across routers.
pub fn is_usable(address: IpAddr) -> bool {
    !address.is_loopback() && !address.is_unspecified() && !address.is_multicast() && !is_link_local(address)
}

/// Returns whether an address is valid only on one link (RFC 3927; RFC 4291, 2.5.6).
pub fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ipv4) => ipv4.is_link_local(),
        IpAddr::V6(ipv6) => ipv6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate::THROTTLE_PERIOD;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| ip(text)).collect()
    }

    #[test]
    fn an_address_belongs_to_its_first_owner_until_that_gives_it_up() {
        let mut owners = Owners { this: ips(&["10.0.0.1"]), ..Owners::default() };
        assert_eq!(owners.settle(), [(ip("10.0.0.1"), Some(Owner::This))]);
        owners.named.insert(3, ips(&["10.0.0.3", "172.17.0.1"]));
        assert_eq!(owners.settle().len(), 2);
        // Another peer names 172.17.0.1, too, and 10.0.0.1, which belongs to this machine.
        owners.named.insert(1, ips(&["172.17.0.1", "10.0.0.1", "10.0.0.2"]));
        assert_eq!(owners.settle(), [(ip("10.0.0.2"), Some(Owner::Peer(1)))]);
        owners.named.insert(3, ips(&["10.0.0.3"]));
        assert_eq!(owners.settle(), [(ip("172.17.0.1"), Some(Owner::Peer(1)))]);
        owners.named.remove(&3);
        assert_eq!(owners.settle(), [(ip("10.0.0.3"), None)]);
        assert_eq!(owners.settle(), []);
    }

    #[test]
    fn an_address_of_this_machine_is_no_longer_a_peers() {
        let mut owners = Owners::default();
        owners.named.insert(0, ips(&["10.0.0.9"]));
        owners.settle();
        owners.this = ips(&["10.0.0.9"]);
        assert_eq!(owners.settle(), [(ip("10.0.0.9"), Some(Owner::This))]);
        owners.this = Vec::new();
        assert_eq!(owners.settle(), [(ip("10.0.0.9"), Some(Owner::Peer(0)))]);
    }

    #[test]
    fn an_address_is_proven_by_its_owners_key_as_long_as_there_is_a_session() {
        let (mut ends, now) = (Ends::new([1; 16], &[]), Instant::now());
        assert_eq!(ends.set_own(&ips(&["10.0.0.1"])), [(ip("10.0.0.1"), Some([1; 16])), (LOOPBACK, Some([1; 16]))]);
        let named = |texts: &[&str]| Addresses::of(&ips(texts));
        assert_eq!(ends.name(0, &named(&["10.0.0.2"]), now), None, "of no session");
        ends.begin(0, [2; 16]);
        // Loopback and link-local addresses are ignored, and so is this machine's own address.
        let changes = ends.name(0, &named(&["10.0.0.2", "127.0.0.1", "10.0.0.1", "169.254.0.1"]), now);
        assert_eq!(changes, Some(vec![(ip("10.0.0.2"), Some([2; 16]))]));
        assert_eq!(ends.name(0, &named(&["10.0.0.3"]), now), None, "too often");
        assert_eq!(ends.tend(now), None);
        let changes = ends.tend(now + THROTTLE_PERIOD);
        assert_eq!(changes, Some(vec![(ip("10.0.0.2"), None), (ip("10.0.0.3"), Some([2; 16]))]));
        assert_eq!(ends.end(0), [(ip("10.0.0.3"), None)]);
    }
}
