//! Connections of this machine's servers. A control connection is read when it is ready, an offers connection when a
//! claim comes for one of its offers, so that making an offer wakes nobody.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_sys::sockopt::PeerCredentials;
use shunt_wire::local::{Channel, Ended, MAX_PACKET_BYTES, NO_PEER, Reason, Request, Welcome};
use zerocopy::IntoBytes;

use crate::agent::Agent;
use crate::board::WorkerCounters;
use crate::callers::{Caller, May};
use crate::handoffs::Canceller;
use crate::packets::{self, Received};
use crate::poll::{Interest, Source};

/// No ring: `shunt_welcome.ring` of an offers connection, or where all rings are taken.
const NO_RING: u32 = u32::MAX;
/// What this agent can do with a server that can do it, too (`struct shunt_welcome`).
const FEATURES: u64 = 0;
/// How long a new connection may say nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that each user gets, however few are left for others.
const LEAST_OF_A_USER: usize = 4;
/// Offers that are read of one connection before others have their turn: more than a socket holds at a time.
const OFFERS_IN_A_TURN: usize = 4096;

/// Whether a user with `own` of `all` connections gets another: no user has more than are left for others.
fn may_have_one_more(own: usize, all: usize, limit: usize) -> bool {
    own < limit.saturating_sub(all).max(LEAST_OF_A_USER)
}

/// Reads until there is no more, or it is others' turn: a server may offer without end.
fn for_a_turn(mut read: impl FnMut() -> bool) {
    for _ in 0..OFFERS_IN_A_TURN {
        if !read() {
            return;
        }
    }
}

/// What a connection turned out to be.
pub(crate) enum Role {
    /// It has not said yet.
    Unknown,
    /// Handoffs and fetches.
    Control {
        /// Its completion ring.
        ring: u32,
        /// Written by the server.
        counters: WorkerCounters,
        /// The last handoff of stored bytes that it has told of.
        newest: Option<u64>,
    },
    /// Offers.
    Offers {
        /// Written by the server.
        counters: WorkerCounters,
    },
}

/// One connection.
pub(crate) struct Server {
    pub(crate) socket: OwnedFd,
    /// Upper half of its offers' numbers, and its name in claims; never used twice.
    pub(crate) worker: u32,
    pub(crate) role: Role,
    caller: Caller,
    /// By then it has to have said what it is.
    deadline: Instant,
}

impl Agent {
    pub(crate) fn add_server(&mut self, socket: OwnedFd) {
        if self.servers.len() >= self.config.limits.servers {
            self.counts.servers_refused += 1;
            if self.refusals.may_speak(self.now) {
                tracing::warn!("a server's connection too many: raise `servers` in [limits]");
            }
            return;
        }
        let caller = match self.callers.ask(&socket) {
            Ok(caller) if caller.may == May::Nothing => return self.refuse_caller(&socket, &caller),
            Ok(caller) => caller,
            Err(error) => return tracing::error!(%error, "cannot ask who connects"),
        };
        self.add_caller(socket, caller);
    }

