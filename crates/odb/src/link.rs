//! A program's connection with its machine's *agent* (Shunt's daemon on each machine), for handoffs (include/shunt.h).
//! By it, the program learns which machines can send to its clients, what the kernel reports about a connection, and
//! what agents report about handoffs.
//!
//! A *peer* is another machine's agent, and the *board* is the memory in which this machine's agent lists its peers. In
//! a *handoff*, a peer sends a payload (a body that some program has written) to a client. A *region* is the range of
//! the client connection's sequence numbers that the payload takes. The *steering programs* are the agent's BPF
//! programs, without which nothing can be handed off. A *ring* is a BPF ring buffer by which the kernel tells this
//! program what becomes of its regions. A *store* has the payloads of a machine's programs, and a payload's *holder* is
//! the store that has it.

mod standing;

use std::io::{self, IoSliceMut};
use std::mem::{MaybeUninit, offset_of};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, getpeername, getsockname, recv, recvmsg, send,
};
use shunt_sys::odb;
use shunt_sys::own::OwnFd;
use shunt_sys::ringbuf::RingBuffer;
use shunt_sys::shared::SharedMemory;
use shunt_wire::Endpoint;
use shunt_wire::local::{
    Abort, Answer, Ask, BoardHead, BoardPeer, Cancel, Channel, Counters, Ended, Event, Handoff, Header,
    MAX_PACKET_BYTES, NO_PEER, Reason, State, Welcome, closed, kind,
};
use shunt_wire::options::Begin;
use shunt_wire::parts::Parts;
use shunt_wire::versions::Growing;
use zerocopy::{FromBytes, FromZeros, IntoBytes};
use zeroize::Zeroize;

use crate::reference::Holder;
pub use standing::Standing;
use standing::Standings;

/// Longest time that the agent may take to answer.
const SILENCE: Duration = Duration::from_secs(2);
/// Value of `shunt_board_peer.state` for a peer with which this machine's agent has a session (a working connection).
const UP: u32 = 1;
/// Value of `shunt_welcome.ring` if the agent has no ring left.
const NO_RING: u32 = u32::MAX;

/// Report about a handoff: how it has ended, or that it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The client has all of the payload.
    Complete,
    /// The client has reset its connection.
    Reset,
    /// No machine sends the payload any more.
    Ended {
        /// Why the handoff ended.
        reason: Reason,
        /// Peer that reported it; [`NO_PEER`]: this machine's agent.
        by: u32,
    },
    /// The handoff waits until its machine can send more.
    Waits {
        /// Peer that reported it.
        by: u32,
    },
}

impl Outcome {
    /// Whether this can be the outcome of a handoff to `peer`. Reports from other peers do not count.
    #[must_use]
    pub fn concerns(self, peer: u32) -> bool {
        match self {
            Self::Ended { by, .. } => by == peer || by == NO_PEER,
            Self::Waits { by } => by == peer,
            Self::Complete | Self::Reset => true,
        }
    }
}

/// A machine that can send payloads to this program's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    index: u32,
    epoch: u32,
}

/// Connection with the agent. It lives as long as the process hands off.
#[derive(Debug)]
pub struct Link {
    socket: OwnFd,
    board: SharedMemory,
    counters: SharedMemory,
    ring: RingBuffer,
    number: u32,
    /// Agent's number of this connection. It is the upper half of the names of all handoffs over it.
    worker: u32,
    made: u32,
    /// Stores of the peers, by index on the board.
    holders: Vec<Holder>,
    /// Outcomes that were read and that the program has not taken yet, each with its handoff's name.
    outcomes: Vec<(u64, Outcome)>,
    standings: Standings,
}

