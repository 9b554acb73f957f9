//! Connections between programs and stores of different machines: programs of this machine reach other stores, and
//! programs of other machines reach the store here. A *store* has the payloads of a machine's programs under `shunt
//! run`.

use std::os::fd::OwnedFd;

use shunt_logic::store::reaching::{self, Reach};
use shunt_odb::records::Sealing;
use shunt_odb::reference::Holder;
use shunt_odb::store::caller::Caller;
use shunt_sys::sockopt::PeerCredentials;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Store as Request, Stored};

use super::Daemon;
use crate::os::poll::{Interest, Source};
use crate::peers::arrived::Arrived;
use crate::store::programs::Wish;
use shunt_transport::{Transport, TransportError};

impl Daemon {
    /// Handles the wishes (requests) of programs: a connection to another store, or permission for handoffs. A
    /// *handoff* lets another machine send a payload on a connection of the program.
    pub(crate) fn on_wishes(&mut self) {
        let wishes = self.store.as_ref().map(|store| store.wishes()).unwrap_or_default();
        for wish in wishes {
            match wish {
                Wish::Reach { program, holder } => {
                    if let Err(why) = self.reach(program, holder) {
                        self.say_unreached(&why);
                        self.answer_program(program, holder, None);
                    }
                }
                Wish::HandOff { program, caller } => self.let_hand_off(program, caller),
            }
        }
    }

    /// Lets a program under `shunt run` hand off its own connections, if this machine is a frontend.
    fn let_hand_off(&mut self, program: u64, caller: Caller) {
        let Caller { user: uid, group: gid, process: pid } = caller;
        let is_frontend = self.kernel.frontend.is_some();
        let connected = is_frontend.then(|| self.connect_program(PeerCredentials { pid, uid, gid }));
        if let Some(store) = &self.store {
            store.orders.lets_hand_off(program, connected.and_then(Result::ok));
        }
    }

    fn reach(&mut self, program: u64, holder: Holder) -> Result<(), String> {
        let peer = self.config.peer_of(|name| Holder::named(name) == holder);
        let unknown = || {
            format!(
                "a reference names {holder:?}, which is none of the [[peer]] entries: add its agent, whose `shuntd \
                 --check` prints that name"
            )
        };
        let peer = peer.ok_or_else(unknown)?;
        let too_many = "too many connections to other stores are being made; the program asks again";
        if !self.has_descriptors() {
            return Err(too_many.into());
        }
        let reaching = self.logic.store.as_mut().map(|store| &mut store.reaching);
        let reach = reaching.and_then(|reaching| reaching.add(program, holder.into(), peer, self.now));
        let reach = reach.ok_or(too_many)?;
        self.connect_reach(reach, peer).inspect_err(|_| drop(self.end_reach(reach)))
    }

    fn connect_reach(&mut self, reach: usize, peer: usize) -> Result<(), String> {
        let peer = &self.config.peers[peer];
        let tls = self.credentials.dial(&peer.name).map_err(|error| error.to_string())?;
        let mut transport = Transport::connect(peer.address, tls).map_err(|error| error.to_string())?;
        Request::REQUEST.emit(transport.output());
        let watched = self.poll.set(transport.descriptor(), Source::Reaching(reach), Interest::Both);
        watched.map_err(|error| error.to_string())?;
        self.reaching.insert(reach, transport);
        Ok(())
    }

    fn end_reach(&mut self, reach: usize) -> Option<(Reach, Option<Transport>)> {
        let ended = self.logic.store.as_mut()?.reaching.remove(reach)?;
        Some((ended, self.reaching.remove(reach)))
    }

    /// Continues a connection that is being made to another store's agent, when epoll reports the connection.
    pub(crate) fn on_reaching(&mut self, reach: usize) {
        let Some(transport) = self.reaching.get_mut(reach) else { return };
        match read(transport) {
            Ok(false) => {
                let interest = if matches!(transport.flush(), Ok(true)) { Interest::Readable } else { Interest::Both };
                let _ = self.poll.set(transport.descriptor(), Source::Reaching(reach), interest);
            }
            Ok(true) => self.deliver_store(reach),
            Err(error) => self.fail_reaching(reach, &error.to_string()),
        }
    }

