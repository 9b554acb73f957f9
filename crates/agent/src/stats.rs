//! Counters: the agent's own, its servers', the steering programs', as JSON for `shunt stats`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use shunt_odb::store::usage::{ByName, COUNTED, Counted, Usage};
use shunt_wire::local::{COUNTERS, Header, Reason, kind};
use zerocopy::IntoBytes;

use crate::agent::Agent;
use crate::board::WorkerCounters;
use crate::counters::SERVERS;
use crate::limits::Closings;
use crate::log::LOG;
use crate::packets;

/// What happened in this agent since it started.
#[derive(Debug)]
pub struct Counts {
    /// Sessions that began.
    pub sessions: u64,
    /// Of those, lost.
    pub sessions_lost: u64,
    /// Connections, made or taken, whose other end had no certificate that fits.
    pub strangers: u64,
    /// Connections of agents that found no place: too many had not said what they are.
    pub incoming_limit: u64,
    /// Processes that may not use the socket, or not for that.
    pub refused_callers: u64,
    /// Sessions of servers that ended by a malformed message.
    pub malformed_local: u64,
    /// Connections of agents that were refused.
    pub malformed_peer: u64,
    /// Times that no connection could be accepted, for want of descriptors or memory.
    pub accept_failed: u64,
    /// Connections of servers that never said what they are for.
    pub servers_silent: u64,
    /// Connections of servers beyond the limit.
    pub servers_refused: u64,
    /// Workers that got no completion ring.
    pub rings_exhausted: u64,
    /// Messages that a server did not take.
    pub unread: u64,
    /// Messages of peers that were dropped: about nothing that they were asked or given.
    pub unasked: u64,
    /// Offers taken from servers.
    pub offers: u64,
    /// Of those, dropped: made to a peer that is not trusted any more.
    pub offers_to_strangers: u64,
    /// Offers that were dropped for want of descriptors.
    pub offers_without_descriptor: u64,
    /// Handoffs that this machine's servers began.
    pub handoffs: u64,
    /// Of those, refused: the kernel does not know them as they were described.
    pub handoffs_unknown: u64,
    /// Claims of other agents.
    pub claims: u64,
    /// Of those, of bytes of the store, that had to wait until more could be sent.
    pub claims_waited: u64,
    /// Answers of other agents that they do not send to a client of this machine's, or not now.
    pub declined: u64,
    /// Times that servers were told that a payload comes no further because its backend's agent is gone.
    pub stalled: u64,
    /// Times that a file's digest was told.
    pub proven: u64,
    /// Times that no digest could be told of a file.
    pub unproven: u64,
    /// Handoffs that frontends gave up.
    pub aborts: u64,
    /// Fetches that this machine's servers asked for.
    pub fetches_out: u64,
    /// Fetches that other agents asked for.
    pub fetches_in: u64,
    /// Fetches refused by a limit, in either direction.
    pub fetches_limited: u64,
    /// Routes to peers that were others than before, or gone.
    pub routes_changed: u64,
    /// Times that no route led to a peer.
    pub routes_lost: u64,
    /// Connections of programs to other machines' stores that could not be made.
    pub stores_unreached: u64,
    /// Handoffs and fetches that ended without success, by [`Reason`].
    pub ended: [u64; Reason::ALL.len() + 1],
    /// Counters of servers that are gone.
    gone: [u64; COUNTERS],
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            sessions: 0,
            sessions_lost: 0,
            strangers: 0,
            incoming_limit: 0,
            refused_callers: 0,
            malformed_local: 0,
            malformed_peer: 0,
            accept_failed: 0,
            servers_silent: 0,
            servers_refused: 0,
            rings_exhausted: 0,
            unread: 0,
            unasked: 0,
            offers: 0,
            offers_to_strangers: 0,
            offers_without_descriptor: 0,
            handoffs: 0,
            handoffs_unknown: 0,
            claims: 0,
            claims_waited: 0,
            declined: 0,
            stalled: 0,
            proven: 0,
            unproven: 0,
            aborts: 0,
            fetches_out: 0,
            fetches_in: 0,
            fetches_limited: 0,
            routes_changed: 0,
            routes_lost: 0,
            stores_unreached: 0,
            ended: [0; Reason::ALL.len() + 1],
            gone: [0; COUNTERS],
        }
    }
}

