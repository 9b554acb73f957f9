//! One agent: its state machines, and the dispatch of events to them. A *peer* is another machine's agent, and a
//! *session* the use of the connection with it. A *server* is a program of this machine that is connected to the agent.
//! A *handoff* lets a backend send a payload on the connection of a frontend's client. A *fetch* brings a payload
//! through both agents to the frontend's server instead. A *claim* is a frontend's message that asks this machine for
//! an offer, or for bytes of the store. An *offer* is a payload that a server holds ready, and the *store* has the
//! payloads of programs under `shunt run`. A *waiting* claim is one for which no sender (kernel socket for the client)
//! is free. The *digest* of a file is its SHA-256. A *source* is a store that a machine's programs can fetch from. A
//! *turn* is one pass of the daemon's event loop.

mod connections;
mod fetches;
mod limits;
mod reload;
mod sessions;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use shunt_wire::local::{Reason, Request};
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Claim, Claimant, Delivered, Frame, Spacing};
use shunt_wire::sources::{Source, Sources};

use crate::action::{Action, Actions};
use crate::backend::waiting::Waits;
use crate::backend::{Backend, Start};
use crate::board::{Board, Role as BoardRole};
use crate::counts::Counts;
use crate::frontend::{Canceller, Frontend};
use crate::limits::Gates;
use crate::machine::{Machine, Sha256};
use crate::peers::Peers;
use crate::peers::incoming::Incoming;
use crate::rate::{OncePerSecond, PerSecond};
use crate::servers::{Role, Servers};
use crate::settings::Settings;
use crate::store::ends::{Change, Ends, Key};
use crate::store::reaching::Reaching;
use crate::store::sources::SourcesOfPeers;
use crate::turn::{Shared, Turn};

pub use limits::Usage;
pub use sessions::Refused;

/// Arguments that the daemon passes with each event.
pub struct Call<'a, M: Machine> {
    /// The time.
    pub now: Instant,
    /// The machine, which answers the logic's questions.
    pub machine: &'a mut M,
    /// Queue to which the logic appends actions.
    pub actions: &'a mut Actions<M>,
}

/// State for programs under `shunt run`: addresses and stores of this machine and its peers, and connections to stores.
pub struct Store {
    /// Known addresses of programs, and the machine that each address belongs to.
    pub ends: Ends,
    /// For each machine, the stores that its programs can fetch from.
    pub sources: SourcesOfPeers,
    /// Connections that are being made to other machines' stores.
    pub reaching: Reaching,
    /// Number of connections to other machines' stores that could not be made.
    pub unreached: u64,
}

impl Store {
    /// Returns the state of an agent without sessions. `own_key` proves TCP handshakes between programs of this
    /// machine. `configured` has the addresses by which peers know these programs. If it is empty, peers know them by
    /// the addresses of this machine's interfaces. `store` and `stores` are the names of this machine's store and of
    /// its peers' stores.
    pub fn new(own_key: Key, configured: &[IpAddr], store: Source, stores: Vec<Source>) -> Self {
        let (ends, sources) = (Ends::new(own_key, configured), SourcesOfPeers::new(store, stores));
        Self { ends, sources, reaching: Reaching::default(), unreached: 0 }
    }
}

/// One agent.
pub struct Logic<M: Machine> {
    /// Parts that several state machines use.
    pub shared: Shared,
    /// This machine as a frontend.
    pub frontend: Frontend,
    /// This machine as a backend.
    pub backend: Backend<M>,
    /// Connections that other agents have made, until the first frame arrives. This frame says the connection's
    /// purpose.
    pub incoming: Incoming,
    /// State of each limit.
    pub gates: Gates,
    /// State for programs under `shunt run`. `None` if no programs run under it on this machine.
    pub store: Option<Store>,
}