impl Link {
    /// Opens a link on a connection that the agent has given (`store::client::Connection::agent`).
    ///
    /// # Errors
    /// Returns the kernel's error of a system call, or another error if the agent does not answer, is of another
    /// version, or cannot hand off now.
    pub fn open(socket: OwnedFd) -> io::Result<Self> {
        let blocking = rustix::fs::fcntl_getfl(&socket)? - rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&socket, blocking)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(SILENCE))?;
        send(&socket, Channel::Control.hello().as_bytes(), SendFlags::NOSIGNAL)?;
        let (welcome, mut descriptors) = receive_welcome(&socket)?;
        let mut next = || descriptors.next().ok_or(io::Error::other("the agent does not hand off"));
        let (board, counters, ring) = (next()?, next()?, next()?);
        if welcome.ring == NO_RING {
            return Err(io::Error::other("the agent has no completion ring left"));
        }
        // The count of handoffs begins at a random number. An agent that was started again numbers its connections
        // anew, and names of handoffs that outlived the old agent must not be used again.
        let mut first = [0; 4];
        rustix::rand::getrandom(&mut first, rustix::rand::GetRandomFlags::empty())?;
        let mut link = Self {
            socket: OwnFd::new(socket),
            board: SharedMemory::open_to_read(board)?,
            counters: SharedMemory::open(counters)?,
            ring: RingBuffer::new(&ring)?,
            number: welcome.ring,
            worker: welcome.worker,
            made: u32::from_ne_bytes(first),
            holders: Vec::new(),
            outcomes: Vec::new(),
            standings: Standings::default(),
        };
        link.holders = (0..link.peers()?).map(|index| link.name(index)).collect();
        Ok(link)
    }

    /// Number of the board's entries for peers.
    fn peers(&self) -> io::Result<usize> {
        let (at, bytes) =
            (self.board_word(offset_of!(BoardHead, peers_at)), self.board_word(offset_of!(BoardHead, peer_bytes)));
        let fits = at >= size_of::<BoardHead>() && bytes >= size_of::<BoardPeer>() && at % 4 == 0 && bytes % 4 == 0;
        let peers = self.board.len().checked_sub(at).map(|rest| rest / bytes.max(1));
        peers
            .filter(|_| fits)
            .ok_or(io::Error::new(io::ErrorKind::InvalidData, "the agent's board is of another version"))
    }

    fn board_word(&self, at: usize) -> usize {
        self.word(at) as usize
    }

    /// Offset of a peer's entry, with the agent's entry size: a newer agent may have longer entries than this library
    /// knows.
    fn peer_at(&self, index: usize) -> usize {
        self.board_word(offset_of!(BoardHead, peers_at)) + index * self.board_word(offset_of!(BoardHead, peer_bytes))
    }

    /// Name of a peer's store. Names of peers never change.
    fn name(&self, index: usize) -> Holder {
        let mut name = [0; shunt_wire::local::NAME_BYTES];
        self.board.read(self.peer_at(index) + offset_of!(BoardPeer, name), &mut name);
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Holder::named(&String::from_utf8_lossy(&name[..end]))
    }

    fn word(&self, at: usize) -> u32 {
        self.board.word(at).load(Ordering::Acquire)
    }

    /// Whether the agent is running.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.word(offset_of!(BoardHead, alive)) == 1
    }

    /// Returns the machine of the store `holder`, if it can send the store's bytes to clients now. Some machines have a
    /// store and do not send.
    #[must_use]
    pub fn sender(&self, holder: Holder) -> Option<Sender> {
        let index = self.holders.iter().position(|known| *known == holder)?;
        let at = self.peer_at(index);
        let epoch = self.word(at + offset_of!(BoardPeer, epoch));
        let is_closed = self.word(offset_of!(BoardHead, closed)) & closed::HANDOFFS != 0;
        let is_up = self.word(at + offset_of!(BoardPeer, state)) == UP && epoch.is_multiple_of(2);
        let can_send = self.word(at + offset_of!(BoardPeer, families)) != 0;
        (is_up && can_send && !is_closed && self.is_alive()).then_some(Sender { index: index as u32, epoch })
    }

    /// Whether a machine agrees to send to clients in the name of this connection's server (with its address as
    /// source). Asks the machine if its answer is not known.
    ///
    /// # Errors
    /// Returns the kernel's error: `socket` is not connected, or the agent is gone.
    pub fn standing(&mut self, socket: impl AsFd, sender: Sender) -> io::Result<Standing> {
        let server = Endpoint::from(SocketAddr::try_from(getsockname(&socket)?)?);
        match self.standings.of(sender, server.socket_addr()) {
            Standing::Unknown(Some(question)) => {
                let client = getpeername(&socket)?.ok_or(io::ErrorKind::NotConnected)?;
                let client = Endpoint::from(SocketAddr::try_from(client)?);
                self.ask(question, sender, client, server)?;
            }
            Standing::Unknown(None) => self.hear()?,
            known => return Ok(known),
        }
        Ok(self.standings.of(sender, server.socket_addr()))
    }

    fn ask(&self, handoff: u64, sender: Sender, client: Endpoint, server: Endpoint) -> io::Result<()> {
        let Sender { index: peer, epoch } = sender;
        let (client_address, server_address) = (client.address, server.address);
        let (client_port, server_port, pad) = (client.port_be, server.port_be, 0);
        let header = Ask::HEADER;
        let ask = Ask { header, handoff, peer, epoch, client_address, server_address, client_port, server_port, pad };
        self.tell(ask.as_bytes())
    }

    /// Notes that a handoff waits until its machine can send more. The machine is given no more handoffs for a while.
    pub fn hold_back(&mut self, handoff: &Handoff) {
        let sender = Sender { index: handoff.peer, epoch: handoff.epoch };
        self.standings.hold_back(sender, handoff.flow.server().socket_addr());
    }

    /// Begins a region of `length` bytes on the socket's connection, after the bytes that were written there.
    ///
    /// # Errors
    /// Returns the kernel's error: this connection cannot be handed off, or not now. `WouldBlock`: there is no proof
    /// yet that the connection's packets pass the steering programs (bpf/proof.h).
    pub fn begin(&mut self, socket: impl AsFd, sender: Sender, length: u64) -> io::Result<Handoff> {
        self.made = self.made.wrapping_add(1);
        let handoff = u64::from(self.worker) << 32 | u64::from(self.made);
        let begun = odb::append(&socket, &Begin { peer: sender.index, ring: self.number, handoff, length });
        if let Err(error) = begun {
            let is_unproven = self.answer(handoff).is_some_and(|state| state.status == State::UNPROVEN);
            return Err(if is_unproven { io::ErrorKind::WouldBlock.into() } else { error });
        }
        let Some(state) = self.answer(handoff) else {
            odb::undo(socket, handoff)?;
            return Err(io::Error::other("the kernel's answer is lost"));
        };
        self.count(sender.index, 1);
        Ok(Handoff::of(&state, sender.index, sender.epoch, length))
    }

    /// Extends the region of a handoff by `bytes` bytes. The handoff must be the last one of its connection.
    ///
    /// # Errors
    /// Returns the kernel's error: something was written behind the region.
    pub fn grow(&self, socket: impl AsFd, handoff: &Handoff, bytes: u64) -> io::Result<()> {
        let (peer, ring, name) = (handoff.peer, self.number, handoff.handoff);
        odb::append(socket, &Begin { peer, ring, handoff: name, length: bytes })?;
        Ok(())
    }

    /// Tells the agent of a handoff that was begun, so that the holder's machine sends the payload.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2): the agent is gone, or does not read.
    pub fn claim(&self, handoff: &Handoff, parts: &Parts) -> io::Result<()> {
        let mut packet = handoff.emit_with(parts);
        let told = self.tell(&packet);
        // The packet may contain keys.
        packet.zeroize();
        told
    }

    /// Reports a handoff that no machine sends, and whose connection this program does not have any more.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2).
    pub fn cancel(&self, handoff: u64) -> io::Result<()> {
        self.tell(Cancel { header: Cancel::HEADER, handoff }.as_bytes())
    }

    /// Gives a handoff up: the machine that sends its payload need not send any more.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2).
    pub fn abort(&self, handoff: u64) -> io::Result<()> {
        self.tell(Abort { header: Abort::HEADER, handoff }.as_bytes())
    }

    fn tell(&self, message: &[u8]) -> io::Result<()> {
        send(&self.socket, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }

    /// Notes that a handoff is over.
    pub fn over(&self, handoff: &Handoff) {
        self.count(handoff.peer, u32::MAX);
    }

    fn count(&self, peer: u32, by: u32) {
        let at = offset_of!(Counters, handoffs) + 4 * peer as usize;
        self.counters.word(at).fetch_add(by, Ordering::Relaxed);
    }

    /// Reads the ring, and keeps the outcomes found there. Returns the state of `handoff`'s connection, if the kernel
    /// has written it there.
    fn look(&mut self, handoff: u64) -> Option<State> {
        let (mut found, outcomes) = (None, &mut self.outcomes);
        self.ring.drain(|record| {
            let Ok((event, _)) = Event::read_from_prefix(record) else { return };
            match event.kind {
                Event::COMPLETE => outcomes.push((event.handoff, Outcome::Complete)),
                Event::RESET => outcomes.push((event.handoff, Outcome::Reset)),
                Event::STATE if event.handoff == handoff => {
                    found = State::read_from_prefix(record).ok().map(|(state, _)| state);
                }
                _ => {}
            }
        });
        found
    }

    /// Returns the state that the kernel wrote into the ring when the region began, or was refused. Records that other
    /// processors are still writing may precede the state's record; then this waits for them. `None`: it did not come
    /// in time.
    fn answer(&mut self, handoff: u64) -> Option<State> {
        const LOOKS: u32 = 10_000;
        (0..LOOKS).find_map(|look| {
            if look > 0 {
                rustix::thread::sched_yield();
            }
            self.look(handoff)
        })
    }

    /// Takes the outcomes that the kernel and the agents have reported. Makes no system call.
    pub fn outcomes(&mut self) -> Vec<(u64, Outcome)> {
        self.look(0);
        std::mem::take(&mut self.outcomes)
    }

    /// Reads the reports of agents that have come over the connection.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn hear(&mut self) -> io::Result<()> {
        let mut packet = [0; MAX_PACKET_BYTES];
        loop {
            let got = match recv(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((got, _)) => got,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            self.take_message(&packet[..got]);
        }
    }

    fn take_message(&mut self, message: &[u8]) {
        let Ok((Header { kind, .. }, _)) = Header::read_from_prefix(message) else { return };
        if kind == kind::ENDED
            && let Ok((Ended { handoff, reason, peer, .. }, _)) = Ended::read_from_prefix(message)
        {
            let reason = Reason::from_number(reason).unwrap_or(Reason::Malformed);
            self.outcomes.push((handoff, Outcome::Ended { reason, by: peer }));
        } else if kind == kind::ANSWER
            && let Ok((answer, _)) = Answer::read_from_prefix(message)
            && !self.standings.hear(&answer)
        {
            self.outcomes.push((answer.handoff, Outcome::Waits { by: answer.peer }));
        }
    }
}

