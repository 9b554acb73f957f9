//! Counters of the agent, of its servers and of the steering programs, as JSON for `shunt stats`. A *fetch* is a
//! payload that comes through two agents to a frontend's server.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use shunt_odb::store::usage::{ByName, COUNTED, Counted, Usage};
use shunt_wire::local::{Header, MAX_TEXT_BYTES, Reason, kind};
use zerocopy::IntoBytes;

use super::Daemon;
use crate::telemetry::counters::{Daemons, SERVERS};
use crate::telemetry::log::LOG;
use shunt_host::packets;

/// Returns a percentage: bytes that a program has sent on without fetching them, among all absent bytes that it has
/// sent on or had to fetch. *Absent* bytes were received as references, and are not in the program's memory. Bytes that
/// the program sends many times (a cache) count each time.
fn bypassed_percent(counts: &[u64; COUNTED.len()]) -> u64 {
    let of = |one: Counted| counts[one as usize];
    let passed_on = of(Counted::PassedOn).saturating_add(of(Counted::HandedOff)).saturating_sub(of(Counted::TakenBack));
    let all = passed_on.saturating_add(of(Counted::Fetched)).saturating_add(of(Counted::FetchedByFault));
    passed_on.saturating_mul(100).checked_div(all).unwrap_or(0)
}

/// Returns the counters of programs under `shunt run`, by the programs' names.
fn programs_stats(usage: &Usage) -> Value {
    let of_name = |of_name: &ByName| {
        let named = COUNTED.iter().zip(of_name.counts).map(|((name, _), count)| (name.to_string(), Value::from(count)));
        let mut all: Map<String, Value> = named.collect();
        all.insert("processes".into(), of_name.processes.into());
        all.insert("bypassed_percent".into(), bypassed_percent(&of_name.counts).into());
        Value::Object(all)
    };
    Value::Object(usage.by_name().iter().map(|(name, all)| (name.clone(), of_name(all))).collect())
}

impl Daemon {
    /// Sends the counters to a server, or to `shunt stats`.
    pub(super) fn send_stats(&mut self, server: usize) {
        let text = self.stats().to_string();
        debug_assert!(text.len() <= MAX_TEXT_BYTES, "{} bytes of counters", text.len());
        let header = Header { kind: kind::STATS_TEXT, size: (size_of::<Header>() + text.len()) as u32 };
        let packet = [header.as_bytes(), text.as_bytes()].concat();
        let Some(connection) = self.connections.get(server) else { return };
        if !matches!(packets::send(&connection.socket, &packet, &[]), Ok(true)) {
            self.event(|logic, call| logic.malformed(server, Reason::Limit, call));
        }
    }

    /// Returns all counters.
    pub fn stats(&self) -> Value {
        let logic = &self.logic;
        let is_up = |peer: usize| logic.shared.peers.is_up(peer) && !logic.frontend.steered.is_asking(peer);
        let peers =
            self.config.peers.iter().enumerate().map(
                |(index, peer)| json!({"name": peer.name, "address": peer.address.to_string(), "up": is_up(index)}),
            );
        json!({
            "name": self.config.name,
            "peers": peers.collect::<Vec<_>>(),
            "agent": self.agent_stats(),
            "servers": self.server_stats(),
            "store": self.store_stats(),
            "frontend": self.kernel.frontend.as_ref().map(|frontend| frontend.counters()),
            "backend": self.kernel.senders.as_ref().map(|senders| senders.table().counters()),
        })
    }

