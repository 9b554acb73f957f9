//! Sources of a machine: the stores that its programs can fetch from. A *store* has the bodies that a machine's
//! programs have written, and a *reference* names bytes of one body. If a program got a reference to any other store,
//! it would have to break its connection in the middle of the body. So before a program sends a reference, it checks
//! whether the store is a source of the receiver's machine. If not, it sends the bytes instead.
//!
//! The *agent* is Shunt's daemon on each machine. It tells the other machines' agents the sources of its machine
//! (SOURCES, shunt_wire::sources). It keeps the sources of all machines in memory that its own machine's programs read.
//! So a check takes no message and no system call.
//!
//! ```text
//!  0         8    4096                        8192
//!  +---------+----+---------------------------+---------------------------------+
//!  | seen    |    | 256 sources of this       | 8,192 rows of 8 pairs           |
//!  |         |    | machine: name, arrivals   | of an end and a store, or zeros |
//!  +---------+----+---------------------------+---------------------------------+
//! ```
//! An *end* is a machine, by one of its addresses. A pair of an end and a store is one number, and the lowest bits of
//! this number give the pair's row. A pair for which its row has no room is not in the table. Then programs send bytes.
//! *Arrivals* are how often a store has become a source of this machine.

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

/// Offset of the word that tells programs whether the table is kept up to date ([`crate::presence`]).
const SEEN: usize = 0;
const OWN: usize = 4096;
const OWN_MAX: usize = 256;
const ROWS: usize = 8192;
const ROWS_MAX: u64 = 8192;
const PAIRS_OF_A_ROW: usize = 8;
const BYTES: usize = ROWS + ROWS_MAX as usize * PAIRS_OF_A_ROW * size_of::<u64>();

/// A machine, as a number made from one of its addresses. All loopback addresses of this machine give one number.
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

    /// Returns the number, for storing it. It is never 0.
    #[must_use]
    pub fn to_long(self) -> u64 {
        self.0
    }

    /// Makes an end from the number that [`Self::to_long`] has returned.
    #[must_use]
    pub fn from_long(long: u64) -> Self {
        Self(long)
    }

    fn and(self, store: &Holder) -> u64 {
        let (low, high) = name(store);
        // The constants are odd, and have no further meaning. A multiplication spreads each bit over the bits above it,
        // and the shift brings the upper bits down to the lowest, which choose the row.
        let mixed = (self.0 ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ high;
        (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93).max(1)
    }
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new();
    hasher.write(bytes);
    hasher.finish().max(1)
}

/// A store's name as two numbers. They are as good as a hash, because names are digests.
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

/// The table as the agent writes it. It always says that its machine's programs can fetch from its machine's store.
#[derive(Debug)]
pub struct Known {
    memory: Arc<SharedMemory>,
    store: Holder,
    pairs: HashSet<u64>,
    own: HashSet<Holder>,
}

/// The table as the store keeps it: the store writes that the table is up to date.
#[derive(Debug)]
pub struct Kept {
    memory: Arc<SharedMemory>,
    /// Read-only descriptor of the memory, for programs. It is opened at the beginning, because the agent could not
    /// open it once the agent has become another user.
    to_read: OwnedFd,
}

/// Makes a table, for the agent of `store` and for the store itself.
///
/// # Errors
/// Returns the kernel's error of creating or opening the memory.
pub fn new(store: Holder) -> io::Result<(Known, Kept)> {
    let memory = Arc::new(SharedMemory::create("shunt-sources", BYTES)?);
    let kept = Kept { to_read: memory.read_only()?, memory: Arc::clone(&memory) };
    kept.seen(now_ms());
    let mut known = Known { memory, store, pairs: HashSet::new(), own: HashSet::new() };
    known.are([]);
    Ok((known, kept))
}

impl Known {
    /// Sets the pairs: programs at each pair's address can fetch from the pair's store. Pairs that are not among these
    /// are removed, except for this machine with its own store. Returns the number of pairs for which there was no
    /// room.
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

    /// Sets the sources of this machine. The number of arrivals of each new source grows, so programs that had lost
    /// that source try it again.
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

    /// Says that the table was up to date at `now_ms`.
    pub fn seen(&self, now_ms: u64) {
        presence::seen(self.memory.long(SEEN), now_ms);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        presence::end(self.memory.long(SEEN));
    }
}

/// The table as a program uses it. The memory is read-only.
#[derive(Debug)]
pub struct Sources(SharedMemory);

impl Sources {
    /// Uses the table's memory, as a program has received it from its machine's store.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not of [`BYTES`]: then the agent is of a version with another table.
    pub fn new(memory: SharedMemory) -> io::Result<Self> {
        if memory.len() == BYTES { Ok(Self(memory)) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Whether the table is kept up to date.
    #[must_use]
    pub fn are_kept(&self) -> bool {
        presence::is_there(self.0.long(SEEN))
    }

    /// Whether programs at this end can fetch from this store.
    #[must_use]
    pub fn have(&self, end: End, store: &Holder) -> bool {
        let pair = end.and(store);
        row(pair).any(|at| self.0.long(at).load(Ordering::Relaxed) == pair)
    }

    /// Returns how often this store has become one that this machine's programs can fetch from.
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
