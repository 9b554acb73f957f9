//! Which stores the programs of which machines can fetch from ([`shunt_odb::sources`]): what this machine's programs go by before
//! they pass a reference on.
//!
//! A machine's own sources are its store, and those of the peers that have named their addresses to it: they do that for whom
//! they let read. It tells them to its peers (SOURCES), when it has heard of a peer's addresses and whenever they have changed.
//! A peer that says nothing of its sources has none.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use shunt_odb::reference::Holder;
use shunt_odb::sources::Known;
use shunt_wire::sources::Sources;

use crate::agent::Agent;
use crate::repeated::Repeated;

/// A peer that says its sources again and again is heard so often in a second.
const HEARD: u32 = 16;

/// A peer's sources, as it has said them in a session.
#[derive(Debug)]
struct Said {
    sources: Vec<Holder>,
    repeated: Repeated<Sources>,
}

impl Default for Said {
    fn default() -> Self {
        Self { sources: Vec::new(), repeated: Repeated::new(HEARD) }
    }
}

/// The sources of this machine and of its peers.
#[derive(Debug)]
pub(crate) struct SourcesOfPeers {
    known: Known,
    store: Holder,
    /// The peers' stores, by their numbers.
    stores: Vec<Holder>,
    /// Peers whose stores this machine's programs can fetch from.
    open: BTreeSet<usize>,
    said: BTreeMap<usize, Said>,
    /// Pairs that there was no room for.
    lost: usize,
}

impl SourcesOfPeers {
    pub(crate) fn new(known: Known, store: Holder, stores: Vec<Holder>) -> Self {
        Self { known, store, stores, open: BTreeSet::new(), said: BTreeMap::new(), lost: 0 }
    }

    /// A session is over.
    fn end(&mut self, peer: usize) {
        self.open.remove(&peer);
        self.said.remove(&peer);
    }

    /// A peer's programs can fetch from these stores. False: it says so too often, and nothing has changed.
    #[must_use]
    fn hear(&mut self, peer: usize, sources: &Sources, now: Instant) -> bool {
        let said = self.said.entry(peer).or_default();
        let Some(sources) = said.repeated.hear(*sources, now) else { return false };
        self.take(peer, &sources);
        true
    }

    fn take(&mut self, peer: usize, sources: &Sources) {
        // Nobody here has a reference of another store. A name that a peer made up could stand for any pair of the memory.
        let may_matter = |store: &Holder| *store == self.store || self.stores.contains(store);
        let sources = sources.iter().map(Holder::from).filter(may_matter).collect();
        self.said.entry(peer).or_default().sources = sources;
    }

    /// Hears peers again that had said theirs too often. True: there were some.
    fn hear_again(&mut self, now: Instant) -> bool {
        let due = |said: &mut Said| said.repeated.hear_again(now);
        let heard: Vec<_> = self.said.iter_mut().filter_map(|(peer, said)| Some((*peer, due(said)?))).collect();
        heard.iter().for_each(|(peer, sources)| self.take(*peer, sources));
        !heard.is_empty()
    }

    /// This machine's.
    fn own(&self) -> impl Iterator<Item = Holder> + '_ {
        [self.store].into_iter().chain(self.open.iter().filter_map(|&peer| self.stores.get(peer).copied()))
    }

    /// Tells programs. `ends`: whose address each is, a peer's or this machine's.
    pub(crate) fn settle(&mut self, ends: &[(IpAddr, Option<usize>)]) {
        let own: HashSet<Holder> = self.own().collect();
        let mut all = Vec::new();
        for &(address, peer) in ends {
            match peer {
                None => all.extend(own.iter().map(|store| (address, *store))),
                Some(peer) => {
                    let said = self.said.get(&peer).map_or(&[][..], |said| &said.sources);
                    all.extend(said.iter().map(|store| (address, *store)));
                }
            }
        }
        let lost = self.known.are(all);
        self.known.own_are(&own);
        if lost > self.lost {
            tracing::warn!(
                lost,
                "there are more addresses and stores than programs can be told of: some get bytes in place of references"
            );
        }
        self.lost = lost;
    }

    /// Stores that peers' programs can fetch from, one after the other of all peers.
    pub(crate) fn of_peers(&self) -> usize {
        self.said.values().map(|said| said.sources.len()).sum()
    }
}

impl Agent {
    /// Has programs told what is true now.
    pub(crate) fn settle_sources(&mut self) {
        if let Some(store) = &mut self.store {
            store.sources.settle(&store.ends.owned());
        }
    }