impl<M: Machine> Logic<M> {
    /// Returns an agent without sessions. `netns` is the cookie of the agent's network namespace, or 0 if the cookie is
    /// not known.
    pub fn new(settings: Settings, netns: u64, store: Option<Store>, now: Instant) -> Self {
        let names: Vec<&str> = settings.peers.iter().map(|peer| peer.name.as_str()).collect();
        let lifetime = settings.backend.map_or(30_000, |backend| backend.offer_lifetime.as_millis() as u32);
        let role = BoardRole {
            name: &settings.name,
            is_frontend: settings.is_frontend,
            is_backend: settings.backend.is_some(),
            offer_lifetime_ms: lifetime,
            netns,
        };
        let board = Board::new(&role, &names);
        let peers = settings.peers.len();
        Self {
            frontend: Frontend::new(peers),
            backend: Backend::new(settings.backend, settings.has_store),
            incoming: Incoming::default(),
            gates: Gates::new(peers),
            store,
            shared: Shared {
                peers: Peers::new(&settings, now),
                servers: Servers::new(settings.limits.servers, settings.is_frontend),
                board,
                counts: Counts::default(),
                failures: PerSecond::default(),
                refusals: OncePerSecond::default(),
                keys_passed: false,
                is_draining: false,
                settings,
            },
        }
    }

    /// Handles a frame that a peer sends in a session. Claims are handled by [`Logic::claim`] instead, and HELLO by
    /// [`Logic::hello`].
    ///
    /// # Errors
    /// Returns the peer's fault. The daemon then ends the session.
    pub fn frame(&mut self, peer: usize, frame: &Frame, call: &mut Call<'_, M>) -> Result<(), Reason> {
        self.shared.peers.note_heard(peer, call.now);
        let Self { shared, frontend, backend, gates, .. } = self;
        let Call { now, machine, actions } = call;
        let turn = &mut Turn { now: *now, shared, machine: *machine, actions: *actions };
        match frame {
            Frame::Abort(abort) => backend.give_up(peer, abort, turn),
            Frame::Ask(ask) => backend.asked(peer, ask, turn),
            Frame::Prove(prove) => backend.prove(peer, prove, turn),
            Frame::Withdrawn(withdrawn) => backend.withdraw(peer, withdrawn),
            Frame::Ended(ended) => frontend.ended(peer, ended, turn),
            Frame::Answer(answer) => frontend.answered(peer, answer, turn),
            Frame::Digest(digest) => frontend.told_digest(peer, digest, turn),
            Frame::Spacing(spacing) => turn.act(Action::SetSpacing(peer, *spacing)),
            Frame::Delivered(delivered) => turn.act(Action::SetDelivered(peer, *delivered)),
            Frame::Ping(_) => {}
            Frame::Closed(closed) => {
                gates.set_full(peer, closed.offers.get() == 1);
                gates.say_full(peer, &turn.shared.settings.peers[peer].name, turn.now);
            }
            Frame::SpeaksFor(prefixes) => {
                if !turn.shared.peers.speaks_first(peer) {
                    return Err(Reason::Malformed);
                }
                let change = turn.shared.board.set_prefixes(peer, prefixes);
                turn.act(Action::WriteBoard(change));
            }
            Frame::Addresses(addresses) => self.name_addresses(peer, addresses, call),
            Frame::Sources(sources) => self.say_sources(peer, sources, call),
            _ => return Err(Reason::Malformed),
        }
        Ok(())
    }

