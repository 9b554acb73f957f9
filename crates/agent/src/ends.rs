//! Which connections of programs under `shunt run` may carry references: those with an address that a peer's agent has named.
//!
//! Each agent tells its peers the addresses that its machine's programs have (ADDRESSES). For an address that a peer has named,
//! the kernel gets a key that only the two agents of that session have, and proves handshakes by it (crates/negotiation,
//! bpf/token.h). All other machines, and whoever writes packets in a peer's name, are spoken to plainly.
//!
//! An address has one owner. This machine's own addresses are nobody else's, and a peer that names what another one has named
//! gets it when that one lets go.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::time::Instant;

use shunt_negotiation::{Ends, Key, LOOPBACK};
use shunt_wire::addresses::{ADDRESSES_MAX, Addresses};

use crate::addresses::is_usable;
use crate::agent::Agent;
use crate::peers::random_key;
use crate::repeated::Repeated;
use crate::speaks_for::can_be_client;

/// A peer that names others again and again is heard so often in a second.
const HEARD: u32 = 1;

/// Whose an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    This,
    Peer(usize),
}

/// What the kernel is to know of an address now; `None`: nothing.
type Change = (IpAddr, Option<Owner>);

/// Who has named what, and whose it is by that.
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

    /// Whose addresses are whose now, after somebody has named others: what has changed.
    fn settle(&mut self) -> Vec<Change> {
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

/// A session's end of it.
#[derive(Debug)]
struct Session {
    key: Key,
    said: Repeated<Addresses>,
}

/// The owners, and what the kernel knows of them.
#[derive(Debug)]
pub(crate) struct EndsOfPeers {
    kernel: Ends,
    owners: Owners,
    own_key: Key,
    /// Those of this machine that its configuration names for its peers.
    configured: Vec<IpAddr>,
    sessions: BTreeMap<usize, Session>,
}

impl EndsOfPeers {
    /// `addresses`: those of this machine's interfaces; `configured`: those that its peers know its programs by, if they are
    /// others. What an earlier agent has left of peers is taken out of the kernel.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(kernel: Ends, addresses: &[IpAddr], configured: &[IpAddr]) -> io::Result<Self> {
        // Handshakes that are under way between programs of this machine go by the key that is there.
        let known = kernel.key(LOOPBACK).map_err(io::Error::other)?;
        let own_key = known.map_or_else(random_key, Ok)?;
        for address in kernel.addresses() {
            if address != LOOPBACK && !addresses.contains(&address) {
                kernel.remove(address).map_err(io::Error::other)?;
            }
        }
        let configured = configured.to_vec();
        let mut all = Self { kernel, owners: Owners::default(), own_key, configured, sessions: BTreeMap::new() };
        all.set_own(addresses);
        Ok(all)
    }

    /// This machine's interfaces have these addresses from now on.
    fn set_own(&mut self, addresses: &[IpAddr]) {
        let usable = addresses.iter().filter(|address| is_usable(**address)).count();
        if self.configured.is_empty() && usable > ADDRESSES_MAX {
            tracing::warn!(
                addresses = usable,
                "peers are told {ADDRESSES_MAX} of this machine's addresses: name those of programs in [store] `addresses`"
            );
        }
        self.owners.this = addresses.iter().chain(&self.configured).copied().chain([LOOPBACK]).collect();
        self.settle();
    }

    /// A session begins, whose agents both have `key`.
    fn begin(&mut self, peer: usize, key: Key) {
        self.sessions.insert(peer, Session { key, said: Repeated::new(HEARD) });
    }

    /// It is over: the peer's addresses are a stranger's.
    fn end(&mut self, peer: usize) {
        self.sessions.remove(&peer);
        self.owners.named.remove(&peer);
        self.settle();
    }

    /// A peer's programs have these addresses, and no others. False: it says so too often, and nothing has changed.
    #[must_use]
    fn name(&mut self, peer: usize, addresses: &Addresses, now: Instant) -> bool {
        let Some(session) = self.sessions.get_mut(&peer) else { return false };
        let Some(addresses) = session.said.hear(*addresses, now) else { return false };
        self.take(peer, &addresses);
        true
    }

    fn take(&mut self, peer: usize, addresses: &Addresses) {
        let named = addresses.iter().filter(|address| can_be_client(*address) && is_usable(*address)).collect();
        self.owners.named.insert(peer, named);
        self.settle();
    }

    /// True: somebody has named other addresses.
    fn tend(&mut self, now: Instant) -> bool {
        let due = |session: &mut Session| session.said.hear_again(now);
        let named: Vec<_> =
            self.sessions.iter_mut().filter_map(|(peer, session)| Some((*peer, due(session)?))).collect();
        named.iter().for_each(|(peer, addresses)| self.take(*peer, addresses));
        !named.is_empty()
    }

    fn settle(&mut self) {
        for (address, owner) in self.owners.settle() {
            let key = owner.and_then(|owner| match owner {
                Owner::This => Some(self.own_key),
                Owner::Peer(peer) => self.sessions.get(&peer).map(|session| session.key),
            });
            let told = match key {
                Some(key) => self.kernel.set(address, &key),
                None => self.kernel.remove(address),
            };
            if let Err(error) = told {
                tracing::error!(%address, %error, "cannot tell the kernel whose an address is: its programs get real bytes");
            }
        }
    }

    /// This machine's own, as peers are told: none that has a meaning on it alone.
    fn own(&self) -> Addresses {
        let all = if self.configured.is_empty() { &self.owners.this } else { &self.configured };
        Addresses::of(&all.iter().copied().filter(|address| is_usable(*address)).collect::<Vec<_>>())
    }

    /// All addresses that are known, and the peer that has each; `None`: this machine has it.
    pub(crate) fn owned(&self) -> Vec<(IpAddr, Option<usize>)> {
        let peer = |owner: &Owner| match owner {
            Owner::This => None,
            Owner::Peer(peer) => Some(*peer),
        };
        self.owners.owners.iter().map(|(address, owner)| (*address, peer(owner))).collect()
    }

    /// Addresses of peers that are known now.
    pub(crate) fn of_peers(&self) -> usize {
        self.owners.owners.values().filter(|owner| **owner != Owner::This).count()
    }
}