    /// A peer has named its addresses, as it does to whom it lets read: from now on its store is a source here. It may be told
    /// which others are, and all others are told of it.
    pub(crate) fn open_source(&mut self, peer: usize) {
        let Some(store) = &mut self.store else { return };
        if store.sources.open.insert(peer) {
            self.settle_sources();
            self.tell_sources();
        }
    }

    /// A session is over.
    pub(crate) fn end_sources(&mut self, peer: usize) {
        let Some(store) = &mut self.store else { return };
        let was_open = store.sources.open.contains(&peer);
        store.sources.end(peer);
        self.settle_sources();
        if was_open {
            self.tell_sources();
        }
    }

    /// Tells this machine's sources to all whose programs this one's may have connections with.
    fn tell_sources(&mut self) {
        let Some(store) = &self.store else { return };
        let own = Sources::of(store.sources.own().map(Into::into));
        let peers: Vec<usize> = store.sources.open.iter().copied().collect();
        for peer in peers {
            if let Some(session) = self.peers[peer].session() {
                own.emit(session.transport.output());
                self.mark_unsent(peer);
            }
        }
    }

    /// A peer says its sources.
    pub(crate) fn on_sources(&mut self, peer: usize, sources: &Sources) {
        let now = self.now;
        if self.store.as_mut().is_some_and(|store| store.sources.hear(peer, sources, now)) {
            self.settle_sources();
        }
    }

    /// Peers that have said theirs too often are heard again.
    pub(crate) fn tend_sources(&mut self) {
        let now = self.now;
        if self.store.as_mut().is_some_and(|store| store.sources.hear_again(now)) {
            self.settle_sources();
        }
    }
}

#[cfg(test)]
mod tests {
    use shunt_odb::sources::{self, End, Kept};
    use shunt_sys::shared::SharedMemory;

    use super::*;
    use crate::repeated::EVERY;

    fn names() -> [Holder; 3] {
        ["be1", "be2", "be3"].map(Holder::named)
    }

    fn said(stores: &[Holder]) -> Sources {
        Sources::of(stores.iter().map(|&store| store.into()))
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn made() -> (SourcesOfPeers, Kept, sources::Sources) {
        let (known, kept) = sources::new(Holder::named("fe1")).unwrap();
        let read =
            sources::Sources::new(SharedMemory::open_to_read(kept.memory().try_clone_to_owned().unwrap()).unwrap())
                .unwrap();
        (SourcesOfPeers::new(known, Holder::named("fe1"), names().to_vec()), kept, read)
    }

    #[test]
    fn programs_pass_on_what_a_peer_has_said_and_nothing_after_its_session() {
        let (mut all, _kept, read) = made();
        let (names, now) = (names(), Instant::now());
        let ends = [(ip(1), None), (ip(2), Some(0)), (ip(3), Some(1))];
        let have = |last, store: &Holder| read.have(End::of(ip(last)), store);
        all.settle(&ends);
        assert!(have(1, &all.store) && !have(1, &names[0]) && !have(2, &names[0]));
        all.open.insert(0);
        // A name of nobody's, as it could be made up to stand for another pair, is nothing.
        assert!(all.hear(0, &said(&[names[0], names[2], Holder::named("nobody")]), now));
        all.settle(&ends);
        assert!(have(1, &names[0]) && have(2, &names[0]) && have(2, &names[2]));
        assert!(!have(2, &names[1]) && !have(2, &all.store) && !have(3, &names[0]) && !have(1, &names[1]));
        assert_eq!((all.of_peers(), read.came(&names[0])), (2, 1));
        all.end(0);
        all.settle(&ends);
        assert!(!have(1, &names[0]) && !have(2, &names[0]) && have(1, &all.store));
    }

    #[test]
    fn a_peer_that_says_it_all_the_time_is_heard_again_in_a_second() {
        let (mut all, _kept, _read) = made();
        let (names, now) = (names(), Instant::now());
        for _ in 0..HEARD {
            assert!(all.hear(0, &said(&names[..1]), now));
        }
        // Nothing is settled for it: that takes half a millisecond in a large service.
        assert!(!all.hear(0, &said(&names), now));
        assert_eq!(all.of_peers(), 1);
        assert!(!all.hear_again(now) && all.hear_again(now + EVERY) && !all.hear_again(now + EVERY));
        assert_eq!(all.of_peers(), 3);
    }
}
