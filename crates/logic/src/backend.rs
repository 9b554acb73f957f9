//! This machine as a backend: it sends payloads to the clients of its peers. A *peer* is another machine's agent. A
//! *claim* (CLAIM) is a frontend's message that asks for a payload. An *offer* is a payload, a range of a file, that a
//! server of this machine holds ready for a claim. A *sender* is this machine's kernel socket for a client. The *store*
//! has the payloads of this machine's programs under `shunt run`. A *fetch* brings a payload through both agents to the
//! frontend's server. The *digest* of a file is its SHA-256. A *turn* is one pass of the daemon's event loop.
//!
//! ```text
//!   server --OFFER--> offers --+
//!                              |  CLAIM of a peer
//!   bytes of the store --------+------------------> a sender, or a place in `waiting`, or ENDED
//! ```

pub mod offers;
pub mod questions;
pub mod served;
pub mod waiting;

use std::net::{IpAddr, SocketAddr};

use shunt_wire::local::{self, Reason};
use shunt_wire::parts::Parts;
use shunt_wire::peer::{self, Claim, Claimant};

use crate::action::{Action, Given};
use crate::limits::Gates;
use crate::machine::Machine;
use crate::settings::BackendSettings;
use crate::turn::Turn;
use offers::{Offered, Offers};
use questions::Questions;
use served::Served;
use waiting::{Waiting, Waits};

/// Payload that the daemon is to send for a claim, and the sender's address.
pub struct Start<M: Machine> {
    /// Address and port of the sender.
    pub local: SocketAddr,
    /// The offer, which is used up now. `None` if the claim asks for ranges of the store.
    pub offered: Option<Offered<M>>,
}

/// State of a backend. A machine that is no backend has it, too, and refuses all claims.
pub struct Backend<M: Machine> {
    settings: Option<BackendSettings>,
    has_store: bool,
    /// Offers that are neither claimed nor expired.
    pub offers: Offers<M>,
    /// Claims of stored bytes that wait because no sender is free, or because the client's sender is busy.
    pub waiting: Waiting,
    /// Questions of peers that wait for a file's digest.
    pub questions: Questions<M>,
    /// Fetches that peers have asked for.
    pub served: Served,
    /// Handoffs that frontends have given up and that are still to be aborted here: before the next claim, or at the
    /// end of the turn.
    given_up: Given,
    /// Claims whose frontends have said, in this turn, that their servers have forgotten the digest of the claim's
    /// file.
    withdrawn: Given,
}

impl<M: Machine> Backend<M> {
    /// Returns the state of a machine that has no offers and no claims yet.
    pub fn new(settings: Option<BackendSettings>, has_store: bool) -> Self {
        let lifetime = settings.map_or(std::time::Duration::from_secs(30), |backend| backend.offer_lifetime);
        Self {
            settings,
            has_store,
            offers: Offers::new(lifetime),
            waiting: Waiting::default(),
            questions: Questions::default(),
            served: Served::default(),
            given_up: Given::new(),
            withdrawn: Given::new(),
        }
    }

    /// Handles a peer's claim of an offer, or of `parts` of this machine's store. Returns the payload for the daemon to
    /// send, or `None` if the claim is refused or has to wait.
    pub fn claim(
        &mut self,
        peer: usize,
        claim: &Claim,
        parts: Option<&Parts>,
        gates: &mut Gates,
        turn: &mut Turn<'_, M>,
    ) -> Option<Start<M>> {
        turn.shared.counts.claims += 1;
        self.abort_given_up(turn);
        let claimant = Claimant::of(peer as u32, claim);
        match self.place(claim, parts, &claimant, turn) {
            Ok(start) => Some(start),
            Err(reason) => {
                self.refuse(claim, parts, claimant, reason, gates, turn);
                None
            }
        }
    }

