//! Connections that other agents make, until each has shown its certificate and sent its first frame, which says the
//! connection's purpose.
//!
//! Anybody who reaches the port can begin a handshake, which costs the agent's one thread about a fifth of a
//! millisecond. So a connection has little time, and there are few places. Strangers are connections from addresses
//! that the configuration names for no peer. They share a part of the places, and a number of handshakes per second.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::rate::{OncePerSecond, PerSecond};

/// Time that a new connection has to say its purpose.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of places, one for each connection.
const PLACES: usize = 256;
/// Most places for strangers: for all of them, and for those at one address.
const STRANGERS: usize = 64;
const STRANGERS_AT_ONE_ADDRESS: usize = 8;
/// Most handshakes per second with strangers.
const STRANGERS_A_SECOND: u32 = 50;
/// Number of refusals that are remembered, and time for which each of them is remembered. A remembered refusal is not
/// logged again.
const REFUSALS: usize = 64;
const REFUSED_AGAIN: Duration = Duration::from_secs(3600);

/// An accepted connection before its first frame.
#[derive(Clone, Copy, Debug)]
struct Place {
    from: IpAddr,
    /// The configuration names the address `from` for no peer.
    is_stranger: bool,
    deadline: Instant,
}

/// All accepted connections before their first frames.
#[derive(Debug, Default)]
pub struct Incoming {
    places: Slab<Place>,
    handshakes: PerSecond<STRANGERS_A_SECOND>,
    refusals: OncePerSecond,
    refused: Refused,
}

/// Refusals that have been logged, by address and reason.
#[derive(Debug, Default)]
struct Refused(VecDeque<(IpAddr, String, Instant)>);

impl Refused {
    fn is_news(&mut self, from: IpAddr, why: &str, now: Instant) -> bool {
        self.0.retain(|(_, _, at)| now.duration_since(*at) < REFUSED_AGAIN);
        !self.0.iter().any(|(whom, said, _)| *whom == from && said == why)
    }

    fn note(&mut self, from: IpAddr, why: &str, now: Instant) {
        self.0.truncate(REFUSALS - 1);
        self.0.push_front((from, why.to_owned(), now));
    }
}

impl Incoming {
    /// Number of connections.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Gives a new connection a place. Returns the place's number, or `None` if there is no place.
    pub fn add(&mut self, from: IpAddr, is_stranger: bool, now: Instant) -> Option<usize> {
        let has_place = self.places.len() < PLACES && (!is_stranger || self.has_place_for_stranger(from, now));
        has_place.then(|| self.places.insert(Place { from, is_stranger, deadline: now + PATIENCE }))
    }

    fn has_place_for_stranger(&mut self, from: IpAddr, now: Instant) -> bool {
        let strangers = self.places.iter().filter(|(_, place)| place.is_stranger);
        let (all, here) =
            strangers.fold((0, 0), |(all, here), (_, place)| (all + 1, here + usize::from(place.from == from)));
        all < STRANGERS && here < STRANGERS_AT_ONE_ADDRESS && self.handshakes.allows(now)
    }

    /// Removes a connection that has said its purpose or has ended.
    pub fn remove(&mut self, place: usize) {
        self.places.try_remove(place);
    }

    /// Removes one connection that has not said its purpose in time. Returns its place.
    pub fn remove_silent(&mut self, now: Instant) -> Option<usize> {
        let (place, _) = self.places.iter().find(|(_, place)| place.deadline <= now)?;
        self.places.remove(place);
        Some(place)
    }

    /// Logs a refusal, unless the same one is remembered, or another one was logged less than a second ago. A refusal
    /// that is not logged because of another one is logged when it comes again. Returns whether it was logged.
    pub fn log_refusal(&mut self, from: IpAddr, why: &str, now: Instant) -> bool {
        let may = self.refused.is_news(from, why, now) && self.refusals.allows(now);
        if may {
            self.refused.note(from, why, now);
            tracing::warn!(%from, why, "refused a connection to the agents' port");
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn strangers_are_slowed_down_and_peers_are_not() {
        let (mut incoming, now) = (Incoming::default(), Instant::now());
        let mut taken = 0;
        for _ in 0..1000 {
            if let Some(place) = incoming.add(from(1), true, now) {
                incoming.remove(place);
                taken += 1;
            }
        }
        assert_eq!(taken, STRANGERS_A_SECOND);
        assert!(incoming.add(from(1), false, now).is_some());
        assert!(incoming.add(from(1), true, now + Duration::from_secs(1)).is_some());
    }

    #[test]
    fn strangers_leave_places_to_others() {
        let (mut incoming, now) = (Incoming::default(), Instant::now());
        let mut later = now;
        let mut add = |last, is_stranger| {
            later += Duration::from_millis(30); // fewer than STRANGERS_A_SECOND
            incoming.add(from(last), is_stranger, later).is_some()
        };
        assert_eq!((0..100).filter(|_| add(1, true)).count(), STRANGERS_AT_ONE_ADDRESS);
        assert_eq!((2..=255).filter(|last| add(*last, true)).count(), STRANGERS - STRANGERS_AT_ONE_ADDRESS);
        assert_eq!((0..1000).filter(|_| add(1, false)).count(), PLACES - STRANGERS);
        assert_eq!(incoming.remove_silent(now), None);
        let mut gone = 0;
        while incoming.remove_silent(now + Duration::from_secs(60)).is_some() {
            gone += 1;
        }
        assert_eq!((gone, incoming.len()), (PLACES, 0));
    }

    #[test]
    fn the_log_has_a_repeated_refusal_once() {
        let (mut incoming, mut now) = (Incoming::default(), Instant::now());
        // Each refusal comes a second after the one before, so that the rate delays none.
        let mut is_told = |last, why| {
            now += Duration::from_secs(1);
            incoming.log_refusal(from(last), why, now)
        };
        assert!(is_told(1, "no") && !is_told(1, "no"));
        assert!(is_told(1, "another reason") && is_told(2, "no"));
        assert!((0..=255).filter(|last| is_told(*last, "no")).count() > 200);
        now += REFUSED_AGAIN;
        assert!(incoming.refused.0.len() == REFUSALS && incoming.log_refusal(from(255), "no", now));
    }

    #[test]
    fn a_refusal_that_is_kept_back_is_told_later() {
        let (mut incoming, now) = (Incoming::default(), Instant::now());
        assert!(incoming.log_refusal(from(1), "no", now) && !incoming.log_refusal(from(2), "no", now));
        let later = now + Duration::from_secs(1);
        assert!(incoming.log_refusal(from(2), "no", later) && !incoming.log_refusal(from(1), "no", later));
    }
}