type Descriptors = std::vec::IntoIter<OwnedFd>;

fn receive_welcome(socket: &OwnedFd) -> io::Result<(Welcome, Descriptors)> {
    let mut welcome = Welcome::new_zeroed();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let parts = &mut [IoSliceMut::new(welcome.as_mut_bytes())];
        match recvmsg(socket, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(those) = message {
            descriptors.extend(those);
        }
    }
    if got.bytes < Welcome::LEAST || welcome.header.kind != kind::WELCOME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the agent's answer cannot be read"));
    }
    Ok((welcome, descriptors.into_iter()))
}

/// Whether a reason means that not a byte was sent.
#[must_use]
pub fn is_refusal(reason: Reason) -> bool {
    use Reason::{Busy, Limit, Malformed, NotAllowed, UnknownOffer, Unreachable};
    matches!(reason, UnknownOffer | Limit | Malformed | Busy | NotAllowed | Unreachable)
}

const _: () = assert!(align_of::<AtomicU32>() == 4 && size_of::<BoardHead>().is_multiple_of(4));
const _: () = assert!(size_of::<BoardPeer>().is_multiple_of(4));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_handoffs_backend_and_this_agent_can_end_it() {
        let ended = |by| Outcome::Ended { reason: Reason::FileChanged, by };
        assert!(ended(3).concerns(3) && ended(NO_PEER).concerns(3));
        assert!(!ended(2).concerns(3) && !ended(2).concerns(NO_PEER));
        assert!(Outcome::Complete.concerns(3) && Outcome::Reset.concerns(3));
    }
}
