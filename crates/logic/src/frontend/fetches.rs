//! Fetches: payloads that do not go straight to the client, but through both agents to the frontend's server. The
//! frontend's agent connects to the backend's agent, and passes the payload on to the server that asked for it. Each
//! fetch has a separate connection, so that a slow reader delays no other fetch. A *peer* is another machine's agent,
//! and a *session* the use of the lasting connection with it. An *offer* is a payload that a backend's server holds
//! ready.
//!
//! ```text
//!   server --FETCH--> agent ==FETCH==> backend's agent
//!          <-FETCHED-       <=FETCHED=
//!          <======== payload ========
//! ```

use std::time::{Duration, Instant};

use shunt_wire::TraceId;
use shunt_wire::local::{self, Reason};
use shunt_wire::peer::{self, Frame, Protocol};
use slab::Slab;

use crate::action::Action;
use crate::backend::served::allow_fetch;
use crate::machine::Machine;
use crate::turn::Turn;

/// Longest time from FETCH until the backend's first bytes have been passed on.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time without progress, because the backend sends nothing or the server takes nothing.
const PROGRESS: Duration = Duration::from_secs(60);

/// A fetch of a server of this machine.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    peer: usize,
    stage: Stage,
    length: u64,
    trace: TraceId,
    deadline: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// The server waits for FETCHED. `name` is the server's number of the fetch.
    Asked { server: usize, name: u64 },
    /// The server reads the payload.
    Answered,
}

/// Fetches that are under way.
#[derive(Debug, Default)]
pub struct Fetches(Slab<Fetch>);

impl Fetches {
    /// Number of fetches.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no fetch.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the fetches' peers, one for each fetch.
    pub fn peers(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|(_, fetch)| fetch.peer)
    }

    /// Begins a fetch that a server asks for. Returns the peer that the payload is fetched from, or `None` if the fetch
    /// is refused.
    pub fn ask<M: Machine>(&mut self, server: usize, asked: &local::Fetch, turn: &mut Turn<'_, M>) -> Option<usize> {
        turn.shared.counts.fetches_out += 1;
        let peer = asked.peer as usize;
        // The peer needs no session: offers outlive sessions, and each fetch has a separate connection.
        let known = if turn.shared.board.knows(peer) { Ok(()) } else { Err(Reason::PeerLost) };
        if let Err(reason) = known.and_then(|()| allow_fetch(turn)) {
            turn.log_failed_fetch(reason, asked.trace);
            turn.end(server, asked.fetch, reason);
            return None;
        }
        let (length, trace) = (asked.length, asked.trace);
        let stage = Stage::Asked { server, name: asked.fetch };
        let fetch = self.0.insert(Fetch { peer, stage, length, trace, deadline: turn.now + PATIENCE });
        let request = peer::Fetch {
            protocol: Protocol::OURS,
            offer: asked.offer.into(),
            length: length.into(),
            tag: asked.tag,
            trace,
        };
        turn.act(Action::BeginFetch { fetch, peer, request });
        Some(peer)
    }

    /// Handles a backend's frame on a fetch's connection. The first frame has to be FETCHED or REFUSED, and any further
    /// one fails the fetch.
    pub fn answered<M: Machine>(&mut self, fetch: usize, frame: &Frame, turn: &mut Turn<'_, M>) {
        let Some(found) = self.0.get_mut(fetch) else { return };
        let Stage::Asked { server, name } = found.stage else {
            return self.fail(fetch, Reason::Malformed, turn);
        };
        let reason = match frame {
            Frame::Fetched(fetched) if fetched.length.get() == found.length => {
                found.stage = Stage::Answered;
                let message = local::Fetched { header: local::Fetched::HEADER, fetch: name, length: found.length };
                return turn.act(Action::DeliverFetch { fetch, server, message });
            }
            Frame::Refused(refused) => Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed),
            _ => Reason::Malformed,
        };
        self.fail(fetch, reason, turn);
    }

    /// Fails a fetch whose server could not be given its end of the socket pair. The server still waits for FETCHED, so
    /// it is told.
    pub fn undelivered<M: Machine>(
        &mut self,
        fetch: usize,
        server: usize,
        name: u64,
        reason: Reason,
        turn: &mut Turn<'_, M>,
    ) {
        if let Some(found) = self.0.get_mut(fetch) {
            found.stage = Stage::Asked { server, name };
        }
        self.fail(fetch, reason, turn);
    }

    /// Notes that bytes of a fetch have been passed on to the server. `is_done` says that these were the last ones.
    pub fn moved(&mut self, fetch: usize, is_done: bool, now: Instant) {
        if is_done {
            self.0.try_remove(fetch);
        } else if let Some(found) = self.0.get_mut(fetch) {
            found.deadline = now + PROGRESS;
        }
    }

    /// Fails a fetch. A server that already reads sees the stream end before the announced length, so it does not take
    /// the part for the whole.
    pub fn fail<M: Machine>(&mut self, fetch: usize, reason: Reason, turn: &mut Turn<'_, M>) {
        let Some(found) = self.0.try_remove(fetch) else { return };
        turn.log_failed_fetch(reason, found.trace);
        turn.act(Action::DropFetch(fetch));
        match found.stage {
            Stage::Asked { server, name } => turn.end(server, name, reason),
            Stage::Answered => turn.shared.counts.end(reason),
        }
    }

    /// Drops the fetches for which a server waits for FETCHED, because the server is gone.
    pub fn forget_server<M: Machine>(&mut self, gone: usize, turn: &mut Turn<'_, M>) {
        let is_its = |fetch: &Fetch| matches!(fetch.stage, Stage::Asked { server, .. } if server == gone);
        while let Some((fetch, _)) = self.0.iter().find(|(_, fetch)| is_its(fetch)) {
            self.0.remove(fetch);
            turn.act(Action::DropFetch(fetch));
        }
    }

    /// Fails the fetches whose deadlines have passed: they have had no answer or no progress for too long.
    pub fn tend<M: Machine>(&mut self, turn: &mut Turn<'_, M>) {
        let now = turn.now;
        while let Some((fetch, _)) = self.0.iter().find(|(_, fetch)| fetch.deadline <= now) {
            self.fail(fetch, Reason::NoProgress, turn);
        }
    }
}
