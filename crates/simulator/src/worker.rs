//! The servers of a machine: an nginx worker, and a program under `shunt run`. As frontends they hand payloads off,
//! fetch them, and relay (send through the tiers) what cannot be handed off. As backends they make offers: payloads
//! that they hold ready. A program leaves its bodies in the *store* of its machine's agent. A *peer* is another
//! machine's agent. A *handoff* lets a backend send a payload on a client's connection. A *region* is a range of
//! sequence numbers of a client's connection, which one payload takes. A *claim* is the message that asks a peer for a
//! payload. The *worker number* is the agent's number of a server's connection. A *payload* is the body of a response.

use std::collections::BTreeMap;
use std::time::Duration;

use shunt_logic::machine::Sha256;
use shunt_wire::Tag;
use shunt_wire::local::Offer;
use zerocopy::FromZeros;

use crate::client::{Kind, Response};

/// Stage of a response at the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A backend has been asked for the response.
    Asked,
    /// A program has asked whether a peer would send bytes of its store, and waits for the answer.
    Asking {
        /// Number of the question.
        handoff: u64,
        /// Number that this machine has given to the peer.
        peer: usize,
    },
    /// A region has begun, for a handoff to a peer.
    Begun {
        /// Number of the handoff.
        handoff: u64,
        /// Number that this machine has given to the peer.
        peer: usize,
        /// Number of payload bytes that were acknowledged at the servers' last check.
        acked: u64,
    },
    /// The payload is fetched through both agents.
    Fetching {
        /// Number of the fetch.
        fetch: u64,
        /// Number of payload bytes that have come.
        got: u64,
    },
    /// The payload, or the rest of it, is relayed.
    Rest {
        /// Number of payload bytes that are not relayed, because the client already has them.
        from: u64,
    },
    /// The whole response is written.
    Written,
}

/// Search for another backend for the rest of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// Byte of the region from which on the rest is asked for.
    pub from: u64,
    /// Time at which the rest was asked for.
    pub asked: Duration,
    /// Numbers of the other backend and of its offer, once it has made one.
    pub offered: Option<(usize, u64)>,
    /// Number for the question about the digest of the other backend's file, and then for the handoff of the rest. It
    /// is 0 until the other backend has made an offer.
    pub handoff: u64,
}

/// A response under way.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// The response.
    pub response: Response,
    /// Stage of the response.
    pub stage: Stage,
    /// Number of checks by the servers (one a second) since the response began, or since its handoff last made
    /// progress.
    pub quiet: u32,
    /// Digest (SHA-256) of the file that the backend sends, once the backend has told it.
    pub digest: Option<Sha256>,
    /// Present while another backend is sought for the rest.
    pub rest: Option<Rest>,
    /// The bytes that follow the payload are written.
    pub has_trailer: bool,
    /// The payload has moved to another backend.
    pub has_moved: bool,
}

impl Serving {
    /// Returns a response for which a backend is asked.
    pub fn new(response: Response) -> Self {
        Self { response, stage: Stage::Asked, quiet: 0, digest: None, rest: None, has_trailer: false, has_moved: false }
    }
}

/// Connections of a server with the agent.
#[derive(Clone, Copy, Debug)]
pub struct Connected {
    /// Index of the control connection, at the agent.
    pub control: usize,
    /// Worker number of the control connection.
    pub worker: u32,
    /// Number of the BPF ring buffer by which the kernel tells this server what becomes of its payloads. `None`: the
    /// control connection has no ring.
    pub ring: Option<u32>,
    /// Index of the offers connection. A program has none (`usize::MAX`).
    pub offers: usize,
    /// Worker number of the offers connection, or 0 for a program.
    pub offerer: u32,
}

/// All servers of a machine.
#[derive(Default)]
pub struct Worker {
    /// Connections of the nginx worker, while there is an agent that has accepted them.
    pub connected: Option<Connected>,
    /// Connection of the program, while there is an agent that has accepted it.
    pub program: Option<Connected>,
    /// Responses under way, by their clients.
    pub serving: BTreeMap<usize, Serving>,
    /// Requests that wait for the end of the response under way, by their clients.
    pub pending: BTreeMap<usize, Response>,
    /// Peers' answers to the question whether they would send bytes of their stores. By peer: the epoch (number) of the
    /// session in which the peer answered, and the answer.
    pub would_send: BTreeMap<usize, (u32, bool)>,
    /// For a peer, the time until which the program makes no claims to it, because an earlier claim still waits there.
    pub waits_until: BTreeMap<usize, Duration>,
    /// The newest offer that the nginx worker has made since it connected to the agent.
    pub last: Option<Offer>,
    handoffs: u64,
    offers: u32,
}

impl Worker {
    /// Notes the nginx worker's connections, which the agent has accepted.
    pub fn connect(&mut self, control: usize, worker: u32, ring: Option<u32>, offers: usize, offerer: u32) {
        self.connected = Some(Connected { control, worker, ring, offers, offerer });
        (self.offers, self.last) = (0, None);
    }

    /// Returns the connections of the server that serves responses of this kind.
    pub fn server(&self, kind: Kind) -> Option<Connected> {
        if kind == Kind::Stored { self.program } else { self.connected }
    }

    /// Returns a new number for a handoff, a question or a fetch.
    pub fn name_handoff(&mut self) -> u64 {
        self.handoffs += 1;
        self.handoffs
    }

    /// Makes an offer for a peer: the response's file from `offset` to its end. `state`, the number of the file's
    /// state, stands for its modification time. Returns `None` if no agent is connected.
    pub fn offer(&mut self, peer: usize, response: &Response, offset: u64, state: u64) -> Option<Offer> {
        let connected = self.connected?;
        self.offers += 1;
        let mut offer = Offer::new_zeroed();
        offer.number = u64::from(connected.offerer) << 32 | u64::from(self.offers);
        offer.peer = peer as u32;
        (offer.offset, offer.length, offer.size) = (offset, response.length - offset, response.length);
        offer.mtime_ns = state as i64;
        offer.tag = tag(response);
        self.last = Some(offer);
        Some(offer)
    }

    /// Returns the number of the offer that was made `back` offers before the newest one. If there are not so many
    /// offers, the number is one that no offer has.
    pub fn some_offer(&self, back: u32) -> u64 {
        let offerer = self.connected.map_or(0, |connected| connected.offerer);
        u64::from(offerer) << 32 | u64::from(self.offers.saturating_sub(back))
    }

    /// Iterates over the handoffs under way, each as the number of its peer.
    pub fn handoffs(&self) -> impl Iterator<Item = usize> {
        self.serving.values().filter_map(|serving| match serving.stage {
            Stage::Begun { peer, .. } => Some(peer),
            _ => None,
        })
    }
}

/// Returns the tag of the offer for a response.
pub fn tag(response: &Response) -> Tag {
    let mut tag = [7; 16];
    tag[..8].copy_from_slice(&response.number.to_le_bytes());
    Tag(tag)
}
