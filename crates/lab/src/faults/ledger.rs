//! Counts of what a service holds, taken before and after a fault to find leaks. A *payload* is the body of a response
//! that bypasses tiers. A *flow* is a frontend's record of a client connection. A socket of a backend is *parked* while
//! it waits for its client's next payload. An *offer* is a payload that a backend holds ready.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::processes::{ProcessUse, is_between_tiers};
use crate::host::{Host, Role};
use crate::service::Service;
use crate::sockets::TcpSocket;

/// Longest wait until everything that a response used is given back: parked sockets, flows without packets, offers that
/// nobody asked for, and connections that ended in mid-response.
const SETTLING: Duration = Duration::from_secs(15);

/// Counters of the agents (Shunt's daemons): things that exist only while a response is under way, or that will soon be
/// given back. The first counter is the frontend's, the others are the backends'.
const PASSING: [&str; 4] = ["frontend.flows", "agent.senders.now", "agent.offers_open", "backend.senders"];

/// Counts, by the name of what is counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger(BTreeMap<String, u64>);

impl Ledger {
    /// Counts what the service holds now.
    ///
    /// # Errors
    /// When an agent does not answer or a host cannot be asked.
    pub fn of(service: &Service<'_>) -> Result<Self> {
        let mut ledger = Self::default();
        for host in service.lab().tiers() {
            for process in ProcessUse::of_host(host)? {
                ledger.add(host, &format!("{} descriptors", process.kind), process.descriptors);
                ledger.add(host, &format!("{} processes", process.kind), 1);
            }
            let sockets = host.tcp_sockets()?;
            let counted = |socket: &&TcpSocket| socket.state != TcpSocket::TIME_WAIT && !is_between_tiers(socket);
            ledger.add(host, "TCP sockets", sockets.iter().filter(counted).count() as u64);
            if host.role() == Role::Intermediate {
                continue;
            }
            let stats = service.stats(host)?;
            let side = if host.role() == Role::Frontend { &PASSING[..1] } else { &PASSING[1..] };
            side.iter().for_each(|name| ledger.add(host, name, stats.count(name)));
        }
        Ok(ledger)
    }

    /// Waits until nothing is under way, for [`SETTLING`] at most. Counts what the service holds then.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn settled(service: &Service<'_>) -> Result<Self> {
        Self::when(service, Self::is_idle)
    }

    fn when(service: &Service<'_>, wanted: impl Fn(&Self) -> bool) -> Result<Self> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let ledger = Self::of(service)?;
            if wanted(&ledger) || Instant::now() > deadline {
                return Ok(ledger);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn add(&mut self, host: &Host, what: &str, count: u64) {
        *self.0.entry(format!("{} {what}", host.name())).or_default() += count;
    }

    /// Whether nothing is under way, and nothing is still to be given back.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.iter().all(|(name, count)| *count == 0 || !PASSING.iter().any(|what| name.ends_with(what)))
    }

    /// Counts that are larger than in `before`, with the difference.
    fn more_than(&self, before: &Self) -> BTreeMap<String, u64> {
        let grown = self.0.iter().filter_map(|(name, count)| {
            let more = count.saturating_sub(before.0.get(name).copied().unwrap_or(0));
            (more > 0).then(|| (name.clone(), more))
        });
        grown.collect()
    }

    /// Waits until the service holds no more than before, for [`SETTLING`] at most. Returns what it still holds in
    /// addition.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn leaks(before: &Self, service: &Service<'_>) -> Result<BTreeMap<String, u64>> {
        Ok(Self::when(service, |now| now.more_than(before).is_empty())?.more_than(before))
    }

    /// All counts, by name.
    #[must_use]
    pub fn counts(self) -> BTreeMap<String, u64> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(counts: &[(&str, u64)]) -> Ledger {
        Ledger(counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect())
    }

    #[test]
    fn only_what_grew_is_a_leak() {
        let before = ledger(&[("a", 1), ("b", 5)]);
        let after = ledger(&[("a", 2), ("b", 4), ("c", 3)]);
        assert_eq!(after.more_than(&before).into_iter().collect::<Vec<_>>(), [("a".into(), 1), ("c".into(), 3)]);
        assert!(before.more_than(&before).is_empty());
    }

    #[test]
    fn a_service_with_a_flow_is_not_idle() {
        assert!(ledger(&[("frontend frontend.flows", 0), ("frontend shuntd descriptors", 9)]).is_idle());
        assert!(!ledger(&[("frontend frontend.flows", 1)]).is_idle());
    }
}
