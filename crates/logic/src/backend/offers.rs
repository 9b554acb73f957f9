//! Offers: payloads that servers of this machine hold ready, until they are claimed or expire. An offer is a range of
//! an open file, made for one peer (a frontend's agent). With a *claim*, this peer asks that the payload be sent to a
//! client. With a *fetch*, it asks for the payload through both agents. An offer is *open* until it is claimed or
//! fetched, or expires. An offer's *tag* proves for which request it was made. The *digest* of a file is its SHA-256.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use shunt_wire::Tag;
use shunt_wire::local::{BOARD_PEERS, Offer, Reason};

use crate::limits::Load;
use crate::machine::Machine;

/// An offer with its file.
pub struct Offered<M: Machine> {
    /// The server's message OFFER.
    pub offer: Offer,
    /// The file.
    pub file: M::File,
    /// State of the file when a frontend was told its digest. The payload is sent only while the file is in this state.
    pub proven: Option<M::State>,
    /// Time at which the offer expires. An offer that was claimed and put back gets a new time.
    end: Instant,
}

/// All open offers.
pub struct Offers<M: Machine> {
    lifetime: Duration,
    by_number: HashMap<u64, Offered<M>>,
    /// Expiry times and numbers of offers, the earliest first. New ones are added at the end, because all offers have
    /// the same lifetime. The entry of a claimed offer stays until its expiry time.
    ends: VecDeque<(Instant, u64)>,
    loads: Vec<Load>,
}

impl<M: Machine> Offers<M> {
    /// Returns an empty table of offers.
    pub fn new(lifetime: Duration) -> Self {
        let loads = vec![Load::default(); BOARD_PEERS];
        Self { lifetime, by_number: HashMap::new(), ends: VecDeque::new(), loads }
    }

    /// Number of open offers.
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns whether no offer is open.
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// Returns the number of the open offers for one peer, and the sum of their lengths.
    pub fn load(&self, peer: usize) -> Load {
        self.loads[peer]
    }

    /// Returns whether an offer is open.
    pub fn contains(&self, number: u64) -> bool {
        self.by_number.contains_key(&number)
    }

    /// Adds an offer.
    ///
    /// # Errors
    /// Returns [`Reason::Malformed`] if an open offer has the same number.
    pub fn add(&mut self, offer: Offer, file: M::File, now: Instant) -> Result<(), Reason> {
        self.insert(offer, file, None, now)
    }

    /// Puts back a claimed offer of which the client has acknowledged no byte. The offer can be claimed or fetched once
    /// more.
    pub fn put_back(&mut self, offer: Offer, file: M::File, proven: Option<M::State>, now: Instant) {
        let _ = self.insert(offer, file, proven, now); // fails only if a newer offer has this number
    }

    fn insert(&mut self, offer: Offer, file: M::File, proven: Option<M::State>, now: Instant) -> Result<(), Reason> {
        if self.by_number.contains_key(&offer.number) {
            return Err(Reason::Malformed);
        }
        let end = now + self.lifetime;
        self.ends.push_back((end, offer.number));
        self.loads[offer.peer as usize] += Load::waiting(offer.length);
        self.by_number.insert(offer.number, Offered { offer, file, proven, end });
        Ok(())
    }

    /// Takes an open offer for the peer that it was made for. An offer can be taken only once. An attempt that fails
    /// does not use the offer up, because a peer that guesses numbers could otherwise spoil another peer's offers.
    ///
    /// # Errors
    /// Returns why the claim fails. An offer for another peer counts as unknown, so that the asking peer learns nothing
    /// about that offer.
    pub fn claim(&mut self, peer: usize, number: u64, length: u64, tag: Tag) -> Result<Offered<M>, Reason> {
        self.find(peer, number, length, tag)?;
        self.remove(number).ok_or(Reason::UnknownOffer)
    }