    /// Refuses a claim for `reason`. A claim of stored bytes waits instead if a sender may become free later, and there
    /// is room among the waiting claims. To be called only if no byte of the claim's payload was sent.
    pub fn refuse(
        &mut self,
        claim: &Claim,
        parts: Option<&Parts>,
        claimant: Claimant,
        reason: Reason,
        gates: &mut Gates,
        turn: &mut Turn<'_, M>,
    ) {
        if reason == Reason::Limit {
            gates.say_senders(self.settings.map_or(0, |backend| backend.senders), turn.now);
        }
        let waits = parts.is_some_and(|parts| self.waiting.add(claim, parts, claimant, reason, turn.now));
        if waits {
            turn.shared.counts.claims_waited += 1;
            answer(claimant.peer as usize, claimant.worker, claimant.handoff, reason as u32, turn);
        } else {
            turn.fail_claim(&claimant, reason);
        }
    }

    /// Finds a sender for a claim, or room for another sender. Then takes the claimed offer.
    fn place(
        &mut self,
        claim: &Claim,
        parts: Option<&Parts>,
        claimant: &Claimant,
        turn: &mut Turn<'_, M>,
    ) -> Result<Start<M>, Reason> {
        turn.shared.keys_passed |= claim.suite.get() != 0;
        let peer = claimant.peer as usize;
        let (server, client) = (claim.flow.server().socket_addr(), claim.flow.client_address.ip());
        match parts {
            None => self.may_speak_for(peer, server, client, turn)?,
            Some(_) => self.would_send(peer, server, client, turn)?,
        }
        let port = turn.shared.settings.peers[peer].port;
        let local = turn.shared.peers.peer(peer).senders.towards(claim.flow.client_address).ok_or(Reason::Malformed)?;
        let local = SocketAddr::new(local, port);
        // The offer is taken only after this call, so that it can still be fetched if there is no place for its
        // payload.
        turn.machine.find_place(peer, claim, local)?;
        let offered = match parts {
            None => Some(self.offers.claim(peer, claim.offer.get(), claim.length.get(), claim.tag)?),
            Some(_) => None,
        };
        Ok(Start { local, offered })
    }

    /// Examines the next waiting claim. Returns the claim and the payload to send, if there is a place for it now.
    /// Otherwise returns `Some(None)`: the claim goes on waiting, or fails, for example after too long a wait. Returns
    /// `None` when all claims of the round have been examined ([`Waiting::begin_round`]).
    pub fn next_waiting(&mut self, turn: &mut Turn<'_, M>) -> Option<Option<(Box<Waits>, Start<M>)>> {
        let waits = self.waiting.next_of_round()?;
        let Waits { claim, parts, claimant, until, .. } = &*waits;
        Some(match self.place(claim, Some(parts), claimant, turn) {
            Ok(start) => Some((waits, start)),
            Err(reason @ (Reason::Limit | Reason::Busy)) if turn.now < *until => {
                self.waiting.keep(waits, reason);
                None
            }
            Err(reason) => {
                turn.fail_claim(claimant, reason);
                None
            }
        })
    }

    /// Checks whether this machine may send packets to a peer's client with a server's address as their source.
    ///
    /// # Errors
    /// Returns [`Reason::UnknownOffer`] if this machine is no backend. Returns [`Reason::NotAllowed`] if the peer may
    /// not speak for the server, or `client` cannot be another machine's address.
    pub fn may_speak_for(
        &self,
        peer: usize,
        server: SocketAddr,
        client: IpAddr,
        turn: &mut Turn<'_, M>,
    ) -> Result<(), Reason> {
        if self.settings.is_none() {
            return Err(Reason::UnknownOffer);
        }
        if turn.shared.settings.peers[peer].may_have_sent(server, client) {
            return Ok(());
        }
        if turn.shared.failures.allows(turn.now) {
            let peer = &turn.shared.settings.peers[peer].name;
            tracing::warn!(
                peer, %server, %client,
                "refused a claim: the peer may not speak for this server address; add the address to its `speaks_for`"
            );
        }
        Err(Reason::NotAllowed)
    }

