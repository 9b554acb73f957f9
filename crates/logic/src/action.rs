//! Actions: steps that the logic asks the daemon to carry out. They are done in their order, before the next event. No
//! action holds keys of clients' TLS connections or of offers. A *peer* is another machine's agent. A *server* is a
//! program of this machine that is connected to the agent. A *sender* is this machine's kernel socket for a client of a
//! peer. A *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs. A *handoff*
//! lets a backend send a payload on the connection of a frontend's client, and a *region* is the range of sequence
//! numbers that the payload takes there. A *fetch* brings a payload through both agents instead. The *board* is memory
//! that the agent writes and servers read. The *digest* of a file is its SHA-256. A *store* has the payloads of a
//! machine's programs under `shunt run`.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use shunt_wire::local::{self, Channel, Offer};
use shunt_wire::peer::{self, Hello};
use zerocopy::IntoBytes;

use crate::board::Change;
use crate::machine::{ActiveRegion, Machine};

/// Names of handoffs at a backend: number of the peer, worker number, number of the handoff.
pub type Given = HashSet<(u32, u32, u64)>;

/// A message for a server.
#[derive(Clone, Copy, Debug)]
pub enum Told {
    /// A handoff or fetch has ended without success.
    Ended(local::Ended),
    /// Answer to a server's question (ASK): whether a peer would send bytes of its store.
    Answer(local::Answer),
    /// The digest of a file.
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

/// Actions in their order. The buffer is reused: a handoff allocates nothing.
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

    /// Send a message to a server, now or once its socket has room. If it cannot be kept until then, call
    /// [`Logic::unread`](crate::Logic::unread).
    Tell(usize, Told),
    /// Answer HELLO with WELCOME, with the memory for counters, and with the ring if the server has one.
    Welcome {
        /// The server.
        server: usize,
        /// Purpose of its connection.
        channel: Channel,
        /// Number of the ring to make, for processes of `user`.
        ring: Option<u32>,
        /// User of the process.
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

    /// Have the BPF programs steer clients' ACKs to a peer's senders, as the peer's entry says now
    /// ([`Steered`](crate::frontend::steered::Steered)).
    Steer(usize),
    /// Watch the routes to a peer's senders from now on, and report the interfaces that they lead to.
    WatchRoutes(usize, Hello),
    /// Note in the kernel's table of client connections how many payload bytes may lie between two ACKs for a peer's
    /// sender.
    SetSpacing(usize, peer::Spacing),
    /// Note in the kernel's table of client connections that a client has acknowledged all of a payload.
    SetDelivered(usize, peer::Delivered),
    /// Mark a region, so that the next packet that this machine sends on its connection resets the client.
    Cancel(ActiveRegion),

    /// Discard the senders of these handoffs: the frontend has given them up.
    Abort(Given),
    /// Continue the senders of these handoffs: the frontends' servers have forgotten the digests of their files.
    GoOn(Given),
    /// Discard the senders of a lost peer, except those whose whole payload is already in their send buffers.
    ForgetPeer(u32),
    /// Close files whose offers have expired.
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
    /// Give a server its end of the socket pair of a fetch, then call [`Logic::fetch_moved`](crate::Logic::fetch_moved)
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
        /// State of the file when a frontend was told its digest, or `None` if none was told.
        proven: Option<M::State>,
    },
    /// Reset the connection of a peer that fetches.
    ResetFetch(usize),

    /// Set the kernel's key for an address. It proves TCP handshakes between this machine's programs under `shunt run`
    /// and programs at that address. `None`: remove the key, because neither this machine nor a peer has the address.
    SetEnd(IpAddr, Option<[u8; 16]>),
    /// Give programs the list of pairs of an address and a store that programs at this address can fetch from
    /// ([`SourcesOfPeers`](crate::store::sources::SourcesOfPeers)).
    WriteSources,
}