    /// Looks up an open offer, for the peer that it was made for.
    ///
    /// # Errors
    /// Returns the same errors as [`Offers::claim`].
    pub fn find(&self, peer: usize, number: u64, length: u64, tag: Tag) -> Result<&Offered<M>, Reason> {
        let offered = self.by_number.get(&number).ok_or(Reason::UnknownOffer)?;
        if offered.offer.peer as usize != peer {
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

    /// Returns the file of an open offer.
    pub fn file(&self, number: u64) -> Option<&M::File> {
        self.by_number.get(&number).map(|offered| &offered.file)
    }

    /// Notes that a frontend is told the digest of an offer's file in the state `state`. Returns whether the offer is
    /// open.
    pub fn note_proven(&mut self, number: u64, state: M::State) -> bool {
        let offered = self.by_number.get_mut(&number);
        offered.map(|offered| offered.proven = Some(state)).is_some()
    }

    fn remove(&mut self, number: u64) -> Option<Offered<M>> {
        let offered = self.by_number.remove(&number)?;
        self.loads[offered.offer.peer as usize] -= Load::waiting(offered.offer.length);
        Some(offered)
    }

    /// Removes the offers that nobody has claimed in time. Returns their files.
    pub fn expire(&mut self, now: Instant) -> Vec<M::File> {
        let mut files = Vec::new();
        while let Some((end, number)) = self.ends.pop_front_if(|(end, _)| *end <= now) {
            if self.by_number.get(&number).is_some_and(|offered| offered.end == end) {
                files.extend(self.remove(number).map(|offered| offered.file));
            }
        }
        files
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::model::Model;
    use zerocopy::FromZeros;

    fn offer(number: u64) -> Offer {
        let mut offer = Offer::new_zeroed();
        (offer.number, offer.length, offer.size, offer.tag, offer.peer) = (number, 5, 5, Tag([3; 16]), 2);
        offer
    }

    fn offers_with(number: u64) -> Offers<Model> {
        let mut offers = Offers::new(Duration::from_secs(10));
        offers.add(offer(number), 1, Instant::now()).unwrap();
        offers
    }

    fn claim(offers: &mut Offers<Model>, peer: usize, length: u64, tag: u8) -> Result<u64, Reason> {
        offers.claim(peer, 7, length, Tag([tag; 16])).map(|offered| offered.offer.length)
    }

    #[test]
    fn an_offer_is_claimed_once() {
        let mut offers = offers_with(7);
        assert_eq!(offers.load(2), Load::waiting(5));
        assert_eq!(claim(&mut offers, 2, 5, 3), Ok(5));
        assert_eq!(offers.load(2), Load::default());
        assert_eq!(claim(&mut offers, 2, 5, 3), Err(Reason::UnknownOffer));
    }

    #[test]
    fn a_bad_claim_does_not_use_it_up() {
        let mut offers = offers_with(7);
        assert_eq!(claim(&mut offers, 1, 5, 3), Err(Reason::UnknownOffer));
        assert_eq!(claim(&mut offers, 2, 5, 4), Err(Reason::Tag));
        assert_eq!([4, 6].map(|length| claim(&mut offers, 2, length, 3)), [Err(Reason::Length); 2]);
        assert_eq!(claim(&mut offers, 2, 5, 3), Ok(5));
    }

    #[test]
    fn it_expires() {
        let mut offers = offers_with(7);
        assert!(offers.expire(Instant::now()).is_empty() && offers.contains(7));
        assert_eq!(offers.expire(Instant::now() + Duration::from_secs(11)).len(), 1);
        assert_eq!((offers.len(), offers.load(2)), (0, Load::default()));
    }

    #[test]
    fn one_that_is_put_back_lives_as_long_as_a_new_one() {
        let (mut offers, begun) = (offers_with(7), Instant::now());
        let Offered { offer, file, .. } = offers.claim(2, 7, 5, Tag([3; 16])).unwrap();
        offers.put_back(offer, file, Some(9), begun + Duration::from_secs(8));
        assert!(offers.expire(begun + Duration::from_secs(12)).is_empty() && offers.contains(7));
        assert_eq!(offers.find(2, 7, 5, Tag([3; 16])).unwrap().proven, Some(9));
        assert_eq!(offers.load(2), Load::waiting(5));
        assert_eq!(offers.expire(begun + Duration::from_secs(18)).len(), 1);
        assert_eq!((offers.len(), offers.ends.len()), (0, 0));
    }

    #[test]
    fn a_number_is_not_used_twice() {
        assert_eq!(offers_with(7).add(offer(7), 1, Instant::now()), Err(Reason::Malformed));
    }
}
