//! Connections of this machine's servers. A server has a control connection, for handoffs and fetches, and may have
//! another one for offers. A control connection is read when it is ready. An offers connection is read ten times a
//! second, and at once when another agent's message names one of its unread offers. So making an offer wakes nobody. A
//! *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs. A *turn* is one pass
//! of the event loop. An *offer* is a payload that a server holds ready, and a *claim* is another agent's message that
//! asks for it. A *handoff* lets a backend send a payload on the connection of a server's client. A *fetch* brings the
//! payload through both agents to the server instead.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_logic::Told;
use shunt_logic::limits::Load;
use shunt_logic::servers::{Caller, May, Refusal};
use shunt_sys::sockopt::PeerCredentials;
use shunt_wire::local::{Channel, Ended, MAX_PACKET_BYTES, NO_PEER, Reason, Request, Welcome};
use shunt_wire::peer::Frame;
use zerocopy::IntoBytes;

use super::Daemon;
use crate::os::poll::{Interest, Source};
use crate::servers::board::WorkerCounters;
use crate::servers::connection::Connection;
use shunt_host::packets::{self, Received};

/// Value of `shunt_welcome.ring` for a connection without a ring.
const NO_RING: u32 = u32::MAX;
/// Optional features of the protocol that this agent has, one per bit (`struct shunt_welcome`). There are none yet.
const FEATURES: u64 = 0;
/// Most packets with offers that are read from one connection before other connections have their turn. A socket holds
/// fewer at a time.
const OFFERS_IN_A_TURN: usize = 4096;

/// Calls `read` until it returns false, at most [`OFFERS_IN_A_TURN`] times, because a server may offer without end.
fn for_a_turn(mut read: impl FnMut() -> bool) {
    for _ in 0..OFFERS_IN_A_TURN {
        if !read() {
            return;
        }
    }
}

/// Contents of the WELCOME to a server.
pub(crate) struct Welcomed {
    pub(crate) channel: Channel,
    pub(crate) ring: Option<u32>,
    pub(crate) user: u32,
    pub(crate) worker: u32,
    pub(crate) version: u16,
}

impl Daemon {
    /// Takes the connection of a process that has just connected.
    pub(crate) fn add_server(&mut self, socket: OwnedFd) {
        match self.callers.ask(&socket) {
            Ok(caller) => self.add_caller(socket, caller),
            Err(error) => tracing::error!(%error, "cannot read who connected (SO_PEERCRED); the connection is closed"),
        }
    }

    /// Makes a connection between this agent and a program under `shunt run`, and treats the program as a server.
    /// Returns the program's end. The store has already asked the kernel for the program's `credentials`.
    ///
    /// # Errors
    /// Returns the kernel's error of socketpair(2).
    pub(crate) fn connect_program(&mut self, credentials: PeerCredentials) -> io::Result<OwnedFd> {
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        let PeerCredentials { pid, uid, gid } = credentials;
        self.add_caller(ours, Caller { pid, uid, gid, may: May::Serve });
        Ok(theirs)
    }

    fn add_caller(&mut self, socket: OwnedFd, caller: Caller) {
        let added = self.event(|logic, call| logic.add_server(caller, call));
        let server = match added {
            Ok(server) => server,
            Err(Refusal::NotAllowed) => {
                // The process gets one clear answer, and nothing that it sends is read.
                let reason = Reason::NotAllowed as u32;
                let ended = Ended { header: Ended::HEADER, handoff: 0, reason, peer: NO_PEER };
                let _ = packets::send(&socket, ended.as_bytes(), &[]);
                return;
            }
            Err(Refusal::Full | Refusal::Share { .. }) => return,
        };
        if let Err(error) = self.poll.set(&socket, Source::Local(server), Interest::Readable) {
            tracing::error!(%error, "cannot watch a server's connection");
            return self.event(|logic, call| logic.remove_server(server, call));
        }
        self.connections.insert(server, Connection::new(socket));
    }

    /// Handles a connection that is ready: sends messages that waited for room, and reads one packet. If there are more
    /// packets, the loop is woken again, because the poll is level-triggered. A server puts all messages of one pass of
    /// its own event loop into one packet.
    pub(crate) fn on_server(&mut self, server: usize) {
        if let Some(connection) = self.connections.get_mut(server).filter(|connection| connection.has_unsent()) {
            connection.send_unsent();
            if !connection.has_unsent() {
                let _ = self.poll.set(&connection.socket, Source::Local(server), Interest::Readable);
            }
        }
        self.read_server(server);
    }

    /// Reads one packet and processes its messages. Returns whether there may be more packets.
    fn read_server(&mut self, server: usize) -> bool {
        let Some(connection) = self.connections.get(server) else { return false };
        let mut buffer = self.packet.take().unwrap_or_else(|| Box::new([0; MAX_PACKET_BYTES]));
        let (bytes, goes_on) = match packets::receive(&connection.socket, &mut buffer) {
            Ok(Received::Packet(bytes, mut file, mut others)) => {
                let goes_on = self.obey(server, &buffer[..bytes], &mut file, false);
                others.extend(file);
                self.close_files(others);
                (bytes, goes_on)
            }
            Ok(Received::Cut(bytes)) => (bytes, self.obey(server, &buffer[..bytes], &mut None, true)),
            Ok(Received::Nothing) => (0, false),
            Ok(Received::Closed) => (0, self.remove_server(server)),
            Err(error) => {
                tracing::warn!(%error, "a server's connection failed");
                (0, self.remove_server(server))
            }
        };
        buffer[..bytes].fill(0); // it may hold keys
        self.packet = Some(buffer);
        goes_on
    }

