//! This machine as a frontend: it claims payloads from backends' agents for its servers' handoffs.
//!
//! When a server tells the agent of a handoff, the kernel has begun the handoff's region already (SHUNT_BEGIN or
//! SHUNT_APPEND). When the region is complete, the kernel tells the server directly. The agent only passes the claim on
//! to the backend's agent, and failures back to the server. A *peer* is another machine's agent. A *handoff* is a
//! server's grant of a client connection's send side for one payload. A *session* is the use of the connection with a
//! peer. A *claim* is the message that asks the backend for the payload. An *offer* is a payload that a backend's
//! server holds ready for a claim. A *fetch* brings a payload through both agents instead, and a *store* has the
//! payloads of a machine's programs under `shunt run`. A *sender* is a backend's kernel socket for a client of a
//! frontend. A *turn* is one pass of the daemon's event loop. A *region* is a range of sequence numbers of a client's
//! connection, which one payload takes. A *ring* is a BPF ring buffer by which the kernel tells one server what becomes
//! of its handoffs. The *board* is memory that the agent writes and servers read, with an entry for each peer.

pub mod asking;
pub mod fetches;
pub mod losses;
pub mod steered;

use std::collections::HashSet;

use shunt_wire::local::{Handoff, Reason};
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Abort, Claim, Ended};
use tracing::field::display;

use crate::action::Action;
use crate::machine::{ActiveRegion, Machine, Region};
use crate::peers::hearing::News;
use crate::servers::Servers;
use crate::turn::{Turn, is_clients};
use fetches::Fetches;
use losses::Losses;
use steered::SteeredPeers;

/// Party at whose request a handoff is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Canceller {
    /// The peer that was to send the payload.
    Peer(u32),
    /// The server that learns of the handoff's completion by this ring.
    Ring(u32),
    /// Any server. Allowed only for a handoff whose ring no server of this agent has now. The ring's server is gone, or
    /// an earlier agent gave the ring out.
    Anybody,
}

/// State of a frontend. A machine that is no frontend has it, too.
pub struct Frontend {
    /// Peers' senders to which clients' ACKs are steered.
    pub steered: SteeredPeers,
    /// Fetches of this machine's servers.
    pub fetches: Fetches,
    /// Payloads that are watched, because their backend's agent or their server is gone.
    pub losses: Losses,
    /// Handoffs to cancel at the end of this turn.
    cancelled: HashSet<(Canceller, u64)>,
}

impl Frontend {
    /// Returns the state of a machine that has this number of peers, and no session.
    pub fn new(peers: usize) -> Self {
        Self {
            steered: SteeredPeers::new(peers),
            fetches: Fetches::default(),
            losses: Losses::default(),
            cancelled: HashSet::new(),
        }
    }

    /// Handles a server's handoff of an offer, or of `parts` of the peer's store: claims the payload from the peer.
    pub fn hand_off<M: Machine>(
        &mut self,
        server: usize,
        handoff: &Handoff,
        parts: Option<&Parts>,
        turn: &mut Turn<'_, M>,
    ) {
        turn.shared.counts.handoffs += 1;
        turn.shared.keys_passed |= handoff.tls.suite != 0;
        let Some(maker) = turn.shared.servers.find(server) else { return };
        let (worker, ring) = (maker.worker, maker.ring());
        let client = Some(handoff.flow.client().socket_addr());
        let region = ring.map_or(Region::Unknown, |ring| turn.machine.region(handoff, ring));
        if region != Region::Active {
            turn.shared.counts.handoffs_unknown += 1;
            let reason = if let Region::Over(reason) = region { reason } else { Reason::NotAllowed };
            turn.log_failed_handoff(reason, handoff.handoff, client, handoff.trace);
            return turn.end(server, handoff.handoff, Reason::NotAllowed);
        }
        let peer = handoff.peer as usize;
        // Another epoch means that the peer's entry on the board has changed since the server read the entry, for
        // example with a new session. The server is told, and gets the payload in another way.
        let is_current = turn.shared.board.epoch(peer) == Some(handoff.epoch);
        if !is_current || !turn.shared.peers.is_up(peer) {
            turn.log_failed_handoff(Reason::UnknownOffer, handoff.handoff, client, handoff.trace);
            return turn.end(server, handoff.handoff, Reason::UnknownOffer);
        }
        let (id, length, trace) = (handoff.handoff, handoff.length, handoff.trace.known().map(display));
        tracing::debug!(handoff = id, length, trace, "claiming a payload");
        let claim = Claim::of(worker, handoff);
        turn.tell_peer(peer, |out| match parts {
            None => claim.emit(out),
            Some(parts) => claim.emit_with(parts, out),
        });
        turn.shared.peers.peer(peer).hearing.give(&claim, parts.is_some());
    }

    /// Tells all peers that a server has given a handoff up. Only one peer needs the message, but aborts are rare.
    pub fn abort<M: Machine>(&mut self, server: usize, handoff: u64, turn: &mut Turn<'_, M>) {
        let Some(maker) = turn.shared.servers.find(server) else { return };
        let abort = Abort { worker: maker.worker.into(), handoff: handoff.into() };
        for peer in 0..turn.shared.peers.len() {
            turn.tell_peer(peer, |out| abort.emit(out));
        }
    }

    /// Handles ENDED of a backend's agent: that agent has ended a handoff.
    pub fn ended<M: Machine>(&mut self, peer: usize, ended: &Ended, turn: &mut Turn<'_, M>) {
        if !turn.hear(peer, None, News::End) {
            return;
        }
        let reason = Reason::from_number(ended.reason.get()).unwrap_or(Reason::Malformed);
        let trace = ended.trace.known().map(display);
        let (handoff, name) = (ended.handoff.get(), &turn.shared.settings.peers[peer].name);
        if is_clients(reason) {
            tracing::debug!(peer = name, %reason, handoff, trace, "the backend's agent ended a handoff");
        } else if turn.shared.failures.allows(turn.now) {
            tracing::warn!(peer = name, %reason, handoff, trace, "the backend's agent ended a handoff");
        }
        match turn.shared.servers.owner(ended.worker.get()) {
            Some(server) => turn.pass_on_end(server, peer as u32, handoff, reason),
            None => self.cancel(Canceller::Peer(peer as u32), handoff),
        }
    }

    /// Cancels a handoff at the end of the turn, because nobody sends its payload. A handoff that does not belong to
    /// the canceller stays.
    pub fn cancel(&mut self, by: Canceller, handoff: u64) {
        self.cancelled.insert((by, handoff));
    }

    /// Cancels the handoffs that this turn has collected, with one scan of the kernel's table of client connections. A
    /// region behind which the server may not write (`queues` is false) stays: its server ends it.
    pub fn end_turn<M: Machine>(&mut self, turn: &mut Turn<'_, M>) {
        if self.cancelled.is_empty() {
            return;
        }
        let cancelled = std::mem::take(&mut self.cancelled);
        for region in turn.machine.active_regions(None).into_iter().filter(|region| region.queues) {
            let may = [Canceller::Peer(region.peer), owner(&region, &turn.shared.servers)];
            if may.into_iter().any(|by| cancelled.contains(&(by, region.handoff))) {
                turn.act(Action::Cancel(region));
            }
        }
    }
}

fn owner(region: &ActiveRegion, servers: &Servers) -> Canceller {
    if servers.has_ring(region.ring) { Canceller::Ring(region.ring) } else { Canceller::Anybody }
}