    /// Calls `do_it` with the state of this machine as a frontend and as a backend, and with the context of this event.
    fn with<R>(
        &mut self,
        call: &mut Call<'_, M>,
        do_it: impl FnOnce(&mut Frontend, &mut Backend<M>, &mut Turn<'_, M>) -> R,
    ) -> R {
        let Call { now, machine, actions } = call;
        let turn = &mut Turn { now: *now, shared: &mut self.shared, machine: *machine, actions: *actions };
        do_it(&mut self.frontend, &mut self.backend, turn)
    }

    /// If a frame names an offer that has not been read from its connection yet, returns the index of that connection
    /// and the offer's number. The daemon reads the connection before it passes the frame on, because making an offer
    /// does not wake the agent.
    pub fn missing_offer(&self, frame: &Frame) -> Option<(usize, u64)> {
        let number = match frame {
            Frame::Claim(claim) => claim.offer.get(),
            Frame::Prove(prove) => prove.offer.get(),
            Frame::Fetch(fetch) => fetch.offer.get(),
            _ => return None,
        };
        if self.backend.offers.contains(number) {
            return None;
        }
        let server = self.shared.servers.with_worker((number >> 32) as u32)?;
        self.shared.servers.find(server)?.takes_offers().then_some((server, number))
    }

    /// Handles a server's message. `file` came with the message, and is taken if the message is an offer that is kept.
    /// The caller closes a file that is not taken. `was_cut` says that descriptors that came with the message were
    /// lost.
    ///
    /// # Errors
    /// Returns the server's fault. The daemon then ends the server's connection. A failed handoff is not such a fault:
    /// the server gets a message about it.
    pub fn request(
        &mut self,
        server: usize,
        request: &Request,
        file: &mut Option<M::File>,
        was_cut: bool,
        call: &mut Call<'_, M>,
    ) -> Result<(), Reason> {
        let Some(maker) = self.shared.servers.find(server).copied() else { return Err(Reason::Malformed) };
        if maker.caller.may != crate::servers::May::Serve && !matches!(request, Request::Stats) {
            self.shared.counts.refused_callers += 1;
            return Err(Reason::NotAllowed);
        }
        match (request, maker.role) {
            (Request::Stats, _) => call.actions.push(Action::SendStats(server)),
            (Request::Hello(channel, version), Role::Unknown(_)) => self.welcome(server, *channel, *version, call),
            (Request::Offer(offer), Role::Offers) => {
                let is_own = offer.number >> 32 == u64::from(maker.worker);
                match file {
                    Some(_) if is_own => return self.offer(*offer, file, call),
                    // The offer came without its descriptor, because the agent had no descriptor left.
                    None if is_own && was_cut => self.shared.counts.offers_without_descriptor += 1,
                    _ => return Err(Reason::Malformed),
                }
            }
            (Request::Handoff(handoff), Role::Control { .. }) => {
                self.gates.note_handoff();
                self.with(call, |frontend, _, turn| frontend.hand_off(server, handoff, None, turn));
            }
            (Request::HandoffParts(handoff, parts), Role::Control { .. }) => {
                self.gates.note_handoff();
                self.shared.servers.note_newest(server, handoff.handoff);
                self.with(call, |frontend, _, turn| frontend.hand_off(server, handoff, Some(parts), turn));
            }
            (Request::Cancel(cancel), Role::Control { ring, .. }) => {
                let own = ring.map(Canceller::Ring);
                own.into_iter().chain([Canceller::Anybody]).for_each(|by| self.frontend.cancel(by, cancel.handoff));
            }
            (Request::Ask(ask), Role::Control { .. }) => {
                self.with(call, |frontend, _, turn| frontend.ask(server, ask, turn))
            }
            (Request::Prove(prove), Role::Control { .. }) => {
                self.with(call, |frontend, _, turn| frontend.prove(server, prove, turn));
            }
            (Request::Withdrawn(withdrawn), Role::Control { .. }) => {
                self.with(call, |frontend, _, turn| frontend.withdrawn(server, withdrawn, turn));
            }
            (Request::Abort(abort), Role::Control { .. }) => {
                self.with(call, |frontend, _, turn| frontend.abort(server, abort.handoff, turn));
            }
            (Request::Fetch(fetch), Role::Control { .. }) => {
                let peer = self.with(call, |frontend, _, turn| frontend.fetches.ask(server, fetch, turn));
                self.note_fetch(peer);
            }
            _ => return Err(Reason::Malformed),
        }
        Ok(())
    }

    /// Handles a peer's claim of an offer, or of `parts` of this machine's store. Returns the payload for the daemon to
    /// send, or `None` if the claim is refused or has to wait. If the daemon cannot begin to send, it calls
    /// [`Logic::start_failed`].
    pub fn claim(
        &mut self,
        peer: usize,
        claim: &Claim,
        parts: Option<&Parts>,
        call: &mut Call<'_, M>,
    ) -> Option<Start<M>> {
        self.shared.peers.note_heard(peer, call.now);
        self.with_gates(call, |backend, gates, turn| backend.claim(peer, claim, parts, gates, turn))
    }

    /// Notes that the daemon could not begin to send the payload of a claim. No byte was sent. The claim's offer, if it
    /// had one, is used up.
    pub fn start_failed(
        &mut self,
        claimant: Claimant,
        claim: &Claim,
        parts: Option<&Parts>,
        reason: Reason,
        call: &mut Call<'_, M>,
    ) {
        self.with_gates(call, |backend, gates, turn| backend.refuse(claim, parts, claimant, reason, gates, turn));
    }

    /// Begins a round, in which each claim that waits now is examined once.
    pub fn begin_waiting_round(&mut self) {
        self.backend.waiting.begin_round();
    }

    /// Examines the next waiting claim. Returns the claim and the payload to send, or `Some(None)` if the payload is
    /// not sent now. Returns `None` when all claims of the round have been examined.
    pub fn next_waiting(&mut self, call: &mut Call<'_, M>) -> Option<Option<(Box<Waits>, Start<M>)>> {
        self.with_gates(call, |backend, _, turn| backend.next_waiting(turn))
    }

    fn with_gates<R>(
        &mut self,
        call: &mut Call<'_, M>,
        do_it: impl FnOnce(&mut Backend<M>, &mut Gates, &mut Turn<'_, M>) -> R,
    ) -> R {
        let Call { now, machine, actions } = call;
        let turn = &mut Turn { now: *now, shared: &mut self.shared, machine: *machine, actions: *actions };
        do_it(&mut self.backend, &mut self.gates, turn)
    }

    /// Reports a sender that has ended without success.
    pub fn sender_failed(&mut self, claimant: &Claimant, reason: Reason, call: &mut Call<'_, M>) {
        self.with(call, |_, _, turn| turn.fail_claim(claimant, reason));
    }

    /// Tells frontends which ACKs each sender needs (`advice`: how many payload bytes may lie between two ACKs), and
    /// which payloads clients have acknowledged wholly (`words`). Peers without a session are not told: a frontend that
    /// has lost this agent watches by itself whether payloads arrive.
    pub fn tell_frontends(&mut self, advice: &[(u32, Spacing)], words: &[(u32, Delivered)], call: &mut Call<'_, M>) {
        self.with(call, |_, _, turn| {
            for (peer, spacing) in advice {
                turn.tell_peer(*peer as usize, |out| spacing.emit(out));
            }
            for (peer, word) in words {
                turn.tell_peer(*peer as usize, |out| word.emit(out));
            }
        });
    }

    /// Tells a frontend the digest of the file whose bytes are being sent for the claim `of`. `None` says that the
    /// digest is unknown, or no longer valid. `offset` is the place of the payload in the file.
    pub fn tell_file(&mut self, of: &Claimant, offset: u64, sha256: Option<Sha256>, call: &mut Call<'_, M>) {
        self.with(call, |_, backend, turn| backend.tell_file(of, offset, sha256, turn));
    }

    /// Watches whether the payloads still arrive that are already on their way to clients of this machine. Called when
    /// this agent starts. The agents of the payloads' backends have lost the sessions with this machine's earlier
    /// agent, so they may not tell this one if a payload fails.
    pub fn watch_regions(&mut self, call: &mut Call<'_, M>) {
        self.with(call, |frontend, _, turn| frontend.watch_regions(None, turn));
    }

    /// Examines peers' waiting questions, because more digests are known. Answers those that need not wait any longer.
    pub fn answer_questions(&mut self, call: &mut Call<'_, M>) {
        self.with(call, |_, backend, turn| backend.answer_questions(turn));
    }

    /// Fails all waiting claims, because the agent ends. Their frontends are told.
    pub fn give_up_waiting(&mut self, call: &mut Call<'_, M>) {
        self.with(call, |_, backend, turn| backend.give_up_waiting(turn));
    }

    /// Returns the number of handoffs, offers, waiting claims and fetches that have not ended. The number of handoffs
    /// is that of the last check of limits.
    pub fn under_way(&self) -> u64 {
        let Backend { offers, waiting, served, .. } = &self.backend;
        let here = offers.len() + waiting.len() + served.len() + self.frontend.fetches.len();
        here as u64 + self.gates.total.handoffs
    }

    /// Notes that a turn came late by `late`, so that a long delay of this agent does not count as silence of peers
    /// ([`Peers::excuse`]).
    pub fn excuse_peers(&mut self, late: Duration, now: Instant) {
        self.shared.peers.excuse(late, self.shared.settings.heartbeat, now);
    }

    /// Ends a turn: carries out the aborts, withdrawals of digests and cancellations that the turn's events have
    /// collected. The daemon then sends the outboxes' frames.
    pub fn end_turn(&mut self, call: &mut Call<'_, M>) {
        self.with(call, |frontend, backend, turn| {
            backend.end_turn(turn);
            frontend.end_turn(turn);
        });
    }

    /// Does the work that is due by the clock, ten times a second. Limits and waiting claims are checked separately.
    pub fn tick(&mut self, call: &mut Call<'_, M>) {
        let expired = self.backend.offers.expire(call.now);
        self.shared.counts.offers_expired += expired.len() as u64;
        if !expired.is_empty() {
            call.actions.push(Action::CloseFiles(expired));
        }
        self.tend_peers(call);
        self.tend_servers(call);
        self.tend_store(call);
        self.with(call, |frontend, backend, turn| {
            backend.answer_questions(turn);
            backend.tend_served(turn);
            frontend.fetches.tend(turn);
            frontend.tend_losses(turn);
        });
    }

    /// Asks the daemon to give changed keys to the kernel, and the sources to programs.
    fn write_ends(changes: Vec<Change>, actions: &mut Actions<M>) {
        actions.extend(changes.into_iter().map(|(address, key)| Action::SetEnd(address, key)));
        actions.push(Action::WriteSources);
    }

    /// Handles a peer's ADDRESSES: the addresses of the peer's programs. They are used only if the peer may read this
    /// machine's store. The peer sends them only to machines that may read the peer's store. So this store becomes a
    /// source of this machine. If it was none before, all peers whose stores are sources here are told the new list of
    /// sources.
    fn name_addresses(&mut self, peer: usize, addresses: &shunt_wire::addresses::Addresses, call: &mut Call<'_, M>) {
        let may_read = self.shared.settings.peers[peer].may_read_store;
        let Some(store) = &mut self.store else { return };
        if may_read && let Some(changes) = store.ends.name(peer, addresses, call.now) {
            Self::write_ends(changes, call.actions);
        }
        if store.sources.open(peer) {
            call.actions.push(Action::WriteSources);
            self.tell_sources();
        }
    }

    fn say_sources(&mut self, peer: usize, sources: &Sources, call: &mut Call<'_, M>) {
        if self.store.as_mut().is_some_and(|store| store.sources.hear(peer, sources, call.now)) {
            call.actions.push(Action::WriteSources);
        }
    }

    /// Tells this machine's sources to all peers whose stores are sources here.
    fn tell_sources(&mut self) {
        let Some(store) = &self.store else { return };
        let own = Sources::of(store.sources.own());
        for peer in store.sources.opened() {
            if let Some(outbox) = self.shared.peers.outbox(peer) {
                own.emit(outbox);
            }
        }
    }

    fn tend_store(&mut self, call: &mut Call<'_, M>) {
        let Some(store) = &mut self.store else { return };
        if let Some(changes) = store.ends.tend(call.now) {
            Self::write_ends(changes, call.actions);
        }
        if store.sources.tend(call.now) {
            call.actions.push(Action::WriteSources);
        }
    }

    /// Handles a change of this machine's addresses: updates the kernel's keys and the programs' sources, and tells the
    /// peers that may read this machine's store.
    pub fn set_own_addresses(&mut self, addresses: &[IpAddr], call: &mut Call<'_, M>) {
        let Some(store) = &mut self.store else { return };
        let changes = store.ends.set_own(addresses);
        Self::write_ends(changes, call.actions);
        let own = store.ends.own();
        for peer in 0..self.shared.peers.len() {
            if self.shared.settings.peers[peer].may_read_store
                && let Some(outbox) = self.shared.peers.outbox(peer)
            {
                own.emit(outbox);
            }
        }
    }
}

#[cfg(test)]
mod tests;
