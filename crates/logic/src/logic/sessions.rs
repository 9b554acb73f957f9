//! Sessions with peers: their begin and end, and the admission of agents that connect. A *peer* is another machine's
//! agent, as the configuration names it. A *session* is the use of a connection with it, from the second HELLO until
//! the connection is lost. A *handoff* lets a peer send a payload on the connection of a frontend's client. A *sender*
//! is the peer's kernel socket for this client.

use std::net::IpAddr;

use shunt_wire::local::Reason;
use shunt_wire::peer::Hello;

use super::{Call, Logic};
use crate::action::Action;
use crate::machine::Machine;
use crate::peers::{Due, Opened};
use crate::store::ends::Key;

/// Refusal of a connection that another agent has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Reason that the other agent is told.
    pub reason: Reason,
    /// Reason for this agent's log.
    pub why: String,
}

impl<M: Machine> Logic<M> {
    /// Sends HELLO to a peer, on a connection that has been made or is being made. Also sends the addresses of this
    /// machine's programs (ADDRESSES), if the peer may read this machine's store.
    pub fn opened(&mut self, peer: usize, opened: &Opened, call: &mut Call<'_, M>) {
        let addresses = self.store.as_ref().map(|store| store.ends.own());
        let shared = &mut self.shared;
        let outbox = shared.peers.open(peer, &shared.settings, opened, call.now);
        if let Some(addresses) = addresses.filter(|_| shared.settings.peers[peer].may_read_store) {
            addresses.emit(outbox);
        }
    }

    /// Begins a session, because the peer has sent HELLO. `key` was exported from the TLS connection, so only the two
    /// agents have it. With `key` the kernel proves TCP handshakes between programs of the two machines.
    ///
    /// # Errors
    /// Returns the peer's fault. The daemon then ends the connection.
    pub fn hello(&mut self, peer: usize, hello: &Hello, key: Key, call: &mut Call<'_, M>) -> Result<(), Reason> {
        let heartbeat = self.shared.settings.heartbeat;
        let begun = self.shared.peers.begin(peer, hello, heartbeat, call.now)?;
        if let Some(store) = &mut self.store
            && self.shared.settings.peers[peer].may_read_store
        {
            store.ends.begin(peer, key);
        }
        if self.shared.settings.is_frontend && hello.sender_port.get() != 0 {
            if self.frontend.steered.begin(peer, hello) {
                call.actions.push(Action::Steer(peer));
            }
            call.actions.push(Action::WatchRoutes(peer, *hello));
            self.write_families(call);
        }
        let change = self.shared.board.up(peer, begun.our_key, begun.their_key);
        call.actions.push(Action::WriteBoard(change));
        self.renew_limits(peer);
        self.shared.counts.sessions += 1;
        tracing::info!(peer = self.shared.settings.peers[peer].name, version = begun.version, "session begins");
        Ok(())
    }

    /// Handles the end of the connection with a peer, or the failure to make it. Client connections without a handoff
    /// in progress are not affected.
    pub fn lose_peer(&mut self, peer: usize, why: &str, call: &mut Call<'_, M>) {
        call.actions.push(Action::HangUp(peer));
        if !self.shared.peers.lose(peer, why, call.now) {
            return;
        }
        self.shared.counts.sessions_lost += 1;
        if self.frontend.steered.lose(peer) {
            call.actions.push(Action::Steer(peer));
            self.write_families(call);
        }
        let change = self.shared.board.lost(peer);
        call.actions.push(Action::WriteBoard(change));
        if let Some(store) = &mut self.store {
            Self::write_ends(store.ends.end(peer), call.actions);
            if store.sources.end(peer) {
                self.tell_sources();
            }
        }
        let is_frontend = self.shared.settings.is_frontend;
        self.with(call, |frontend, backend, turn| {
            if is_frontend {
                frontend.watch_regions(Some(peer as u32), turn);
            }
            backend.lose_peer(peer, turn);
        });
    }

