//! Sources of a machine: the stores that its programs can fetch from. A reference to any other store is a body that ends in the
//! middle there, so whoever has one for that machine sends the bytes in its place.
//!
//! Each agent tells its peers its sources (SOURCES, shunt_wire::sources), and keeps what it knows of all machines in memory that its
//! programs read: no message, and no system call for each reference.
//!
//! ```text
//!  0         8    4096                        6144 .. 8192
//!  +---------+----+---------------------------+-----+---------------------------------+
//!  | seen    |    | 128 sources of this one:  |     | 8,192 rows of 8 pairs           |
//!  |         |    | name, how often it came   |     | of an end and a store, or zeros |
//!  +---------+----+---------------------------+-----+---------------------------------+
//! ```
//! A pair is in the row that its lowest bits say. Where that is full, those who ask for it send bytes.

use std::collections::HashSet;
use std::hash::Hasher;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shunt_sys::shared::SharedMemory;
use siphasher::sip::SipHasher24;
use zerocopy::IntoBytes;

use crate::presence::{self, now_ms};
use crate::reference::Holder;

/// A word of [`crate::presence`].
const SEEN: usize = 0;
const OWN: usize = 4096;
const OWN_MAX: usize = 128;
const ROWS: usize = 8192;
const ROWS_MAX: u64 = 8192;
const PAIRS_OF_A_ROW: usize = 8;
const BYTES: usize = ROWS + ROWS_MAX as usize * PAIRS_OF_A_ROW * size_of::<u64>();

/// Other machines' addresses, and this one's, as numbers. All of the latter's loopback addresses are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End(u64);

impl End {
    /// The machine that has this address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        let octets = match address.to_canonical() {
            address if address.is_loopback() => Ipv6Addr::LOCALHOST.octets(),
            IpAddr::V4(ipv4) => ipv4.to_ipv6_mapped().octets(),
            IpAddr::V6(ipv6) => ipv6.octets(),
        };
        Self(digest(&octets))
    }

    /// For where it is kept: never 0.
    #[must_use]
    pub fn to_long(self) -> u64 {
        self.0
    }

    /// What [`Self::to_long`] said.
    #[must_use]
    pub fn from_long(long: u64) -> Self {
        Self(long)
    }

    fn and(self, store: &Holder) -> u64 {
        let (low, high) = name(store);
        // Odd numbers of no meaning: all bits of the product's upper half depend on all of both.
        let mixed = (self.0 ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ high;
        (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93).max(1)
    }
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new();
    hasher.write(bytes);
    hasher.finish().max(1)
}

/// A store's name as two numbers: names are digests.
fn name(store: &Holder) -> (u64, u64) {
    let (low, high) = store.as_bytes().split_at(8);
    let number = |half: &[u8]| half.iter().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
    (number(low).max(1), number(high))
}

fn row(pair: u64) -> impl Iterator<Item = usize> {
    let first = ROWS + (pair % ROWS_MAX) as usize * PAIRS_OF_A_ROW * size_of::<u64>();
    (0..PAIRS_OF_A_ROW).map(move |place| first + place * size_of::<u64>())
}

fn own() -> impl Iterator<Item = usize> {
    (0..OWN_MAX).map(|place| OWN + place * 2 * size_of::<u64>())
}

/// The agent's end. Its machine's programs can always fetch from its own store.
#[derive(Debug)]
pub struct Known {
    memory: Arc<SharedMemory>,
    store: Holder,
    pairs: HashSet<u64>,
    own: HashSet<Holder>,
}

/// The store's, which says that it is there.
#[derive(Debug)]
pub struct Kept {
    memory: Arc<SharedMemory>,
    /// For programs: whoever has become another user since could open it no more.
    to_read: OwnedFd,
}

/// For the agent whose store that is, and for the store.
///
/// # Errors
/// The kernel's.
pub fn new(store: Holder) -> io::Result<(Known, Kept)> {
    let memory = Arc::new(SharedMemory::create("shunt-sources", BYTES)?);
    let kept = Kept { to_read: memory.read_only()?, memory: Arc::clone(&memory) };
    kept.seen(now_ms());
    let mut known = Known { memory, store, pairs: HashSet::new(), own: HashSet::new() };
    known.are([]);
    Ok((known, kept))
}

impl Known {
    /// Programs at these addresses can fetch from these stores, and no others: how many pairs there was no room for.
    pub fn are(&mut self, all: impl IntoIterator<Item = (IpAddr, Holder)>) -> usize {
        let this = (IpAddr::V6(Ipv6Addr::LOCALHOST), self.store);
        let pairs = all.into_iter().chain([this]).map(|(address, store)| End::of(address).and(&store));
        let pairs: HashSet<u64> = pairs.collect();
        for pair in self.pairs.difference(&pairs) {
            self.replace(*pair, 0);
        }
        let before = std::mem::take(&mut self.pairs);
        self.pairs = pairs.iter().copied().filter(|&pair| before.contains(&pair) || self.add(pair)).collect();
        pairs.len() - self.pairs.len()
    }

    fn add(&self, pair: u64) -> bool {
        let free = row(pair).map(|at| self.memory.long(at)).find(|place| place.load(Ordering::Relaxed) == 0);
        free.is_some_and(|place| {
            place.store(pair, Ordering::Relaxed);
            true
        })
    }