impl Agent {
    /// The store's ends, where programs of that peer may fetch from here: to others nothing is referred.
    fn ends_with(&mut self, peer: usize) -> Option<&mut EndsOfPeers> {
        let name = &self.peers[peer].name;
        let store = self.store.as_mut().filter(|store| store.config.lets_read(name))?;
        Some(&mut store.ends)
    }

    /// The addresses of this machine's programs, as a session begins with them.
    pub(crate) fn name_addresses(&mut self, peer: usize, output: &mut Vec<u8>) {
        if let Some(ends) = self.ends_with(peer) {
            ends.own().emit(output);
        }
    }

    /// A session begins.
    pub(crate) fn begin_ends(&mut self, peer: usize, key: Key) {
        if let Some(ends) = self.ends_with(peer) {
            ends.begin(peer, key);
        }
    }

    /// A session is over.
    pub(crate) fn end_ends(&mut self, peer: usize) {
        if let Some(ends) = self.ends_with(peer) {
            ends.end(peer);
        }
    }

    /// A peer names the addresses of its programs.
    pub(crate) fn on_addresses(&mut self, peer: usize, addresses: &Addresses) {
        let now = self.now;
        if self.ends_with(peer).is_some_and(|ends| ends.name(peer, addresses, now)) {
            self.settle_sources();
        }
        self.open_source(peer);
    }

    /// Peers that have named addresses too often are heard again.
    pub(crate) fn tend_ends(&mut self) {
        if self.store.as_mut().is_some_and(|store| store.ends.tend(self.now)) {
            self.settle_sources();
        }
    }

    /// This machine has other addresses: its peers are told.
    pub(crate) fn on_own_addresses(&mut self) {
        let Some(store) = &mut self.store else { return };
        let Some(addresses) = store.new_addresses() else { return };
        store.ends.set_own(&addresses);
        let own = store.ends.own();
        self.settle_sources();
        for peer in 0..self.peers.len() {
            if self.ends_with(peer).is_some()
                && let Some(session) = self.peers[peer].session()
            {
                own.emit(session.transport.output());
                self.mark_unsent(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| ip(text)).collect()
    }

    #[test]
    fn an_address_is_its_first_owners_until_that_one_lets_go() {
        let mut owners = Owners { this: ips(&["10.0.0.1"]), ..Owners::default() };
        assert_eq!(owners.settle(), [(ip("10.0.0.1"), Some(Owner::This))]);
        owners.named.insert(3, ips(&["10.0.0.3", "172.17.0.1"]));
        assert_eq!(owners.settle().len(), 2);
        // Another one names the same, and what is this machine's.
        owners.named.insert(1, ips(&["172.17.0.1", "10.0.0.1", "10.0.0.2"]));
        assert_eq!(owners.settle(), [(ip("10.0.0.2"), Some(Owner::Peer(1)))]);
        owners.named.insert(3, ips(&["10.0.0.3"]));
        assert_eq!(owners.settle(), [(ip("172.17.0.1"), Some(Owner::Peer(1)))]);
        owners.named.remove(&3);
        assert_eq!(owners.settle(), [(ip("10.0.0.3"), None)]);
        assert_eq!(owners.settle(), []);
    }

    #[test]
    fn what_becomes_this_machines_is_no_peers_any_more() {
        let mut owners = Owners::default();
        owners.named.insert(0, ips(&["10.0.0.9"]));
        owners.settle();
        owners.this = ips(&["10.0.0.9"]);
        assert_eq!(owners.settle(), [(ip("10.0.0.9"), Some(Owner::This))]);
        owners.this = Vec::new();
        assert_eq!(owners.settle(), [(ip("10.0.0.9"), Some(Owner::Peer(0)))]);
    }
}
