//! Fetches that peers ask for: this machine sends the payload of an offer, encrypted, on the connection on which the
//! peer asked for it. Such a transfer is a *fetch*. A *peer* is another machine's agent, and an *offer* a payload that
//! a server of this machine holds ready.

use std::time::{Duration, Instant};

use shunt_wire::TraceId;
use shunt_wire::local::Reason;
use shunt_wire::peer::Fetch;
use slab::Slab;

use super::Backend;
use super::offers::Offered;
use crate::action::Action;
use crate::machine::Machine;
use crate::turn::Turn;

/// Time in which a peer must take the first bytes of a fetch.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time without progress after the first bytes, because the peer takes no bytes or the disk gives none.
const PROGRESS: Duration = Duration::from_secs(60);

/// One fetch that is under way.
#[derive(Clone, Copy, Debug)]
struct Serving {
    peer: usize,
    trace: TraceId,
    deadline: Instant,
}

/// Fetches of peers that are under way.
#[derive(Debug, Default)]
pub struct Served(Slab<Serving>);

impl Served {
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
        self.0.iter().map(|(_, serving)| serving.peer)
    }
}

impl<M: Machine> Backend<M> {
    /// Begins a fetch on a connection whose certificate belongs to `peer`, or with `None` to no peer. Returns the
    /// fetch's number.
    ///
    /// # Errors
    /// Returns why the fetch is refused. The daemon sends the reason on the connection, and closes it.
    pub fn serve(&mut self, peer: Option<usize>, fetch: &Fetch, turn: &mut Turn<'_, M>) -> Result<usize, Reason> {
        turn.shared.counts.fetches_in += 1;
        match self.claim_for_fetch(peer, fetch, turn) {
            Ok((peer, offered)) => {
                let Offered { offer, file, proven, .. } = offered;
                let serving = Serving { peer, trace: fetch.trace, deadline: turn.now + PATIENCE };
                let fetch = self.served.0.insert(serving);
                turn.act(Action::ServeFetch { fetch, offer, file, proven });
                Ok(fetch)
            }
            Err(reason) => {
                turn.log_failed_fetch(reason, fetch.trace);
                turn.shared.counts.end(reason);
                Err(reason)
            }
        }
    }

    fn claim_for_fetch(
        &mut self,
        peer: Option<usize>,
        fetch: &Fetch,
        turn: &mut Turn<'_, M>,
    ) -> Result<(usize, Offered<M>), Reason> {
        let peer = peer.ok_or(Reason::UnknownOffer)?;
        allow_fetch(turn)?;
        let offered = self.offers.claim(peer, fetch.offer.get(), fetch.length.get(), fetch.tag)?;
        let is_unchanged = turn.machine.is_unchanged(&offered.file, &offered.offer, offered.proven);
        if is_unchanged {
            return Ok((peer, offered));
        }
        turn.act(Action::CloseFiles(vec![offered.file]));
        Err(Reason::FileChanged)
    }

    /// Notes that the peer has taken bytes of a fetch. `is_done` says that these were the last ones.
    pub fn served_more(&mut self, fetch: usize, is_done: bool, now: Instant) {
        if is_done {
            self.served.0.try_remove(fetch);
        } else if let Some(serving) = self.served.0.get_mut(fetch) {
            serving.deadline = now + PROGRESS;
        }
    }

    /// Fails a fetch. The fetch's connection is reset, not closed, so that the reader does not take a part for the
    /// whole.
    pub fn fail_served(&mut self, fetch: usize, reason: Reason, turn: &mut Turn<'_, M>) {
        if let Some(serving) = self.served.0.try_remove(fetch) {
            turn.log_failed_fetch(reason, serving.trace);
            turn.shared.counts.end(reason);
            turn.act(Action::ResetFetch(fetch));
        }
    }

    /// Fails fetches that make no progress.
    pub fn tend_served(&mut self, turn: &mut Turn<'_, M>) {
        let now = turn.now;
        while let Some((fetch, _)) = self.served.0.iter().find(|(_, serving)| serving.deadline <= now) {
            self.fail_served(fetch, Reason::NoProgress, turn);
        }
    }
}

/// Checks whether another fetch may begin. A response waits for each fetch, so fetches are refused only if descriptors
/// are short. The limits of fetches (limits.rs) stop new handoffs and offers, but no fetch.
///
/// # Errors
/// Returns [`Reason::Limit`] if there is no descriptor for the fetch.
pub fn allow_fetch<M: Machine>(turn: &mut Turn<'_, M>) -> Result<(), Reason> {
    let has = turn.machine.has_descriptors();
    turn.shared.counts.fetches_limited += u64::from(!has);
    if has { Ok(()) } else { Err(Reason::Limit) }
}