    fn agent_stats(&self) -> Value {
        let (logic, kernel) = (&self.logic, &self.kernel);
        let counts = &logic.shared.counts;
        let mut stats: Map<String, Value> =
            counts.values().map(|(name, value)| (name.to_owned(), Value::from(value))).collect();
        let daemons = Daemons {
            certificate_seconds_left: self.credentials.seconds_left(SystemTime::now()).try_into().unwrap_or(0),
            log_lines_lost: LOG.lost(),
            accept_failed: self.listeners.failed,
            offers_open: logic.backend.offers.len() as u64,
            regions_watched: logic.frontend.losses.len() as u64,
            reads: kernel.reads.made(),
            reads_pending: kernel.reads.pending() as u64,
            digests: kernel.digests.made(),
            interfaces_attached: self.ports.attached.load(Ordering::Relaxed),
        };
        stats.extend(daemons.values().map(|(name, value)| (name.to_owned(), value)));
        stats.insert("now".into(), self.use_now());
        stats.insert("limit".into(), self.limits_now());
        stats.insert("limited".into(), json!(self.logic.gates.closings));
        let ended = Reason::ALL.map(|reason| (format!("{reason:?}"), Value::from(counts.ended[reason as usize])));
        stats.insert("ended".into(), Value::Object(ended.into_iter().collect()));
        if let Some(senders) = &kernel.senders {
            let counts = senders.counts();
            let senders = json!({
                "now": senders.len(),
                "restored": counts.restored,
                "reused": counts.reused,
                "discarded": counts.discarded,
                "evicted": counts.evicted,
                "queued_bytes": counts.queued_bytes,
            });
            stats.insert("senders".into(), senders);
        }
        Value::Object(stats)
    }

    fn store_stats(&self) -> Value {
        let (Some(store), Some(logic)) = (&self.store, &self.logic.store) else { return Value::Null };
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &store.counters;
        json!({
            "bytes": value(&counters.bytes),
            "bytes_limit": store.config.memory_bytes,
            "segments": value(&counters.segments),
            "payloads": value(&counters.payloads),
            "files": value(&counters.files),
            "programs": value(&counters.programs),
            "readers": value(&counters.readers),
            "fetches": value(&counters.fetches),
            "fetched_bytes": value(&counters.fetched_bytes),
            "gone": value(&counters.gone),
            "returned": value(&counters.returned),
            "refused": value(&counters.refused),
            "full": value(&counters.full),
            "unreached": logic.unreached,
            "peer_addresses": logic.ends.of_peers(),
            "peer_sources": logic.sources.of_peers(),
            "by_program": programs_stats(&store.usage.lock()),
        })
    }

    /// Returns the numbers of handoffs, payloads and other resources in use. The values are at most a tenth of a second
    /// old.
    fn use_now(&self) -> Value {
        let used = self.logic.gates.total;
        json!({
            "handoffs": used.handoffs,
            "payloads": used.sent.payloads,
            "bytes": used.sent.bytes,
            "senders": used.sent.senders,
            "descriptors": self.kernel.descriptors(),
            "fetches_in": self.logic.backend.served.len(),
            "fetches_out": self.logic.frontend.fetches.len(),
            "servers": self.logic.shared.servers.len(),
        })
    }

    /// Returns the limit of each value of [`Self::use_now`].
    fn limits_now(&self) -> Value {
        let limits = &self.config.limits;
        json!({
            "handoffs": limits.handoffs,
            "payloads": limits.offers,
            "bytes": limits.bytes,
            "senders": self.config.backend.as_ref().map_or(0, |backend| backend.senders),
            "descriptors": self.kernel.descriptor_limit,
            "fetches_in": limits.fetches,
            "fetches_out": limits.fetches,
            "servers": limits.servers,
        })
    }

    fn server_stats(&self) -> Value {
        let living = self.connections.iter().filter_map(|(_, connection)| connection.counters.as_ref());
        let sum = self.gone.with(living);
        let named = SERVERS.iter().map(|(index, name, _)| (name.to_string(), Value::from(sum[*index])));
        Value::Object(named.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_program_sends_on_more_than_all() {
        let mut counts = [0; COUNTED.len()];
        assert_eq!(bypassed_percent(&counts), 0);
        // A cache, which receives the bytes once and sends them four times.
        counts[Counted::ReceivedAbsent as usize] = 100;
        counts[Counted::PassedOn as usize] = 400;
        assert_eq!(bypassed_percent(&counts), 100);
        counts[Counted::FetchedByFault as usize] = 400;
        assert_eq!(bypassed_percent(&counts), 50);
        counts[Counted::TakenBack as usize] = u64::MAX;
        assert_eq!(bypassed_percent(&counts), 0);
    }
}
