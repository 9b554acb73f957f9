//! State that the state machines share, passed to them for one event. In comments, a *turn* of the agent is one pass of
//! the daemon's event loop, which may handle many events. A *handoff* lets another machine send a payload on a client's
//! connection. A *fetch* brings a payload through two agents to the frontend's server. A *claim* is a frontend's
//! message that asks for a payload.

use std::net::SocketAddr;
use std::time::Instant;

use shunt_wire::TraceId;
use shunt_wire::local::{self, NO_PEER, Reason};
use shunt_wire::peer::Claimant;
use tracing::field::display;

use crate::action::{Action, Actions, Told};
use crate::board::Board;
use crate::counts::Counts;
use crate::machine::Machine;
use crate::peers::Peers;
use crate::rate::{OncePerSecond, PerSecond};
use crate::servers::Servers;
use crate::settings::Settings;

/// Parts of the logic that more than one state machine uses.
pub struct Shared {
    /// Settings of the operator.
    pub settings: Settings,
    /// Other agents.
    pub peers: Peers,
    /// Programs of this machine that are connected to the agent.
    pub servers: Servers,
    /// Contents of the board.
    pub board: Board,
    /// Counters of this agent.
    pub counts: Counts,
    /// Limits the log lines about failed handoffs and fetches.
    pub failures: PerSecond<100>,
    /// Limits the log lines about refused connections of servers, and of programs with stores.
    pub refusals: OncePerSecond,
    /// Keys of a TLS connection were handled in this turn, so the daemon wipes its stack after the turn.
    pub keys_passed: bool,
    /// The agent is draining: it takes on nothing new.
    pub is_draining: bool,
}

/// Context of one event.
pub struct Turn<'a, M: Machine> {
    /// The time.
    pub now: Instant,
    /// State that the state machines share.
    pub shared: &'a mut Shared,
    /// The machine, which answers questions.
    pub machine: &'a mut M,
    /// Queue of the actions that the daemon carries out.
    pub actions: &'a mut Actions<M>,
}

impl<M: Machine> Turn<'_, M> {
    /// Asks the daemon for an action.
    pub fn act(&mut self, action: Action<M>) {
        self.actions.push(action);
    }

    /// Appends a frame for a peer, to be sent at the end of the turn. Does nothing if there is no session with the
    /// peer.
    pub fn tell_peer(&mut self, peer: usize, emit: impl FnOnce(&mut Vec<u8>)) {
        if let Some(outbox) = self.shared.peers.outbox(peer) {
            emit(outbox);
        }
    }

    /// Tells a server that this agent has ended a handoff or fetch.
    pub fn end(&mut self, server: usize, handoff: u64, reason: Reason) {
        self.pass_on_end(server, NO_PEER, handoff, reason);
    }

    /// Tells a server how a handoff or fetch ended on another machine.
    pub fn pass_on_end(&mut self, server: usize, peer: u32, handoff: u64, reason: Reason) {
        self.shared.counts.end(reason);
        let ended = local::Ended { header: local::Ended::HEADER, handoff, reason: reason as u32, peer };
        self.act(Action::Tell(server, Told::Ended(ended)));
    }

    /// Reports a failed claim: to the log, and to the frontend that made it.
    pub fn fail_claim(&mut self, claimant: &Claimant, reason: Reason) {
        self.log_failed_handoff(reason, claimant.handoff, None, claimant.trace);
        self.shared.counts.end(reason);
        let ended = claimant.ended(reason);
        self.tell_peer(claimant.peer as usize, |out| ended.emit(out));
    }

    /// Logs a failed handoff. A handoff that fails because its client went away is logged at level debug, because there
    /// are many of these.
    pub fn log_failed_handoff(&mut self, reason: Reason, handoff: u64, client: Option<SocketAddr>, trace: TraceId) {
        let (client, trace) = (client.map(display), trace.known().map(display));
        if is_clients(reason) {
            tracing::debug!(%reason, handoff, client, trace, "a handoff ended early");
        } else if self.shared.failures.allows(self.now) {
            tracing::warn!(%reason, handoff, client, trace, "a handoff failed");
        }
    }

    /// Logs a failed fetch.
    pub fn log_failed_fetch(&mut self, reason: Reason, trace: TraceId) {
        if self.shared.failures.allows(self.now) {
            tracing::warn!(%reason, trace = trace.known().map(display), "a fetch failed");
        }
    }
}

/// Returns whether `reason` means that a handoff's client went away, or that the frontend gave the handoff up (most
/// often for that reason).
pub fn is_clients(reason: Reason) -> bool {
    matches!(reason, Reason::ClientGone | Reason::Aborted)
}
