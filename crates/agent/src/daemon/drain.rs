//! The end of an agent: nothing new begins, and payloads under way have some time to end by themselves (`drain` in the
//! configuration). An *offer* is a payload that a server holds ready for another machine's agent. A *handoff* lets a
//! backend send a payload on the connection of a frontend's client. The *store* has the payloads of programs under
//! `shunt run`.
//!
//! ```text
//!            SIGTERM              nothing under way, or `drain` is over, or a second SIGTERM
//!   working ---------> draining ------------------------------------------------------------> ended
//! ```
//!
//! The store takes no more payloads, and readers get the payloads that it has. Servers learn of the drain by the board
//! (memory that the agent writes), and peers by a message (CLOSED). Both are also used when a limit is reached
//! (crates/logic/src/limits.rs). So no response waits or fails.
//!
//! When the time is over, a backend's agent tells frontends which payloads it gives up. Each frontend then has another
//! backend send the rest at once. If a frontend's agent ends, a handoff still completes if all of its payload is
//! already in the backend's send buffer. For all other handoffs, the frontend's servers ask for the rest.

use std::io::Read;
use std::sync::atomic::Ordering;
use std::time::Duration;

use shunt_logic::Logic;

use super::{Daemon, Drain};

/// The drain ends when nothing has been under way for this time. Without servers and a store, it ends as soon as
/// nothing is under way. An offer that a backend made for this machine before the drain may become a handoff here a
/// moment later.
const QUIET: Duration = Duration::from_secs(1);

impl Daemon {
    /// Handles a termination signal. Returns whether to end at once.
    pub(super) fn on_stop(&mut self) -> bool {
        let _ = (&self.signals.stop).read(&mut [0; 1]);
        let limit = self.config.drain;
        if self.drain.is_some() || limit.is_zero() {
            return true;
        }
        self.drain = Some(Drain { until: self.now + limit, busy: self.now });
        self.logic.shared.is_draining = true;
        tracing::info!(?limit, "draining: no new handoffs, offers or fetches; a second signal ends the agent at once");
        self.look_at_limits();
        if let Some(store) = &self.store {
            store.orders.close();
        }
        self.is_drained()
    }

    /// Returns whether the drain is over. Offers that the agent has not read from servers' connections yet do not
    /// count.
    pub(super) fn is_drained(&mut self) -> bool {
        let Some(Drain { until, busy }) = self.drain else { return false };
        let (left, payloads) = (self.under_way(), self.payloads());
        let is_busy = left + payloads > 0;
        let is_alone = self.logic.shared.servers.is_empty() && self.store.is_none();
        if !is_busy && (is_alone || self.now >= busy + QUIET) {
            return true;
        }
        if self.now < until {
            let busy = if is_busy { self.now } else { busy };
            self.drain = Some(Drain { until, busy });
            return false;
        }
        if left > 0 {
            tracing::warn!(
                left,
                "draining took too long: other backends continue the handoffs that are left; `drain` sets the time"
            );
        }
        if payloads > 0 {
            tracing::info!(payloads, "the store ends while programs of `shunt run` may still need payloads in it");
        }
        self.give_up_senders();
        self.event(Logic::give_up_waiting);
        self.flush_peers();
        true
    }

    /// Returns the number of payloads that programs may still ask the store for.
    fn payloads(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.counters.payloads.load(Ordering::Relaxed))
    }

    /// Returns the number of handoffs, offers, claims, payloads and fetches that have not ended.
    fn under_way(&self) -> u64 {
        let sending = self.kernel.senders.as_ref().map_or(0, |senders| senders.busy());
        let left = sending as u64 + self.logic.under_way();
        // Handoffs of programs, and of servers that are gone, are found only by a scan of all flows (the BPF programs'
        // records of connections). The scan is made only when no other work is left.
        if left > 0 {
            left
        } else {
            self.kernel.frontend.as_ref().map_or(0, |frontend| frontend.active_regions(None).len() as u64)
        }
    }
}
