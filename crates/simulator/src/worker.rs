//! The servers of a machine. At a frontend they hand payloads off, and relay the rest of handoffs that fail. At a
//! backend they make offers.

use std::collections::BTreeMap;

use shunt_wire::Tag;
use shunt_wire::local::Offer;
use zerocopy::FromZeros;

use crate::client::Response;

/// Stage of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A backend has been asked.
    Asked,
    /// A region has begun for a handoff to a peer.
    Begun {
        /// Number of the handoff.
        handoff: u64,
        /// Number of the peer at this machine.
        peer: usize,
        /// Payload bytes that were acknowledged at the servers' last check.
        acked: u64,
    },
    /// The rest of the payload is relayed.
    Rest {
        /// Payload bytes that the client already has; the relayed rest begins after them.
        from: u64,
    },
    /// The whole response is written.
    Written,
}

/// A response under way.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// The response.
    pub response: Response,
    /// Stage of the response.
    pub stage: Stage,
}

/// Connections of the servers with the agent.
#[derive(Clone, Copy, Debug)]
pub struct Connected {
    /// Index of the control connection, at the agent.
    pub control: usize,
    /// Worker number of the control connection.
    pub worker: u32,
    /// Completion ring of the control connection.
    pub ring: Option<u32>,
    /// Index of the offers connection.
    pub offers: usize,
    /// Worker number of the offers connection.
    pub offerer: u32,
}

/// All servers of a machine.
#[derive(Default)]
pub struct Worker {
    /// Connections with the agent, while there is one that has accepted them.
    pub connected: Option<Connected>,
    /// Responses under way, by their clients.
    pub serving: BTreeMap<usize, Serving>,
    /// Requests that wait for the response before.
    pub pending: BTreeMap<usize, Response>,
    handoffs: u64,
    offers: u32,
}

impl Worker {
    /// Notes the connections that the agent has accepted.
    pub fn connect(&mut self, control: usize, worker: u32, ring: Option<u32>, offers: usize, offerer: u32) {
        self.connected = Some(Connected { control, worker, ring, offers, offerer });
        self.offers = 0;
    }

    /// Returns a new number for a handoff.
    pub fn name_handoff(&mut self) -> u64 {
        self.handoffs += 1;
        self.handoffs
    }

    /// Makes an offer of a file's payload for a peer. Returns `None` if no agent is connected.
    pub fn offer(&mut self, peer: usize, response: &Response) -> Option<Offer> {
        let connected = self.connected?;
        self.offers += 1;
        let mut offer = Offer::new_zeroed();
        offer.number = u64::from(connected.offerer) << 32 | u64::from(self.offers);
        offer.peer = peer as u32;
        (offer.length, offer.size) = (response.length, response.length);
        offer.tag = tag(response);
        Some(offer)
    }

    /// Iterates over the peers of the handoffs under way.
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