    /// A connection with the agent for a program of the store's, which has asked who that is: its end.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn connect_program(&mut self, credentials: PeerCredentials) -> io::Result<OwnedFd> {
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        self.add_caller(ours, Caller { credentials, may: May::Serve });
        Ok(theirs)
    }

    fn add_caller(&mut self, socket: OwnedFd, caller: Caller) {
        let uid = caller.credentials.uid;
        let own = self.servers.iter().filter(|(_, server)| server.caller.credentials.uid == uid).count();
        if !may_have_one_more(own, self.servers.len(), self.config.limits.servers) {
            self.counts.servers_refused += 1;
            if self.refusals.may_speak(self.now) {
                tracing::warn!(
                    uid,
                    own,
                    "a user has as many connections as are left for others: raise `servers` in [limits]"
                );
            }
            return;
        }
        let worker = self.next_worker;
        self.next_worker = self.next_worker.wrapping_add(1).max(1);
        let entry = self.servers.vacant_entry();
        if let Err(error) = self.poll.set(&socket, Source::Local(entry.key()), Interest::Readable) {
            tracing::error!(%error, "cannot watch a server's connection");
            return;
        }
        entry.insert(Server { socket, worker, role: Role::Unknown, caller, deadline: self.now + PATIENCE });
    }

    /// One clear answer, and nothing of theirs is read.
    fn refuse_caller(&mut self, socket: &OwnedFd, caller: &Caller) {
        self.counts.refused_callers += 1;
        let PeerCredentials { pid, uid, gid } = caller.credentials;
        if self.refusals.may_speak(self.now) {
            tracing::warn!(pid, uid, gid, "refused a process that is in none of `users`, `groups` and `observers`");
        }
        let ended = Ended { header: Ended::HEADER, handoff: 0, reason: Reason::NotAllowed as u32, peer: NO_PEER };
        let _ = packets::send(socket, ended.as_bytes(), &[]);
    }

    /// Whoever connects and says nothing goes again.
    pub(crate) fn tend_servers(&mut self) {
        let now = self.now;
        let silent = |server: &Server| matches!(server.role, Role::Unknown) && server.deadline <= now;
        let silent = self.servers.iter().filter(|(_, server)| silent(server)).map(|(index, _)| index);
        for index in silent.collect::<Vec<_>>() {
            self.counts.servers_silent += 1;
            self.remove_server(index);
        }
    }

    /// One packet: the poll is level-triggered, and a worker puts all of a turn's messages into one.
    pub(crate) fn on_server(&mut self, index: usize) {
        self.read_server(index);
    }

    /// Reads one packet and does what it says: whether there may be more.
    fn read_server(&mut self, index: usize) -> bool {
        let Some(server) = self.servers.get(index) else {
            return false;
        };
        let mut buffer = self.packet.take().unwrap_or_else(|| Box::new([0; MAX_PACKET_BYTES]));
        let (bytes, goes_on) = match packets::receive(&server.socket, &mut buffer) {
            Ok(Received::Packet(bytes, file)) => (bytes, self.obey(index, &buffer[..bytes], file, false)),
            Ok(Received::Cut(bytes)) => (bytes, self.obey(index, &buffer[..bytes], None, true)),
            Ok(Received::Nothing) => (0, false),
            Ok(Received::Closed) => (0, self.remove_server(index)),
            Err(error) => {
                tracing::warn!(%error, "a server's connection failed");
                (0, self.remove_server(index))
            }
        };
        buffer[..bytes].fill(0); // it may hold keys
        self.packet = Some(buffer);
        goes_on
    }

    fn obey(&mut self, index: usize, mut packet: &[u8], mut file: Option<File>, was_cut: bool) -> bool {
        while !packet.is_empty() {
            let done = Request::parse(packet).and_then(|(request, rest)| {
                packet = rest;
                self.do_request(index, request, file.take(), was_cut)
            });
            if let Err(reason) = done {
                self.counts.malformed_local += 1;
                let PeerCredentials { pid, uid, .. } = self.servers[index].caller.credentials;
                tracing::warn!(%reason, pid, uid, "closing a server's connection");
                self.tell_server(index, 0, reason);
                return self.remove_server(index);
            }
        }
        true
    }

    /// # Errors
    /// What ends the connection: a request that this connection may not make. A handoff that fails is answered.
    fn do_request(&mut self, index: usize, request: Request, file: Option<File>, was_cut: bool) -> Result<(), Reason> {
        let Server { role, caller, .. } = &self.servers[index];
        if caller.may != May::Serve && !matches!(request, Request::Stats) {
            self.counts.refused_callers += 1;
            return Err(Reason::NotAllowed);
        }
        match (request, role) {
            (Request::Stats, _) => self.send_stats(index),
            (Request::Hello(channel, version), Role::Unknown) => self.welcome(index, channel, version),
            (Request::Offer(offer), Role::Offers { .. }) => {
                let own = offer.number >> 32 == u64::from(self.servers[index].worker);
                match file.filter(|_| own) {
                    Some(file) => self.add_offer(offer, file),
                    // It came without one because we had none left.
                    None if own && was_cut => {
                        self.counts.offers_without_descriptor += 1;
                        Ok(())
                    }
                    None => Err(Reason::Malformed),
                }
            }
            (Request::Handoff(handoff), Role::Control { .. }) => {
                self.hand_off(index, &handoff, None);
                Ok(())
            }
            (Request::HandoffParts(handoff, parts), Role::Control { .. }) => {
                if let Role::Control { newest, .. } = &mut self.servers[index].role {
                    *newest = Some(handoff.handoff);
                }
                self.hand_off(index, &handoff, Some(&parts));
                Ok(())
            }
            (Request::Cancel(cancel), &Role::Control { ring, .. }) => {
                for by in [Canceller::Ring(ring), Canceller::Anybody] {
                    self.cancel_handoff(by, cancel.handoff);
                }
                Ok(())
            }
            (Request::Ask(ask), Role::Control { .. }) => {
                self.ask(index, &ask);
                Ok(())
            }
            (Request::Prove(prove), Role::Control { .. }) => {
                self.prove(index, &prove);
                Ok(())
            }
            (Request::Withdrawn(withdrawn), Role::Control { .. }) => {
                self.withdrawn(index, &withdrawn);
                Ok(())
            }
            (Request::Abort(abort), Role::Control { .. }) => {
                self.abort_handoff(index, abort.handoff);
                Ok(())
            }
            (Request::Fetch(fetch), Role::Control { .. }) => {
                self.fetch(index, &fetch);
                Ok(())
            }
            _ => Err(Reason::Malformed),
        }
    }

    /// `version`: that both speak.
    fn welcome(&mut self, index: usize, channel: Channel, version: u16) -> Result<(), Reason> {
        let counters = WorkerCounters::new().map_err(|_| Reason::Limit)?;
        let server_user = self.servers[index].caller.credentials.uid;
        let is_own = |server: &Server| server.caller.credentials.uid == server_user && server.has_ring();
        let own = self.servers.iter().filter(|(_, server)| is_own(server)).count();
        // No user gets more than are left for others.
        let ring = match (&mut self.frontend, channel) {
            (Some(frontend), Channel::Control) if own < frontend.free_rings() => frontend.open_ring(server_user),
            _ => None,
        };
        let without = ring.is_none() && channel == Channel::Control && self.frontend.is_some();
        self.counts.rings_exhausted += u64::from(without);
        let server = &mut self.servers[index];
        let number = ring.as_ref().map_or(NO_RING, |(number, _)| *number);
        let welcome = Welcome {
            header: Welcome::HEADER,
            worker: server.worker,
            ring: number,
            version: version.into(),
            pad: 0,
            features: FEATURES,
        };
        let mut descriptors = vec![self.board.descriptor(), counters.descriptor()];
        descriptors.extend(ring.as_ref().map(|(_, ring)| ring.as_fd()));
        let sent = packets::send(&server.socket, welcome.as_bytes(), &descriptors);
        server.role = match channel {
            Channel::Control => Role::Control { ring: number, counters, newest: None },
            Channel::Offers => Role::Offers { counters },
        };
        if channel == Channel::Offers {
            self.poll.remove(&server.socket);
        }
        if matches!(sent, Ok(true)) { Ok(()) } else { Err(Reason::Limit) }
    }

    /// Reads what offers connections hold. `number`: only until that offer is there.
    pub(crate) fn drain_offers(&mut self, number: u64) {
        let maker = self.server_of((number >> 32) as u32);
        let Some(index) = maker.filter(|index| self.servers[*index].takes_offers()) else {
            return;
        };
        for_a_turn(|| !self.offers.contains(number) && self.read_server(index));
    }

    pub(crate) fn drain_all_offers(&mut self) {
        let all = self.servers.iter().filter(|(_, server)| server.takes_offers()).map(|(index, _)| index);
        for index in all.collect::<Vec<_>>() {
            for_a_turn(|| self.read_server(index));
        }
    }

    fn add_offer(&mut self, offer: shunt_wire::local::Offer, file: File) -> Result<(), Reason> {
        self.counts.offers += 1;
        // Nobody could claim it. The file closes here.
        if !self.board.knows(offer.peer as usize) {
            self.counts.offers_to_strangers += 1;
            return Ok(());
        }
        if !self.has_descriptors() {
            self.counts.offers_without_descriptor += 1;
            return Ok(());
        }
        self.pressure.note_offer(offer.length);
        self.offers.add(offer, file, self.now)
    }

    /// A connection by its number: in claims, and in the upper half of offers' numbers.
    pub(crate) fn server_of(&self, worker: u32) -> Option<usize> {
        self.servers.iter().find(|(_, server)| server.worker == worker).map(|(index, _)| index)
    }

    /// The same, if that hands off: a peer may name any.
    pub(crate) fn owner_of(&self, worker: u32) -> Option<usize> {
        self.server_of(worker).filter(|index| matches!(self.servers[*index].role, Role::Control { .. }))
    }

    /// Tells all servers that hand off: the handoff's own knows it, and no other does.
    pub(crate) fn tell_all_servers(&mut self, handoff: u64, reason: Reason) {
        self.count_refusal(reason);
        let all = self.servers.iter().filter(|(_, server)| matches!(server.role, Role::Control { .. }));
        for index in all.map(|(index, _)| index).collect::<Vec<_>>() {
            self.send_ended(index, NO_PEER, handoff, reason);
        }
    }

    /// Tells a server that this agent has ended a handoff or fetch.
    pub(crate) fn tell_server(&mut self, index: usize, handoff: u64, reason: Reason) {
        self.pass_on_end(index, NO_PEER, handoff, reason);
    }

    /// Tells a server how a handoff or fetch ended, and who says so.
    pub(crate) fn pass_on_end(&mut self, index: usize, peer: u32, handoff: u64, reason: Reason) {
        self.count_refusal(reason);
        self.send_ended(index, peer, handoff, reason);
    }

    fn send_ended(&mut self, index: usize, peer: u32, handoff: u64, reason: Reason) {
        let Some(server) = self.servers.get(index) else {
            return;
        };
        let ended = Ended { header: Ended::HEADER, handoff, reason: reason as u32, peer };
        if !matches!(packets::send(&server.socket, ended.as_bytes(), &[]), Ok(true)) {
            self.counts.unread += 1;
            tracing::warn!("a server does not read what its agent tells it");
        }
    }

    fn remove_server(&mut self, index: usize) -> bool {
        let server = self.servers.remove(index);
        if let (Role::Control { ring, newest, .. }, Some(frontend)) = (&server.role, &mut self.frontend) {
            frontend.close_ring(*ring);
            self.end_left_regions(*ring, *newest);
        }
        self.counts.keep(server.counters());
        self.drop_fetches_of(index);
        self.forget_questions_of(server.worker);
        false
    }
}