    fn replace(&self, pair: u64, by: u64) {
        let places = row(pair).map(|at| self.memory.long(at));
        places
            .filter(|place| place.load(Ordering::Relaxed) == pair)
            .for_each(|place| place.store(by, Ordering::Relaxed));
    }

    /// This machine's programs can fetch from these stores now. Whoever could not a moment ago may try again.
    pub fn own_are(&mut self, stores: &HashSet<Holder>) {
        for store in stores.difference(&self.own) {
            let (name, _) = name(store);
            let known = |at: &usize| self.memory.long(*at).load(Ordering::Relaxed);
            let place = own().find(|at| known(at) == name || known(at) == 0);
            if let Some(at) = place {
                self.memory.long(at + size_of::<u64>()).fetch_add(1, Ordering::Relaxed);
                self.memory.long(at).store(name, Ordering::Release);
            }
        }
        self.own.clone_from(stores);
    }
}

impl Kept {
    /// The memory, for programs to read.
    #[must_use]
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.to_read.as_fd()
    }

    /// It is kept, at `now_ms`.
    pub fn seen(&self, now_ms: u64) {
        presence::seen(self.memory.long(SEEN), now_ms);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        presence::end(self.memory.long(SEEN));
    }
}

/// A program's end: nothing here can be written.
#[derive(Debug)]
pub struct Sources(SharedMemory);

impl Sources {
    /// Of memory that the store has given for reading.
    ///
    /// # Errors
    /// It is another version's.
    pub fn new(memory: SharedMemory) -> io::Result<Self> {
        if memory.len() == BYTES { Ok(Self(memory)) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Whether anybody sees to it that it is true.
    #[must_use]
    pub fn are_kept(&self) -> bool {
        presence::is_there(self.0.long(SEEN))
    }

    /// Whether programs at that end can fetch from that store.
    #[must_use]
    pub fn have(&self, end: End, store: &Holder) -> bool {
        let pair = end.and(store);
        row(pair).any(|at| self.0.long(at).load(Ordering::Relaxed) == pair)
    }

    /// How often that store has become one that this machine's programs can fetch from.
    #[must_use]
    pub fn came(&self, store: &Holder) -> u64 {
        let (name, _) = name(store);
        let mut known =
            own().map(|at| (at, self.0.long(at).load(Ordering::Acquire))).take_while(|(_, known)| *known != 0);
        let place = known.find(|(_, known)| *known == name);
        place.map_or(0, |(at, _)| self.0.long(at + size_of::<u64>()).load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn made() -> (Known, Kept, Sources) {
        let (known, kept) = new(Holder::named("fe1")).unwrap();
        let sources =
            Sources::new(SharedMemory::open_to_read(kept.memory().try_clone_to_owned().unwrap()).unwrap()).unwrap();
        (known, kept, sources)
    }

    #[test]
    fn programs_read_what_the_agent_has_heard() {
        let (mut known, kept, sources) = made();
        let (be1, be2) = (Holder::named("be1"), Holder::named("be2"));
        assert!(sources.have(End::of(ip("127.0.0.9")), &Holder::named("fe1")));
        assert_eq!(known.are([(ip("10.0.0.1"), be1), (ip("fd00::1"), be2)]), 0);
        assert!(sources.have(End::of(ip("::ffff:10.0.0.1")), &be1) && sources.have(End::of(ip("fd00::1")), &be2));
        assert!(!sources.have(End::of(ip("10.0.0.1")), &be2) && !sources.have(End::of(ip("10.0.0.2")), &be1));
        known.are([(ip("10.0.0.1"), be2)]);
        assert!(!sources.have(End::of(ip("10.0.0.1")), &be1) && sources.have(End::of(ip("10.0.0.1")), &be2));
        assert!(sources.have(End::of(ip("::1")), &Holder::named("fe1")));
        assert!(sources.are_kept());
        drop(kept);
        assert!(!sources.are_kept());
    }

    #[test]
    fn a_store_that_comes_back_has_come_twice() {
        let (mut known, _kept, sources) = made();
        let (be1, be2) = (Holder::named("be1"), Holder::named("be2"));
        known.own_are(&HashSet::from([be1, be2]));
        known.own_are(&HashSet::from([be2]));
        assert_eq!((sources.came(&be1), sources.came(&be2), sources.came(&Holder::named("be3"))), (1, 1, 0));
        known.own_are(&HashSet::from([be1, be2]));
        assert_eq!((sources.came(&be1), sources.came(&be2)), (2, 1));
    }

    #[test]
    fn a_large_service_has_room_and_what_has_none_is_counted() {
        let (mut known, _kept, sources) = made();
        let stores: Vec<Holder> = (0..64).map(|number| Holder::named(&format!("be{number}"))).collect();
        let address = |number: u32| IpAddr::from((0x0a00_0000 + number).to_be_bytes());
        let all = |ends: u32| {
            let stores = stores.clone();
            (0..ends).flat_map(move |end| stores.clone().into_iter().map(move |store| (address(end), store)))
        };
        assert_eq!(known.are(all(128)), 0);
        assert!(all(128).all(|(address, store)| sources.have(End::of(address), &store)));
        let left = known.are(all(2048));
        let there = all(2048).filter(|(address, store)| sources.have(End::of(*address), store)).count();
        assert_eq!(there + left, 2048 * 64);
        assert!(left > 0);
        assert_eq!(known.are([]), 0);
        assert!(!all(2048).any(|(address, store)| sources.have(End::of(address), &store)));
    }
}