/// Largest answer in bytes: one packet.
const MAX_TEXT_BYTES: usize = 60_000;

impl Counts {
    /// A server is gone; what it counted stays.
    pub(crate) fn keep(&mut self, counters: Option<&WorkerCounters>) {
        if let Some(counters) = counters {
            add(&mut self.gone, &counters.read().value);
        }
    }
}

fn add(sum: &mut [u64; COUNTERS], values: &[u64; COUNTERS]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum = sum.wrapping_add(*value);
    }
}

/// How much of the absent bytes that a program has sent on or had to have it has sent on without having them. Bytes that it sends
/// many times (a cache) count each time.
fn bypassed_percent(counts: &[u64; COUNTED.len()]) -> u64 {
    let of = |one: Counted| counts[one as usize];
    let passed_on = of(Counted::PassedOn).saturating_add(of(Counted::HandedOff)).saturating_sub(of(Counted::TakenBack));
    let all = passed_on.saturating_add(of(Counted::Fetched)).saturating_add(of(Counted::FetchedByFault));
    passed_on.saturating_mul(100).checked_div(all).unwrap_or(0)
}

/// By programs' names.
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

impl Agent {
    pub(crate) fn send_stats(&mut self, index: usize) -> Result<(), Reason> {
        let mut text = self.stats().to_string();
        text.truncate(MAX_TEXT_BYTES);
        let header = Header { kind: kind::STATS_TEXT, size: (size_of::<Header>() + text.len()) as u32 };
        let packet = [header.as_bytes(), text.as_bytes()].concat();
        match packets::send(&self.servers[index].socket, &packet, &[]) {
            Ok(true) => Ok(()),
            _ => Err(Reason::Limit),
        }
    }

    /// Everything that is counted.
    pub fn stats(&self) -> Value {
        let is_asked = |index| self.uplinks.as_ref().is_some_and(|uplinks| uplinks.is_asking(index as u32));
        let up = |index: usize| self.peers[index].is_up() && !is_asked(index);
        let peers = self
            .peers
            .iter()
            .enumerate()
            .map(|(index, peer)| json!({"name": peer.name, "address": peer.address.to_string(), "up": up(index)}));
        json!({
            "name": self.config.name,
            "peers": peers.collect::<Vec<_>>(),
            "agent": self.agent_stats(),
            "servers": self.server_stats(),
            "store": self.store_stats(),
            "frontend": self.frontend.as_ref().map(|frontend| frontend.counters()),
            "backend": self.senders.as_ref().map(|senders| senders.table().counters()),
        })
    }

