//! How an agent ends: nothing new is begun, and what is under way has `drain` to end by itself.
//!
//! ```text
//!            SIGTERM              nothing under way, or `drain` is over, or a second SIGTERM
//!   working ---------> draining ------------------------------------------------------------> ended
//! ```
//!
//! The store takes nothing more, and readers get what it has.
//! Servers and peers hear of it as of a limit (limits.rs): by the board and by CLOSED, so no response waits or fails.
//! Of what is left when the time is over, a backend's agent says that it is lost, and each frontend has another backend
//! go on at once. A frontend's handoffs need no agent to complete where their payloads are wholly with a kernel; servers
//! ask for the rest of the others.

use std::io::Read;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::agent::Agent;

/// How long nothing may be under way: an offer of before takes a moment to become a handoff here.
const QUIET: Duration = Duration::from_secs(1);

/// Since the first termination signal.
pub(crate) struct Drain {
    /// When there is no more time.
    until: Instant,
    /// When something was under way for the last time.
    busy: Instant,
}

impl Agent {
    /// A termination signal came: whether to end at once.
    pub(crate) fn on_stop(&mut self) -> bool {
        let _ = (&self.stop).read(&mut [0; 1]);
        let limit = self.config.drain;
        if self.drain.is_some() || limit.is_zero() {
            return true;
        }
        self.drain = Some(Drain { until: self.now + limit, busy: self.now });
        tracing::info!(?limit, "draining: nothing new is begun; a second signal ends it at once");
        self.look_at_limits();
        if let Some(store) = &self.store {
            store.orders.close();
        }
        self.is_drained()
    }

    /// Whether it is time to end, in a turn that has read all offers.
    pub(crate) fn is_drained(&mut self) -> bool {
        let Some(Drain { until, busy }) = self.drain else { return false };
        let (left, payloads) = (self.under_way(), self.payloads());
        let is_busy = left + payloads > 0;
        let is_alone = self.servers.is_empty() && self.store.is_none();
        if !is_busy && (is_alone || self.now >= busy + QUIET) {
            return true;
        }
        if self.now < until {
            let busy = if is_busy { self.now } else { busy };
            self.drain = Some(Drain { until, busy });
            return false;
        }
        if left > 0 {
            tracing::warn!(left, "draining took too long: others go on with what is left; `drain` gives more time");
        }
        if payloads > 0 {
            tracing::info!(payloads, "the store ends, though programs of `shunt run` may still need what it has");
        }
        self.give_up_rest();
        true
    }

    /// Payloads that programs may still ask the store for.
    fn payloads(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.counters.payloads.load(Ordering::Relaxed))
    }

    /// Handoffs, offers, payloads and fetches that have not ended.
    fn under_way(&self) -> u64 {
        let sending = self.senders.as_ref().map_or(0, |senders| senders.busy());
        let here = sending + self.offers.len() + self.waiting.len() + self.fetches_in.len() + self.fetches_out.len();
        let left = here as u64 + self.pressure.total.handoffs;
        // Of programs, and of servers that are gone. A look at all flows: only where nothing else is left.
        if left > 0 {
            left
        } else {
            self.frontend.as_ref().map_or(0, |frontend| frontend.active_regions(None).len() as u64)
        }
    }

    /// Frontends hear of each payload that has not left yet.
    fn give_up_rest(&mut self) {
        let failures = self.senders.as_mut().map(|senders| senders.give_up()).unwrap_or_default();
        failures.into_iter().for_each(|failure| self.report(failure));
        self.give_up_waiting();
        self.flush_peers();
    }
}