    /// Checks whether this machine may send bytes of its store to a peer's client, in packets with a server's address
    /// as their source.
    ///
    /// # Errors
    /// Returns the errors of [`Backend::may_speak_for`], [`Reason::UnknownOffer`] if there is no store, and
    /// [`Reason::NotAllowed`] if the peer may not read the store.
    pub fn would_send(
        &self,
        peer: usize,
        server: SocketAddr,
        client: IpAddr,
        turn: &mut Turn<'_, M>,
    ) -> Result<(), Reason> {
        self.may_speak_for(peer, server, client, turn)?;
        if !self.has_store {
            return Err(Reason::UnknownOffer);
        }
        if turn.shared.settings.peers[peer].may_read_store { Ok(()) } else { Err(Reason::NotAllowed) }
    }

    /// Answers a peer's question (ASK) whether this machine would send bytes of its store to a client.
    pub fn asked(&mut self, peer: usize, ask: &peer::Ask, turn: &mut Turn<'_, M>) {
        let client = ask.client_address.ip();
        let would = self.would_send(peer, ask.server().socket_addr(), client, turn);
        let would = would.and_then(|()| self.has_place(peer, turn)).and_then(|()| {
            let local = turn.shared.peers.peer(peer).senders.towards(ask.client_address).ok_or(Reason::Unreachable)?;
            turn.machine.reaches(peer, local, client)
        });
        let reason = would.err().map_or(local::Answer::YES, |reason| reason as u32);
        answer(peer, ask.worker.get(), ask.handoff.get(), reason, turn);
    }

    /// Returns [`Reason::Limit`] if another claim of stored bytes may have to wait, or if this agent is draining.
    fn has_place(&self, peer: usize, turn: &Turn<'_, M>) -> Result<(), Reason> {
        if self.waiting.delays(peer as u32) || turn.shared.is_draining { Err(Reason::Limit) } else { Ok(()) }
    }

    /// Notes that a frontend has given a handoff up.
    pub fn give_up(&mut self, peer: usize, abort: &peer::Abort, turn: &mut Turn<'_, M>) {
        turn.shared.counts.aborts += 1;
        self.given_up.insert((peer as u32, abort.worker.get(), abort.handoff.get()));
    }

    /// Notes that a frontend's server has forgotten a digest that it was told.
    pub fn withdraw(&mut self, peer: usize, withdrawn: &peer::Withdrawn) {
        self.withdrawn.insert((peer as u32, withdrawn.worker.get(), withdrawn.handoff.get()));
    }

    /// Ends the handoffs that frontends have given up: at the end of a turn, and before the next claim. They are
    /// collected, because many may be given up at the same time, and aborting each alone would cost a scan of all
    /// senders.
    pub fn abort_given_up(&mut self, turn: &mut Turn<'_, M>) {
        if self.given_up.is_empty() {
            return;
        }
        let given_up = std::mem::take(&mut self.given_up);
        self.waiting.forget(|of| given_up.contains(&(of.peer, of.worker, of.handoff)));
        turn.act(Action::Abort(given_up));
    }

    /// Carries out the aborts that this turn has collected. Also lets senders go on, if the frontend's server has
    /// forgotten the withdrawn digest.
    pub fn end_turn(&mut self, turn: &mut Turn<'_, M>) {
        self.abort_given_up(turn);
        if !self.withdrawn.is_empty() {
            turn.act(Action::GoOn(std::mem::take(&mut self.withdrawn)));
        }
    }

    /// Forgets a peer's claims, because the session with it is lost.
    pub fn lose_peer(&mut self, peer: usize, turn: &mut Turn<'_, M>) {
        self.waiting.forget(|of| of.peer == peer as u32);
        turn.act(Action::ForgetPeer(peer as u32));
    }

    /// Fails all waiting claims, because the agent ends. Their frontends are told.
    pub fn give_up_waiting(&mut self, turn: &mut Turn<'_, M>) {
        while let Some(claimant) = self.waiting.pop() {
            turn.fail_claim(&claimant, Reason::PeerLost);
        }
    }
}

/// Sends ANSWER to a peer: whether this machine would send bytes of its store, or why a claim of such bytes waits.
fn answer<M: Machine>(peer: usize, worker: u32, handoff: u64, reason: u32, turn: &mut Turn<'_, M>) {
    let answer = peer::Answer { worker: worker.into(), reason: reason.into(), handoff: handoff.into() };
    turn.tell_peer(peer, |out| answer.emit(out));
}