    fn agent_stats(&self) -> Value {
        let counts = &self.counts;
        let ended = Reason::ALL.map(|reason| (format!("{reason:?}"), Value::from(counts.ended[reason as usize])));
        let mut stats = json!({
            "sessions": counts.sessions,
            "sessions_lost": counts.sessions_lost,
            "strangers": counts.strangers,
            "incoming_limit": counts.incoming_limit,
            "certificate_seconds_left": self.credentials.seconds_left(SystemTime::now()),
            "refused_callers": counts.refused_callers,
            "malformed_local": counts.malformed_local,
            "malformed_peer": counts.malformed_peer,
            "accept_failed": counts.accept_failed,
            "servers_silent": counts.servers_silent,
            "servers_refused": counts.servers_refused,
            "rings_exhausted": counts.rings_exhausted,
            "log_lines_lost": LOG.lost(),
            "unread": counts.unread,
            "unasked": counts.unasked,
            "offers": counts.offers,
            "offers_to_strangers": counts.offers_to_strangers,
            "offers_without_descriptor": counts.offers_without_descriptor,
            "offers_open": self.offers.len(),
            "offers_expired": self.offers.expired(),
            "handoffs": counts.handoffs,
            "handoffs_unknown": counts.handoffs_unknown,
            "claims": counts.claims,
            "claims_waited": counts.claims_waited,
            "declined": counts.declined,
            "stalled": counts.stalled,
            "regions_watched": self.losses.len(),
            "reads": self.reads.made(),
            "reads_pending": self.reads.pending(),
            "digests": self.digests.made(),
            "proven": counts.proven,
            "unproven": counts.unproven,
            "aborts": counts.aborts,
            "fetches_out": counts.fetches_out,
            "fetches_in": counts.fetches_in,
            "fetches_limited": counts.fetches_limited,
            "routes_changed": counts.routes_changed,
            "routes_lost": counts.routes_lost,
            "interfaces_attached": self.ports.attached.load(Ordering::Relaxed),
        });
        stats["ended"] = ended.into_iter().collect::<Map<_, _>>().into();
        stats["now"] = self.use_now();
        stats["limit"] = self.limits_now();
        stats["limited"] = self.limited();
        if let Some(senders) = &self.senders {
            let counts = senders.counts();
            stats["senders"] = json!({
                "now": senders.len(),
                "restored": counts.restored,
                "reused": counts.reused,
                "discarded": counts.discarded,
                "evicted": counts.evicted,
                "queued_bytes": counts.queued_bytes,
            });
        }
        stats
    }

    fn store_stats(&self) -> Value {
        let Some(store) = &self.store else { return Value::Null };
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
            "unreached": self.counts.stores_unreached,
            "peer_addresses": store.ends.of_peers(),
            "peer_sources": store.sources.of_peers(),
            "by_program": programs_stats(&store.usage.lock()),
        })
    }

    /// What there is now, a tenth of a second ago at most.
    fn use_now(&self) -> Value {
        let used = self.pressure.total;
        json!({
            "handoffs": used.handoffs,
            "payloads": used.sent.payloads,
            "bytes": used.sent.bytes,
            "senders": used.sent.senders,
            "descriptors": self.descriptors_in_use(),
            "fetches_in": self.fetches_in.len(),
            "fetches_out": self.fetches_out.len(),
            "servers": self.servers.len(),
        })
    }

    /// What there may be.
    fn limits_now(&self) -> Value {
        let limits = &self.config.limits;
        json!({
            "handoffs": limits.handoffs,
            "payloads": limits.offers,
            "bytes": limits.bytes,
            "senders": self.config.backend.as_ref().map_or(0, |backend| backend.senders),
            "descriptors": self.pressure.descriptor_limit,
            "fetches_in": limits.fetches,
            "fetches_out": limits.fetches,
            "servers": limits.servers,
        })
    }

    /// How often each limit was reached.
    fn limited(&self) -> Value {
        let Closings {
            handoffs,
            handoffs_per_peer,
            offers,
            offers_per_peer,
            bytes,
            bytes_per_peer,
            senders,
            descriptors,
            fetches,
            fetches_per_peer,
        } = self.pressure.closings;
        json!({
            "handoffs": handoffs,
            "handoffs_per_peer": handoffs_per_peer,
            "offers": offers,
            "offers_per_peer": offers_per_peer,
            "bytes": bytes,
            "bytes_per_peer": bytes_per_peer,
            "senders": senders,
            "descriptors": descriptors,
            "fetches": fetches,
            "fetches_per_peer": fetches_per_peer,
        })
    }

    fn server_stats(&self) -> Value {
        let mut sum = self.counts.gone;
        for (_, server) in &self.servers {
            if let Some(counters) = server.counters() {
                add(&mut sum, &counters.read().value);
            }
        }
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
        // A cache, which has it once and sends it four times.
        counts[Counted::ReceivedAbsent as usize] = 100;
        counts[Counted::PassedOn as usize] = 400;
        assert_eq!(bypassed_percent(&counts), 100);
        counts[Counted::FetchedByFault as usize] = 400;
        assert_eq!(bypassed_percent(&counts), 50);
        counts[Counted::TakenBack as usize] = u64::MAX;
        assert_eq!(bypassed_percent(&counts), 0);
    }
}