    /// Ends the session with a peer that is not trusted any more, and makes its offers unusable.
    pub fn distrust(&mut self, peer: usize, why: &str, call: &mut Call<'_, M>) {
        self.lose_peer(peer, why, call);
        self.shared.peers.distrust(peer);
        let change = self.shared.board.down(peer);
        call.actions.push(Action::WriteBoard(change));
    }

    /// Checks an agent that has connected and sent HELLO. `is_of` says whether the agent's certificate is for a given
    /// name, and `from` is the agent's address. `current` returns the address of the other end of a peer's present
    /// session. Returns the peer's number. A present session with this peer is ended: the peer would not connect if its
    /// side of that session still existed.
    ///
    /// # Errors
    /// Returns why the agent is refused.
    pub fn admit(
        &mut self,
        hello: &Hello,
        is_of: impl Fn(&str) -> bool,
        from: IpAddr,
        current: impl Fn(usize) -> Option<IpAddr>,
        call: &mut Call<'_, M>,
    ) -> Result<usize, Refused> {
        let refused = |why: String| Err(Refused { reason: Reason::NotAllowed, why });
        let name = hello.name().unwrap_or_default();
        if !is_of(name) {
            return refused(format!("it calls itself \"{name}\", and its certificate is for another name"));
        }
        let settings = &self.shared.settings;
        let Some(peer) = settings.peers.iter().position(|peer| peer.name == name && !peer.is_gone) else {
            return refused(format!(
                "\"{name}\" is no [[peer]] here: add it to the configuration, then `systemctl reload shuntd`"
            ));
        };
        if settings.peers[peer].is_dialled {
            let own = &settings.name;
            return refused(format!(
                "it must not dial, because this agent dials it: check that its [[peer]] calls this agent \"{own}\""
            ));
        }
        // A machine whose address has changed is refused at first. Its old session is lost soon, because the old
        // address is silent.
        let is_up = self.shared.peers.is_up(peer);
        if let Some(other) = current(peer).filter(|other| is_up && *other != from) {
            return refused(format!(
                "two machines use the certificate of \"{name}\": {other}, which has the session, and {from}; give \
                 each machine its own name and certificate"
            ));
        }
        if is_up {
            self.lose_peer(peer, "the peer began a new session", call);
        }
        Ok(peer)
    }

    /// Returns the peers that seem to have been silent for too long. The daemon reads their connections once more
    /// before the tick.
    pub fn silent_peers(&self, now: std::time::Instant) -> impl Iterator<Item = usize> {
        let heartbeat = self.shared.settings.heartbeat;
        (0..self.shared.peers.len()).filter(move |peer| self.shared.peers.is_silent(*peer, heartbeat, now))
    }

    pub(super) fn tend_peers(&mut self, call: &mut Call<'_, M>) {
        let heartbeat = self.shared.settings.heartbeat;
        let is_there = |peer: &usize| !self.shared.settings.peers[*peer].is_gone;
        for peer in (0..self.shared.peers.len()).filter(is_there).collect::<Vec<_>>() {
            match self.shared.peers.tend(peer, heartbeat, call.now) {
                None => {}
                Some(Due::Attempt) => call.actions.push(Action::Dial(peer)),
                Some(Due::TooLong) => self.lose_peer(peer, "no answer", call),
                Some(Due::Silent) => {
                    let silence = heartbeat * crate::peers::SILENT_HEARTBEATS;
                    self.lose_peer(peer, &format!("it said nothing for {silence:?}"), call);
                }
            }
        }
    }

    /// Sets the network interface towards an address of a peer's senders, or 0 if there is no route. Returns whether
    /// the peer has this address.
    pub fn set_interface(&mut self, peer: usize, address: IpAddr, interface: u32, call: &mut Call<'_, M>) -> bool {
        let is_its = self.frontend.steered.set_interface(peer, address, interface);
        if is_its {
            call.actions.push(Action::Steer(peer));
            self.write_families(call);
        }
        self.gates.set_news(); // a peer to which no route leads is told to offer nothing
        is_its
    }

    fn write_families(&mut self, call: &mut Call<'_, M>) {
        let steered = &self.frontend.steered;
        let change = self.shared.board.set_families(|peer| steered.families(peer));
        call.actions.extend(change.map(Action::WriteBoard));
    }
}