    /// Gives the program its connection to the other store.
    fn deliver_store(&mut self, reach: usize) {
        let Some((Reach { program, store, peer, .. }, Some(transport))) = self.end_reach(reach) else { return };
        self.poll.remove(transport.descriptor());
        self.logic.shared.keys_passed = true;
        let connection = transport.into_channel();
        if let Err(error) = &connection {
            self.say_unreached(&format!("{}: {error}", self.config.peers[peer].name));
        }
        self.answer_program(program, store.into(), connection.ok());
    }

    fn fail_reaching(&mut self, reach: usize, why: &str) {
        let Some((Reach { program, store, peer, .. }, _)) = self.end_reach(reach) else { return };
        self.say_unreached(&format!("{}: {why}", self.config.peers[peer].name));
        self.answer_program(program, store.into(), None);
    }

    fn answer_program(&self, program: u64, holder: Holder, connection: Option<(OwnedFd, Sealing)>) {
        if let Some(store) = &self.store {
            store.orders.reached(program, holder, connection);
        }
    }

    fn say_unreached(&mut self, why: &str) {
        if let Some(store) = &mut self.logic.store {
            store.unreached += 1;
        }
        if self.logic.shared.refusals.allows(self.now) {
            tracing::warn!(why, "cannot connect a program to another machine's store");
        }
    }

    /// Gives up on agents that have not answered in time.
    pub(crate) fn tend_reaching(&mut self) {
        let now = self.now;
        while let Some(reach) = self.logic.store.as_ref().and_then(|store| store.reaching.late(now)) {
            self.fail_reaching(reach, "no answer");
        }
    }

    /// Lets a program of another machine read from this machine's store, on the connection `arrived`.
    pub(crate) fn serve_reader(&mut self, arrived: Arrived) {
        let peer = self.config.peer_of(|name| arrived.transport.is_of(name));
        let peer = peer.map(|peer| (peer, &self.config.peers[peer]));
        let allowed = self.store.as_ref().zip(peer).filter(|(store, (_, peer))| store.config.lets_read(&peer.name));
        let Some((orders, peer)) = allowed.map(|(store, (peer, _))| (store.orders.clone(), peer)) else {
            self.logic.shared.counts.end(Reason::NotAllowed);
            return arrived.refuse(Reason::NotAllowed);
        };
        // The limit is checked here, so that the program learns of it early. Later, parts of the program's memory are
        // empty, and only this store can fill them.
        let Some(place) = orders.places().take(peer as u32) else {
            self.logic.shared.counts.end(Reason::Limit);
            if self.logic.shared.refusals.allows(self.now) {
                let peer = &self.config.peers[peer].name;
                tracing::warn!(
                    peer,
                    "limit reached: programs of that machine have all the connections that they may have to this \
                     store; raise `reader_connections` in [store]"
                );
            }
            return arrived.refuse(Reason::Limit);
        };
        let Arrived { mut transport, from } = arrived;
        Stored {}.emit(transport.output());
        self.poll.remove(transport.descriptor());
        self.logic.shared.keys_passed = true;
        let flushed = transport.flush().and_then(|all| if all { Ok(()) } else { Err(TransportError::Stuck) });
        match flushed.and_then(|()| transport.into_channel()) {
            Ok((socket, sealing)) => orders.serve(socket, sealing, place),
            Err(error) => tracing::warn!(%from, %error, "a reader's connection failed before it began"),
        }
    }
}

/// Reads the other agent's answer. Returns true if that agent has agreed, and false if no answer has arrived yet.
fn read(transport: &mut Transport) -> Result<bool, TransportError> {
    transport.connected()?;
    transport.fill()?;
    transport.flush()?;
    let Some(frame) = transport.next_frame()? else { return Ok(false) };
    reaching::answer(&frame).map(|()| true).map_err(TransportError::Refused)
}
