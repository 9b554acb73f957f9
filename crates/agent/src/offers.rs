//! Payloads that servers of this machine hold ready, until they are claimed or expire.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::time::{Duration, Instant};

use shunt_handoff::identity::FileIdentity;
use shunt_handoff::payload::Payload;
use shunt_handoff::sender::Load;
use shunt_wire::Tag;
use shunt_wire::local::{BOARD_PEERS, Offer, Reason};

struct Offered {
    offer: Offer,
    file: File,
    /// When it expires: one that was claimed and put back has a later end than the first.
    end: Instant,
    /// Identity of the file when its digest was told.
    proven: Option<FileIdentity>,
}

/// All open offers.
pub struct Offers {
    lifetime: Duration,
    by_number: HashMap<u64, Offered>,
    /// In the order of their end: all live equally long. Those of offers that were claimed stay until then.
    ends: VecDeque<(Instant, u64)>,
    expired: u64,
    loads: Vec<Load>,
}

impl Offers {
    /// None yet.
    pub fn new(lifetime: Duration) -> Self {
        Self {
            lifetime,
            by_number: HashMap::new(),
            ends: VecDeque::new(),
            expired: 0,
            loads: vec![Load::default(); BOARD_PEERS],
        }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// How many nobody claimed in time.
    pub fn expired(&self) -> u64 {
        self.expired
    }

    /// What is open for one peer.
    pub fn load(&self, peer: u32) -> Load {
        self.loads[peer as usize]
    }

    /// Takes an offer; a number that is already there is refused.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: the server uses a number twice.
    pub fn add(&mut self, offer: Offer, file: File, now: Instant) -> Result<(), Reason> {
        if self.by_number.contains_key(&offer.number) {
            return Err(Reason::Malformed);
        }
        let end = now + self.lifetime;
        self.ends.push_back((end, offer.number));
        self.loads[offer.peer as usize] += Load::waiting(offer.length);
        self.by_number.insert(offer.number, Offered { offer, file, end, proven: None });
        Ok(())
    }

    /// Takes one back that was claimed, and of which its client has got nothing: it can be claimed or fetched once more.
    pub fn put_back(&mut self, offer: Offer, file: File, proven: Option<FileIdentity>, now: Instant) {
        let number = offer.number;
        if self.add(offer, file, now).is_ok()
            && let Some(offered) = self.by_number.get_mut(&number)
        {
            offered.proven = proven;
        }
    }

    /// Whether it is open.
    pub fn contains(&self, number: u64) -> bool {
        self.by_number.contains_key(&number)
    }

    /// Gives the payload out, once, to the peer that it was made for. An attempt that fails does not use it up:
    /// else whoever can guess a number could spoil another's offer.
    ///
    /// # Errors
    /// Why not. Another peer's offer is unknown: who asks learns nothing about it.
    pub fn claim(&mut self, peer: u32, number: u64, length: u64, tag: Tag) -> Result<Payload, Reason> {
        self.find(peer, number, length, tag)?;
        let Offered { offer, file, proven, .. } = self.remove(number).ok_or(Reason::UnknownOffer)?;
        Ok(Payload::proven(file, &offer, proven))
    }

    fn find(&self, peer: u32, number: u64, length: u64, tag: Tag) -> Result<&Offered, Reason> {
        let offered = self.by_number.get(&number).ok_or(Reason::UnknownOffer)?;
        if offered.offer.peer != peer {
            return Err(Reason::UnknownOffer);
        }
        if offered.offer.tag != tag {
            return Err(Reason::Tag);
        }
        if offered.offer.length != length {
            return Err(Reason::Length);
        }
        Ok(offered)
    }

    /// The file behind an offer, and where in it that begins, for the peer that it was made for.
    ///
    /// # Errors
    /// As [`Offers::claim`].
    pub fn file(&self, peer: u32, number: u64, length: u64, tag: Tag) -> Result<(&File, u64), Reason> {
        self.find(peer, number, length, tag).map(|offered| (&offered.file, offered.offer.offset))
    }

    /// The file behind an offer that is still open.
    pub fn file_of(&self, number: u64) -> Option<&File> {
        self.by_number.get(&number).map(|offered| &offered.file)
    }

    /// A peer is told the digest of an offer's file: whoever claims it gets the file in that state, or nothing.
    pub fn note_proven(&mut self, number: u64, identity: FileIdentity) -> bool {
        let offered = self.by_number.get_mut(&number);
        offered.map(|offered| offered.proven = Some(identity)).is_some()
    }

    fn remove(&mut self, number: u64) -> Option<Offered> {
        let offered = self.by_number.remove(&number)?;
        self.loads[offered.offer.peer as usize] -= Load::waiting(offered.offer.length);
        Some(offered)
    }

    /// Gives up what nobody claimed in time: its files.
    pub fn expire(&mut self, now: Instant) -> Vec<File> {
        let mut files = Vec::new();
        while let Some((end, number)) = self.ends.pop_front_if(|(end, _)| *end <= now) {
            if self.by_number.get(&number).is_some_and(|offered| offered.end == end) {
                files.extend(self.remove(number).map(|offered| offered.file));
            }
        }
        self.expired += files.len() as u64;
        files
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn offer(number: u64) -> Offer {
        let mut offer = Offer::new_zeroed();
        (offer.number, offer.length, offer.size, offer.tag, offer.peer) = (number, 5, 5, Tag([3; 16]), 2);
        offer
    }

    fn offers_with(number: u64) -> Offers {
        let mut offers = Offers::new(Duration::from_secs(10));
        offers.add(offer(number), tempfile::tempfile().unwrap(), Instant::now()).unwrap();
        offers
    }

    #[test]
    fn claimed_once() {
        let mut offers = offers_with(7);
        assert_eq!(offers.load(2), Load::waiting(5));
        assert_eq!(offers.claim(2, 7, 5, Tag([3; 16])).unwrap().remaining(), 5);
        assert_eq!(offers.load(2), Load::default());
        assert_eq!(offers.claim(2, 7, 5, Tag([3; 16])).unwrap_err(), Reason::UnknownOffer);
    }

    #[test]
    fn a_bad_claim_does_not_use_it_up() {
        let mut offers = offers_with(7);
        assert_eq!(offers.claim(1, 7, 5, Tag([3; 16])).unwrap_err(), Reason::UnknownOffer);
        assert_eq!(offers.claim(2, 7, 5, Tag([4; 16])).unwrap_err(), Reason::Tag);
        assert_eq!(offers.claim(2, 7, 6, Tag([3; 16])).unwrap_err(), Reason::Length);
        assert!(offers.claim(2, 7, 5, Tag([3; 16])).is_ok());
    }

    #[test]
    fn expires_and_is_counted() {
        let mut offers = offers_with(7);
        assert!(offers.expire(Instant::now()).is_empty() && offers.contains(7));
        assert_eq!(offers.expire(Instant::now() + Duration::from_secs(11)).len(), 1);
        assert_eq!((offers.len(), offers.expired()), (0, 1));
        assert_eq!(offers.load(2), Load::default());
    }

    #[test]
    fn one_that_is_put_back_lives_as_long_as_a_new_one() {
        let (mut offers, begun) = (offers_with(7), Instant::now());
        offers.claim(2, 7, 5, Tag([3; 16])).unwrap();
        offers.put_back(offer(7), tempfile::tempfile().unwrap(), None, begun + Duration::from_secs(8));
        assert!(offers.expire(begun + Duration::from_secs(12)).is_empty() && offers.contains(7));
        assert_eq!(offers.load(2), Load::waiting(5));
        assert_eq!(offers.expire(begun + Duration::from_secs(18)).len(), 1);
        assert_eq!((offers.len(), offers.expired(), offers.ends.len()), (0, 1, 0));
    }

    #[test]
    fn a_number_is_not_used_twice() {
        let mut offers = offers_with(7);
        let again = offers.add(offer(7), tempfile::tempfile().unwrap(), Instant::now());
        assert_eq!(again, Err(Reason::Malformed));
    }
}
