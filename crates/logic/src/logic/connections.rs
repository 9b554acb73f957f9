//! Connections of this machine's servers. An *offer* is a payload that a server holds ready. A *handoff* lets another
//! machine send a payload on the connection of a server's client, and a *fetch* brings a payload through both agents
//! instead. A *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs.

use shunt_wire::local::{Channel, Offer, Reason};

use super::{Call, Logic};
use crate::action::Action;
use crate::machine::Machine;
use crate::servers::{Caller, Refusal, Role, Server};

impl<M: Machine> Logic<M> {
    /// Adds the connection of a process. Returns the connection's index.
    ///
    /// # Errors
    /// Returns why the connection is refused. The daemon then closes it, and tells a process that may not connect the
    /// reason ([`Reason::NotAllowed`]).
    pub fn add_server(&mut self, caller: Caller, call: &Call<'_, M>) -> Result<usize, Refusal> {
        let added = self.shared.servers.add(caller, call.now);
        if let Err(refusal) = added {
            self.refuse_caller(&caller, refusal, call);
        }
        added
    }

    fn refuse_caller(&mut self, caller: &Caller, refusal: Refusal, call: &Call<'_, M>) {
        let counts = &mut self.shared.counts;
        match refusal {
            Refusal::NotAllowed => counts.refused_callers += 1,
            Refusal::Full | Refusal::Share { .. } => counts.servers_refused += 1,
        }
        if !self.shared.refusals.allows(call.now) {
            return;
        }
        let Caller { pid, uid, gid, .. } = *caller;
        match refusal {
            Refusal::Full => {
                tracing::warn!("limit reached: refused a server's connection; raise `servers` in [limits]")
            }
            Refusal::NotAllowed => {
                tracing::warn!(
                    pid,
                    uid,
                    gid,
                    "refused a process: add its user or group to `users`, `groups` or `observers`"
                );
            }
            Refusal::Share { own } => tracing::warn!(
                uid,
                own,
                "limit reached: refused a connection of a user who has the most that one user may have; raise \
                 `servers` in [limits]"
            ),
        }
    }

    pub(super) fn welcome(&mut self, server: usize, channel: Channel, version: u16, call: &mut Call<'_, M>) {
        let ring = self.shared.servers.welcome(server, channel);
        let Some(&Server { worker, caller, .. }) = self.shared.servers.find(server) else { return };
        if ring.is_none() && channel == Channel::Control && self.shared.settings.is_frontend {
            self.shared.counts.rings_exhausted += 1;
        }
        call.actions.push(Action::Welcome { server, channel, ring, user: caller.uid, worker, version });
    }

    /// Notes that the kernel could not make a server's ring. Without a ring, the server cannot hand off, and fetches
    /// payloads through the agents.
    pub fn ring_failed(&mut self, server: usize) {
        self.shared.servers.lose_ring(server);
        self.shared.counts.rings_exhausted += 1;
    }

    /// Adds an offer and takes its file, unless the offer is dropped.
    pub(super) fn offer(
        &mut self,
        offer: Offer,
        file: &mut Option<M::File>,
        call: &mut Call<'_, M>,
    ) -> Result<(), Reason> {
        self.shared.counts.offers += 1;
        // Nobody can claim an offer for a peer that is not known, so such an offer is dropped.
        if !self.shared.board.knows(offer.peer as usize) {
            self.shared.counts.offers_to_strangers += 1;
            return Ok(());
        }
        if !call.machine.has_descriptors() {
            self.shared.counts.offers_without_descriptor += 1;
            return Ok(());
        }
        let file = file.take_if(|_| !self.backend.offers.contains(offer.number)).ok_or(Reason::Malformed)?;
        self.gates.note_offer(offer.length);
        self.backend.offers.add(offer, file, call.now)
    }

    /// Removes a server whose connection has ended.
    pub fn remove_server(&mut self, server: usize, call: &mut Call<'_, M>) {
        let Some(gone) = self.shared.servers.remove(server) else { return };
        for peer in 0..self.shared.peers.len() {
            self.shared.peers.peer(peer).hearing.forget_server(gone.worker);
        }
        self.with(call, |frontend, _, turn| frontend.fetches.forget_server(server, turn));
        if let Role::Control { ring: Some(ring), newest } = gone.role {
            self.shared.servers.free_ring(ring);
            call.actions.push(Action::CloseRing(ring));
            self.with(call, |frontend, _, turn| frontend.end_left_regions(ring, newest, turn));
        }
    }

    /// Closes the connection of a server whose message makes no sense or is not allowed, and tells it the reason.
    pub fn malformed(&mut self, server: usize, reason: Reason, call: &mut Call<'_, M>) {
        let Some(&Server { caller: Caller { pid, uid, .. }, .. }) = self.shared.servers.find(server) else { return };
        self.shared.counts.malformed_local += 1;
        tracing::warn!(%reason, pid, uid, "closing a server's connection");
        self.with(call, |_, _, turn| turn.end(server, 0, reason));
        call.actions.push(Action::CloseServer(server));
        self.remove_server(server, call);
    }

    /// Counts a message that was dropped because a server does not read.
    pub fn unread(&mut self) {
        self.shared.counts.unread += 1;
    }

    pub(super) fn tend_servers(&mut self, call: &mut Call<'_, M>) {
        while let Some(server) = self.shared.servers.silent(call.now) {
            self.shared.counts.servers_silent += 1;
            call.actions.push(Action::CloseServer(server));
            self.remove_server(server, call);
        }
    }
}
