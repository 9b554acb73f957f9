//! Sources of a machine: the stores that its programs can fetch from. A *store* has the payloads of a machine's
//! programs under `shunt run`, and a *reference* names bytes of one payload. Before a program passes a reference on, it
//! checks whether the reader's machine has the reference's store among its sources. A *peer* is another machine's
//! agent, and a *session* the use of a connection with it.
//!
//! A machine's sources are its own store, and the stores of the peers that have named their addresses to it. A peer
//! names its addresses only to machines that may read its store. The machine tells its sources to its peers (SOURCES):
//! when a peer has named its addresses, and whenever the sources have changed. A peer that has sent no SOURCES has no
//! sources.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use shunt_wire::sources::{Source, Sources};

use crate::rate::Throttle;

/// Most SOURCES messages per second that are taken from a peer.
const HEARD: u32 = 16;

/// Sources of a peer, as it has told them in this session.
#[derive(Debug)]
struct Said {
    sources: Vec<Source>,
    messages: Throttle<Sources>,
}

impl Default for Said {
    fn default() -> Self {
        Self { sources: Vec::new(), messages: Throttle::new(HEARD) }
    }
}

/// Sources of this machine and of its peers.
#[derive(Debug)]
pub struct SourcesOfPeers {
    store: Source,
    /// The peers' stores, by the peers' numbers.
    stores: Vec<Source>,
    /// Peers whose stores this machine's programs can fetch from.
    open: BTreeSet<usize>,
    said: BTreeMap<usize, Said>,
}

impl SourcesOfPeers {
    /// Returns the state of an agent without sessions. `store` is this machine's store, and `stores` are its peers'
    /// stores.
    pub fn new(store: Source, stores: Vec<Source>) -> Self {
        Self { store, stores, open: BTreeSet::new(), said: BTreeMap::new() }
    }

    /// Adds the store of one more peer.
    pub fn add_peer(&mut self, store: Source) {
        self.stores.push(store);
    }

    /// Makes a peer's store a source of this machine, because the peer has named its addresses. Returns whether the
    /// store was no source before.
    pub fn open(&mut self, peer: usize) -> bool {
        self.open.insert(peer)
    }

    /// Forgets a peer's sources, because its session is over. Returns whether its store was a source of this machine.
    pub fn end(&mut self, peer: usize) -> bool {
        self.said.remove(&peer);
        self.open.remove(&peer)
    }

    /// Returns the peers whose stores are sources of this machine. These are the peers that are told this machine's
    /// sources.
    pub fn opened(&self) -> impl Iterator<Item = usize> + '_ {
        self.open.iter().copied()
    }

    /// Handles a peer's SOURCES. Returns false if the messages come too often: then the newest one is kept for later.
    #[must_use]
    pub fn hear(&mut self, peer: usize, sources: &Sources, now: Instant) -> bool {
        let said = self.said.entry(peer).or_default();
        let Some(sources) = said.messages.take(*sources, now) else { return false };
        self.take(peer, &sources);
        true
    }

    fn take(&mut self, peer: usize, sources: &Sources) {
        // Stores that are neither this machine's nor a peer's are left out: no program here has a reference to them.
        // Besides, a peer could make up a name that collides with another store's name in the table that programs read.
        let may_matter = |store: &Source| *store == self.store || self.stores.contains(store);
        let sources = sources.iter().filter(may_matter).collect();
        self.said.entry(peer).or_default().sources = sources;
    }

    /// Takes the SOURCES messages that were kept because they came too often, if they are allowed now. Returns whether
    /// any was taken.
    #[must_use]
    pub fn tend(&mut self, now: Instant) -> bool {
        let due = |said: &mut Said| said.messages.take_kept(now);
        let heard: Vec<_> = self.said.iter_mut().filter_map(|(peer, said)| Some((*peer, due(said)?))).collect();
        heard.iter().for_each(|(peer, sources)| self.take(*peer, sources));
        !heard.is_empty()
    }

    /// Returns this machine's sources.
    pub fn own(&self) -> impl Iterator<Item = Source> + '_ {
        [self.store].into_iter().chain(self.open.iter().filter_map(|&peer| self.stores.get(peer).copied()))
    }

    /// Returns pairs of an address and a store that programs at the address can fetch from. `ends` has the addresses,
    /// each with its peer, or `None` for this machine.
    pub fn pairs<'a>(&'a self, ends: &'a [(IpAddr, Option<usize>)]) -> impl Iterator<Item = (IpAddr, Source)> + 'a {
        ends.iter().flat_map(|&(address, peer)| {
            let own = peer.is_none().then(|| self.own()).into_iter().flatten();
            let said = peer.and_then(|peer| self.said.get(&peer)).map_or(&[][..], |said| &said.sources);
            own.chain(said.iter().copied()).map(move |store| (address, store))
        })
    }

    /// Returns the number of sources of all peers together.
    pub fn of_peers(&self) -> usize {
        self.said.values().map(|said| said.sources.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate::THROTTLE_PERIOD;

    const THIS: Source = [9; 16];
    const STORES: [Source; 3] = [[1; 16], [2; 16], [3; 16]];

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn all() -> SourcesOfPeers {
        SourcesOfPeers::new(THIS, STORES.to_vec())
    }

    #[test]
    fn programs_pass_on_what_a_peer_has_said_and_nothing_after_its_session() {
        let (mut all, now) = (all(), Instant::now());
        let ends = [(ip(1), None), (ip(2), Some(0)), (ip(3), Some(1))];
        let pairs = |all: &SourcesOfPeers| all.pairs(&ends).collect::<Vec<_>>();
        assert_eq!(pairs(&all), [(ip(1), THIS)]);
        assert!(all.open(0) && !all.open(0));
        // The unknown name [77; 16] is ignored, because it could be made up to collide with another pair.
        assert!(all.hear(0, &Sources::of([STORES[0], STORES[2], [77; 16]]), now));
        assert_eq!(pairs(&all), [(ip(1), THIS), (ip(1), STORES[0]), (ip(2), STORES[0]), (ip(2), STORES[2])]);
        assert_eq!(all.of_peers(), 2);
        assert!(all.end(0) && !all.end(0));
        assert_eq!(pairs(&all), [(ip(1), THIS)]);
    }

    #[test]
    fn a_peer_that_says_it_all_the_time_is_heard_again_in_a_second() {
        let (mut all, now) = (all(), Instant::now());
        for _ in 0..HEARD {
            assert!(all.hear(0, &Sources::of(STORES[..1].iter().copied()), now));
        }
        // Messages beyond HEARD are processed later. Each takes half a millisecond in a large service.
        assert!(!all.hear(0, &Sources::of(STORES), now));
        assert_eq!(all.of_peers(), 1);
        let later = now + THROTTLE_PERIOD;
        assert!(!all.tend(now) && all.tend(later) && !all.tend(later));
        assert_eq!(all.of_peers(), 3);
    }
}