    /// Processes the messages of a packet. Takes `file` if an offer keeps it. `was_cut` says that the kernel has
    /// dropped the packet's descriptors. Returns whether the server stays.
    fn obey(&mut self, server: usize, mut packet: &[u8], file: &mut Option<File>, was_cut: bool) -> bool {
        let mut asks_for_stats = false;
        while !packet.is_empty() {
            let done = Request::parse(packet).and_then(|(request, rest)| {
                packet = rest;
                // Counters take a while to collect. So a packet may ask for them once.
                if matches!(request, Request::Stats) && std::mem::replace(&mut asks_for_stats, true) {
                    return Err(Reason::Malformed);
                }
                self.event(|logic, call| logic.request(server, &request, file, was_cut, call))
            });
            if let Err(reason) = done {
                self.event(|logic, call| logic.malformed(server, reason, call));
            }
            if self.connections.get(server).is_none() {
                return false;
            }
        }
        true
    }

    fn remove_server(&mut self, server: usize) -> bool {
        self.event(|logic, call| logic.remove_server(server, call));
        self.close_server(server);
        false
    }

    /// Closes a connection. Its counters are added to the sums in `gone`.
    pub(crate) fn close_server(&mut self, server: usize) {
        if let Some(connection) = self.connections.remove(server) {
            self.gone.keep(connection.counters.as_ref());
        }
    }

    /// Answers a server's HELLO.
    pub(crate) fn welcome(&mut self, server: usize, welcomed: &Welcomed) {
        let Welcomed { channel, ring: number, user, worker, version } = *welcomed;
        let ring = number.zip(self.kernel.frontend.as_mut());
        let ring = ring.and_then(|(number, frontend)| frontend.make_ring(number, user));
        if number.is_some() && ring.is_none() {
            self.logic.ring_failed(server);
        }
        let sent = WorkerCounters::new().and_then(|counters| {
            let Some(connection) = self.connections.get_mut(server) else { return Ok(false) };
            let ring_number = number.filter(|_| ring.is_some()).unwrap_or(NO_RING);
            let welcome = Welcome {
                header: Welcome::HEADER,
                worker,
                ring: ring_number,
                version: version.into(),
                pad: 0,
                features: FEATURES,
            };
            let mut descriptors = vec![self.board.descriptor(), counters.descriptor()];
            descriptors.extend(ring.as_ref().map(|ring| ring.as_fd()));
            let sent = packets::send(&connection.socket, welcome.as_bytes(), &descriptors);
            if channel == Channel::Offers {
                self.poll.remove(&connection.socket);
            }
            connection.counters = Some(counters);
            sent
        });
        if !matches!(sent, Ok(true)) {
            self.event(|logic, call| logic.malformed(server, Reason::Limit, call));
        }
    }

    /// Sends a message to a server, now or once its socket has room.
    pub(crate) fn tell_server(&mut self, server: usize, told: &Told) {
        let Some(connection) = self.connections.get_mut(server) else { return };
        let had_unsent = connection.has_unsent();
        if connection.tell(told) {
            if connection.has_unsent() && !had_unsent {
                let _ = self.poll.set(&connection.socket, Source::Local(server), Interest::Both);
            }
            return;
        }
        self.logic.unread();
        if matches!(told, Told::Ended(_)) {
            tracing::warn!("a server does not read its agent's messages");
        }
    }

    /// Reads the offers connection of the offer that a frame names, until this offer has been read, or no packet is
    /// left. Reads at most [`OFFERS_IN_A_TURN`] packets.
    pub(crate) fn read_missing_offer(&mut self, frame: &Frame) {
        let Some((server, number)) = self.logic.missing_offer(frame) else { return };
        for_a_turn(|| !self.logic.backend.offers.contains(number) && self.read_server(server));
    }

    /// Reads all offers connections.
    pub(crate) fn read_all_offers(&mut self) {
        let all = self.logic.shared.servers.iter().filter(|(_, server)| server.takes_offers());
        for server in all.map(|(server, _)| server).collect::<Vec<_>>() {
            for_a_turn(|| self.read_server(server));
        }
    }

    /// Returns the number of present handoffs to each peer: the sum over all servers' counters.
    pub(crate) fn handoffs_by_peer(&self) -> Vec<u64> {
        let mut all = vec![0; self.config.peers.len()];
        for counters in self.connections.iter().filter_map(|(_, connection)| connection.counters.as_ref()) {
            for (used, handoffs) in all.iter_mut().zip(counters.read().handoffs) {
                *used += u64::from(handoffs);
            }
        }
        all
    }

    /// Returns, for each peer, the numbers of payloads and of bytes that are being sent.
    pub(crate) fn sending_by_peer(&self) -> Vec<Load> {
        let mut all = vec![Load::default(); self.config.peers.len()];
        for (peer, bytes) in self.kernel.senders.iter().flat_map(|senders| senders.loads()) {
            all[peer as usize] += Load::sending(bytes);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
