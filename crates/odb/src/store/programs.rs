//! A program's connection at the store: the questions that it asks ([`Ask`]), and the descriptors that it gets. The
//! program keeps the connection open; when the connection ends, the program is considered ended. A *segment* is memory
//! that the store leases to a program. A connection may become an *entrance*, which child processes inherit, to reach
//! the store by it. The *agent* is Shunt's daemon on each machine, and the store is a thread of it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketType};
use shunt_sys::packet::Packet;
use shunt_sys::sockopt::{PeerCredentials, peer_credentials};
use zerocopy::{FromZeros, IntoBytes};

use super::caller::Caller;
use super::messages::{Ask, Told, ask, outcome};
use super::packets::{receive, send};
use crate::records::Sealing;
use crate::reference::Holder;

/// Most segments that one program may have.
const SEGMENTS_MAX: usize = 4;
/// Most connections of one program to other machines' stores that the store keeps.
const REACHED_MAX: usize = 128;

/// Whether the kernel names the sender of a packet. It does not if the sender is in another PID namespace.
fn is_known(sender: &PeerCredentials) -> bool {
    sender.pid != 0
}

/// Whether a packet at an entrance brings one end of a pair of sockets that its sender has made itself. A pair that the
/// sender got from a more privileged process would be served as that process's user, because SO_PEERCRED names the
/// maker. Other packets at an entrance are ignored.
fn is_by_its_maker(packet: &Packet) -> bool {
    let Packet { bytes, descriptor: Some(socket), sender: Some(sender), .. } = packet else { return false };
    *bytes == size_of::<Ask>()
        && socket_domain(socket) == Ok(AddressFamily::UNIX)
        && socket_type(socket) == Ok(SocketType::SEQPACKET)
        && is_known(sender)
        && peer_credentials(socket).is_ok_and(|maker| maker == *sender)
}

/// Question of a program, with the descriptor that came with it.
pub(crate) struct Question {
    pub(crate) ask: Ask,
    pub(crate) descriptor: Option<OwnedFd>,
    pub(crate) sender: Option<PeerCredentials>,
}

/// Connection of a program.
pub(crate) struct Program {
    pub(crate) socket: OwnedFd,
    pub(crate) caller: Caller,
    pub(crate) counts: bool,
    pub(crate) segments: Vec<u32>,
    /// Connections to other machines' stores. They are kept so that they can be ended when the agents of those stores
    /// are no longer trusted.
    reached: HashMap<Holder, OwnedFd>,
    /// Whether the program waits for the answer to a REACH or HAND_OFF. If it asks another question before it has the
    /// answer, the store ends its connection.
    pub(crate) waits: bool,
    /// Whether the connection is an entrance. Programs of any user may have an entrance. So an entrance only admits
    /// programs, each as the user that the program is then.
    pub(crate) is_entrance: bool,
}

impl Program {
    pub(crate) fn new(socket: OwnedFd, caller: Caller) -> Self {
        Self {
            socket,
            caller,
            counts: false,
            segments: Vec::new(),
            reached: HashMap::new(),
            waits: false,
            is_entrance: false,
        }
    }

    /// Receives the program's next question; `None` if there is none now.
    ///
    /// # Errors
    /// The program has ended, or has sent something that is no question.
    pub(crate) fn next_question(&mut self) -> io::Result<Option<Question>> {
        // One byte more than a question, so that a longer packet is noticed.
        let mut packet = [0; size_of::<Ask>() + 1];
        let Some(got) = receive(&self.socket, &mut packet, RecvFlags::DONTWAIT)? else { return Ok(None) };
        // The end of the connection has no sender. Any other invalid packet at an entrance becomes a question that the
        // store ignores.
        if self.is_entrance && got.sender.is_some() && !is_by_its_maker(&got) {
            return Ok(Some(Question { ask: Ask::new_zeroed(), descriptor: None, sender: None }));
        }
        let ask = packet.first_chunk::<{ size_of::<Ask>() }>().filter(|_| got.bytes == size_of::<Ask>());
        match ask {
            Some(bytes) if !self.waits => {
                let Packet { descriptor, sender, .. } = got;
                Ok(Some(Question { ask: zerocopy::transmute!(*bytes), descriptor, sender }))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// User as whom the program was admitted, if the sender of a question is known, and is still that user. A process
    /// of another user gets nothing that belongs to the admitted user, even if it has this connection.
    pub(crate) fn still(&self, sender: Option<&PeerCredentials>) -> Option<u32> {
        let connected = peer_credentials(&self.socket).ok()?;
        let is_the_same = sender.is_some_and(|sender| is_known(sender) && sender.uid == connected.uid);
        is_the_same.then_some(self.caller.user)
    }

    /// Whether the connection may become an entrance: the program has got no segment, no connection to another
    /// machine's store and no memory for counts over it.
    pub(crate) fn is_fresh(&self) -> bool {
        self.segments.is_empty() && self.reached.is_empty() && !self.counts
    }

    /// Whether the program may have one more segment.
    pub(crate) fn may_lease(&self) -> bool {
        self.segments.len() < SEGMENTS_MAX
    }

    /// Answers HAND_OFF with the connection that the agent has given; `None`: the agent gives none.
    pub(crate) fn lets_hand_off(&mut self, own: Holder, connection: Option<OwnedFd>) {
        self.waits = false;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask::HAND_OFF.into(), own);
        if connection.is_none() {
            told.outcome = outcome::NOT_THERE.into();
        }
        let _ = self.tell(&told, connection.as_ref().map(AsFd::as_fd));
    }

    /// Answers REACH with the connection that the agent has made; `None`: it could not make one.
    pub(crate) fn reached(&mut self, own: Holder, holder: Holder, connection: Option<(OwnedFd, Box<Sealing>)>) {
        self.waits = false;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask::REACH.into(), own);
        let Some((socket, sealing)) = connection else {
            told.outcome = outcome::NOT_THERE.into();
            let _ = self.tell(&told, None);
            return;
        };
        told.sealing = *sealing;
        // If the program does not receive the descriptor, the store's copy is the last, and closing it ends the
        // connection.
        if self.tell(&told, Some(socket.as_fd())).is_ok() && self.reached.len() < REACHED_MAX {
            self.reached.insert(holder, socket);
        }
    }

    /// Shuts down the program's connections to other machines' stores, in both directions.
    pub(crate) fn end_connections(&mut self) {
        for (_, socket) in self.reached.drain() {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
    }

    /// Sends the program an answer.
    ///
    /// # Errors
    /// Returns the kernel's error of sendmsg(2): the program does not receive.
    pub(crate) fn tell(&self, told: &Told, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send(&self.socket, told.as_bytes(), descriptor, SendFlags::DONTWAIT)
    }
}
