//! Connections between programs and other machines' stores. The two machines' agents make such a connection, and prove
//! their identities to each other by certificates. Then each agent gives its end of the connection away, with the keys:
//! one agent to the program, the other to its machine's store. A *store* has the payloads of a machine's programs under
//! `shunt run`, and a *reference* names bytes of one payload.
//!
//! A program with such a connection can ask the store for bytes to which it has references, and for nothing else.

use std::time::{Duration, Instant};

use shunt_wire::local::Reason;
use shunt_wire::peer::Frame;
use shunt_wire::sources::Source;
use slab::Slab;

/// Time that the other machine's agent may take. In a separate thread, the library in the program waits twice as long
/// for this agent (`shunt_odb::store::client::SILENCE`).
const PATIENCE: Duration = Duration::from_secs(5);
/// Most connections that are being made at a time.
const MOST: usize = 256;

/// A connection that is being made.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Number by which this machine's store knows the program.
    pub program: u64,
    /// The store to connect to.
    pub store: Source,
    /// The peer that has the store.
    pub peer: usize,
    deadline: Instant,
}

/// Connections that are being made.
#[derive(Debug, Default)]
pub struct Reaching(Slab<Reach>);

impl Reaching {
    /// Number of connections.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no connection is being made.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a connection that is being made. Returns `None` if there are too many.
    pub fn add(&mut self, program: u64, store: Source, peer: usize, now: Instant) -> Option<usize> {
        let has_place = self.0.len() < MOST;
        has_place.then(|| self.0.insert(Reach { program, store, peer, deadline: now + PATIENCE }))
    }

    /// Removes a connection that has been made or has failed.
    pub fn remove(&mut self, reach: usize) -> Option<Reach> {
        self.0.try_remove(reach)
    }

    /// Returns the number of one connection that has taken too long. The connection stays until it is removed.
    pub fn late(&self, now: Instant) -> Option<usize> {
        self.0.iter().find(|(_, reach)| reach.deadline <= now).map(|(index, _)| index)
    }
}

/// Reads the other agent's answer.
///
/// # Errors
/// Returns the other agent's reason for its refusal, or [`Reason::Malformed`] if the frame is no answer.
pub fn answer(frame: &Frame) -> Result<(), Reason> {
    match frame {
        Frame::Stored(_) => Ok(()),
        Frame::Refused(refused) => Err(Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed)),
        _ => Err(Reason::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_wire::peer::{Ping, Refused, Stored};

    #[test]
    fn the_number_and_time_of_open_connections_are_limited() {
        let (mut reaching, now) = (Reaching::default(), Instant::now());
        let mut added: Vec<usize> =
            (0..2 * MOST as u64).filter_map(|program| reaching.add(program, [0; 16], 0, now)).collect();
        assert_eq!(added.len(), MOST);
        assert_eq!(reaching.remove(added.remove(7)).map(|reach| reach.program), Some(7));
        assert!(reaching.add(1000, [0; 16], 0, now + PATIENCE).is_some());
        let mut late = 0;
        while let Some(reach) = reaching.late(now + PATIENCE) {
            reaching.remove(reach);
            late += 1;
        }
        assert_eq!((late, reaching.len()), (MOST - 1, 1));
    }

    #[test]
    fn an_answer_is_yes_or_a_reason() {
        assert_eq!(answer(&Frame::Stored(Stored {})), Ok(()));
        assert_eq!(answer(&Frame::Refused(Refused { reason: (Reason::Limit as u32).into() })), Err(Reason::Limit));
        assert_eq!(answer(&Frame::Refused(Refused { reason: 999.into() })), Err(Reason::Malformed));
        assert_eq!(answer(&Frame::Ping(Ping {})), Err(Reason::Malformed));
    }
}