impl Server {
    fn takes_offers(&self) -> bool {
        matches!(self.role, Role::Offers { .. })
    }

    /// Its completion ring's number, where it hands off.
    pub(crate) fn ring(&self) -> Option<u32> {
        match self.role {
            Role::Control { ring, .. } => Some(ring),
            Role::Unknown | Role::Offers { .. } => None,
        }
    }

    fn has_ring(&self) -> bool {
        self.ring().is_some_and(|ring| ring != NO_RING)
    }

    pub(crate) fn counters(&self) -> Option<&WorkerCounters> {
        match &self.role {
            Role::Control { counters, .. } | Role::Offers { counters } => Some(counters),
            Role::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many a user gets that asks without end, where others have some already.
    fn taken(others: usize, limit: usize) -> usize {
        (0..).find(|own| !may_have_one_more(*own, others + own, limit)).expect("an end")
    }

    #[test]
    fn a_user_gets_as_many_connections_as_are_left_for_others() {
        assert_eq!((taken(0, 1024), taken(512, 1024)), (512, 256));
        assert_eq!((taken(1020, 1024), taken(1024, 1024)), (LEAST_OF_A_USER, LEAST_OF_A_USER));
    }

    #[test]
    fn a_server_that_offers_without_end_leaves_others_their_turn() {
        let mut read = 0;
        for_a_turn(|| {
            read += 1;
            true
        });
        assert_eq!(read, OFFERS_IN_A_TURN);
        let mut left = 3;
        for_a_turn(|| {
            left -= 1;
            left > 0
        });
        assert_eq!(left, 0, "until there is no more");
    }
}
