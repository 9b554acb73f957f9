//! Actions: steps that the logic asks the daemon to carry out. The daemon carries them out in their order, before the
//! next event. No action holds keys of clients' TLS connections or of offers. A *peer* is another machine's agent. A
//! *server* is a program of this machine that is connected to the agent. A *sender* is this machine's kernel socket for
//! a client of a peer. A *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs.
//! A *handoff* lets a backend send a payload on the connection of a frontend's client. A *region* is the range of
//! sequence numbers that the payload takes there. A *fetch* brings a payload through both agents to the frontend's
//! server instead. The *board* is memory that the agent writes and servers read. The *digest* of a file is its SHA-256.
//! A *store* has the payloads of a machine's programs under `shunt run`.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use shunt_wire::local::{self, Channel, Offer};
use shunt_wire::peer::{self, Hello};
use zerocopy::IntoBytes;

use crate::board::Change;
use crate::machine::{ActiveRegion, Machine};

/// Handoffs as a backend names them: the peer's number, the worker number (the peer's number of a server's connection),
/// and the handoff's number.
pub type Given = HashSet<(u32, u32, u64)>;

/// A message for a server.
#[derive(Clone, Copy, Debug)]
pub enum Told {
    /// A handoff or fetch has ended without success.
    Ended(local::Ended),
    /// Answer to a server's question (ASK) whether a peer would send bytes of its store. Or the news that a handoff of
    /// such bytes has to wait.
    Answer(local::Answer),
    /// The digest of a file, or the news that it is unknown or no longer valid.
    Digest(local::Digest),
}

impl Told {
    /// Returns the message's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Ended(message) => message.as_bytes(),
            Self::Answer(message) => message.as_bytes(),
            Self::Digest(message) => message.as_bytes(),
        }
    }
}

/// Actions in their order. The buffer is reused, so that the queue needs no new memory for a handoff.
pub struct Actions<M: Machine>(VecDeque<Action<M>>);

impl<M: Machine> Default for Actions<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M: Machine> Actions<M> {
    /// Appends an action.
    pub fn push(&mut self, action: Action<M>) {
        self.0.push_back(action);
    }

    /// Takes the next action.
    pub fn pop(&mut self) -> Option<Action<M>> {
        self.0.pop_front()
    }
}

impl<M: Machine> Extend<Action<M>> for Actions<M> {
    fn extend<I: IntoIterator<Item = Action<M>>>(&mut self, actions: I) {
        self.0.extend(actions);
    }
}

/// One step that the daemon carries out.
pub enum Action<M: Machine> {
    /// Copy a part of the board into servers' memory.
    WriteBoard(Change),

    /// Connect to a peer, then call [`Logic::opened`](crate::Logic::opened) or
    /// [`Logic::lose_peer`](crate::Logic::lose_peer).
    Dial(usize),
    /// Close the connection with a peer, if there is one.
    HangUp(usize),

    /// Send a message to a server, now or once its socket has room. If the message cannot be kept until then, call
    /// [`Logic::unread`](crate::Logic::unread).
    Tell(usize, Told),
    /// Answer a server's HELLO with WELCOME. Descriptors of the board, of memory for the server's counters, and of its
    /// ring (if it gets one) go with this message.
    Welcome {
        /// The server.
        server: usize,
        /// Purpose of the server's connection.
        channel: Channel,
        /// Number of the ring to make, for processes of `user`. `None`: make no ring.
        ring: Option<u32>,
        /// User ID of the server's process.
        user: u32,
        /// The server's worker number.
        worker: u32,
        /// Version that both sides speak.
        version: u16,
    },
    /// Send the counters to a server.
    SendStats(usize),
    /// Close a server's connection.
    CloseServer(usize),
    /// Remove a ring from the kernel.
    CloseRing(u32),

    /// Have the BPF programs steer clients' ACKs to a peer's senders, as the peer's
    /// [`Steered`](crate::frontend::steered::Steered) says now.
    Steer(usize),
    /// Watch the routes to the addresses of a peer's senders (in its HELLO) from now on. Report the interfaces that the
    /// routes lead to.
    WatchRoutes(usize, Hello),
    /// Note in the kernel's table of client connections how many payload bytes may lie between two ACKs for a peer's
    /// sender.
    SetSpacing(usize, peer::Spacing),
    /// Note in the kernel's table of client connections that a client has acknowledged all of a payload.
    SetDelivered(usize, peer::Delivered),
    /// Mark a region as cancelled. The next packet that this machine sends on the client's connection then resets this
    /// connection.
    Cancel(ActiveRegion),

    /// Discard the senders of these handoffs, which the frontends have given up.
    Abort(Given),
    /// Let the senders of these handoffs send again. They have paused because their files no longer have the digests
    /// that were told, and the frontends' servers have forgotten these digests now.
    GoOn(Given),
    /// Discard the senders of a lost peer, except those whose whole payload is already in their send buffers.
    ForgetPeer(u32),
    /// Close files whose offers have expired, or cannot be fetched because the file has changed.
    CloseFiles(Vec<M::File>),

    /// Connect to a peer for a fetch, and send this request first.
    BeginFetch {
        /// Number of the fetch.
        fetch: usize,
        /// The peer.
        peer: usize,
        /// The request.
        request: peer::Fetch,
    },
    /// Give a server its end of a fetch's socket pair, then call [`Logic::fetch_moved`](crate::Logic::fetch_moved)
    /// whenever bytes move.
    DeliverFetch {
        /// Number of the fetch.
        fetch: usize,
        /// The server.
        server: usize,
        /// Message that goes with the descriptor.
        message: local::Fetched,
    },
    /// Forget a fetch of a server of this machine.
    DropFetch(usize),
    /// Send a payload to a peer that fetches it.
    ServeFetch {
        /// Number of the fetch.
        fetch: usize,
        /// The offer, which is used up now.
        offer: Offer,
        /// File of the offer.
        file: M::File,
        /// State of the file when a frontend was told the file's digest. `None`: no digest was told.
        proven: Option<M::State>,
    },
    /// Reset the connection of a peer that fetches.
    ResetFetch(usize),

    /// Set the kernel's key for an address. The key proves TCP handshakes between this machine's programs under `shunt
    /// run` and programs at that address. `None`: remove the key, because neither this machine nor a peer has the
    /// address.
    SetEnd(IpAddr, Option<[u8; 16]>),
    /// Give programs the list of pairs: an address, and a store that programs at this address can fetch from
    /// ([`SourcesOfPeers`](crate::store::sources::SourcesOfPeers)).
    WriteSources,
}
