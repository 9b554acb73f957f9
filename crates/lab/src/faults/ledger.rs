//! What a service holds, counted: before a fault and after it, to find what leaked.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::service::Service;
use crate::sockets::TcpSocket;

/// After this everything that a cell used is given back: parked sockets, flows that are quiet, offers that nobody
/// claimed, and connections that ended in the middle. (A FIN that nobody answers takes the kernel longest.)
const SETTLING: Duration = Duration::from_secs(15);

/// Counts by what is counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger(BTreeMap<String, u64>);

impl Ledger {
    /// Counts now.
    ///
    /// # Errors
    /// When an agent does not answer or a host cannot be asked.
    pub fn of(lab: &Lab, service: &Service<'_>) -> Result<Self> {
        let mut ledger = Self::default();
        for host in lab.tiers() {
            ledger.count_processes(host)?;
            ledger.count_sockets(host)?;
            let stats = match host.role() {
                Role::Intermediate => continue,
                _ => service.stats(host)?,
            };
            let counts: &[&str] = match host.role() {
                Role::Frontend => &["frontend.flows"],
                _ => &["agent.senders.now", "agent.offers_open", "backend.senders"],
            };
            for name in counts {
                ledger.add(host, name, stats.count(name));
            }
        }
        Ok(ledger)
    }

    fn add(&mut self, host: &Host, what: &str, count: u64) {
        *self.0.entry(format!("{} {what}", host.name())).or_default() += count;
    }

    /// Processes and their descriptors, by kind. Connections between tiers come and go with the pools of nginx.
    fn count_processes(&mut self, host: &Host) -> Result<()> {
        let pooled: HashSet<u64> =
            host.tcp_sockets()?.iter().filter(|socket| is_between_tiers(socket)).map(|socket| socket.inode).collect();
        for pid in host.pids()? {
            let directory = format!("/proc/{pid}");
            let Some(kind) = kind_of(Path::new(&directory)) else { continue };
            let links = std::fs::read_dir(format!("{directory}/fd")).into_iter().flatten().flatten();
            let descriptors = links.filter(|link| {
                let target = std::fs::read_link(link.path()).unwrap_or_default();
                let inode =
                    target.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
                inode.is_none_or(|inode| !pooled.contains(&inode))
            });
            self.add(host, &format!("{kind} descriptors"), descriptors.count() as u64);
            self.add(host, &format!("{kind} processes"), 1);
        }
        Ok(())
    }

    fn count_sockets(&mut self, host: &Host) -> Result<()> {
        let counted = host
            .tcp_sockets()?
            .iter()
            .filter(|socket| socket.state != TcpSocket::TIME_WAIT && !is_between_tiers(socket))
            .count();
        self.add(host, "TCP sockets", counted as u64);
        Ok(())
    }

    /// Whether nothing is under way or waits to be given back.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let passing = ["flows", "senders", "senders.now", "offers_open"];
        self.0.iter().all(|(name, count)| *count == 0 || !passing.iter().any(|what| name.ends_with(what)))
    }

    /// What this has more of than `before`.
    #[must_use]
    pub fn more_than(&self, before: &Self) -> BTreeMap<String, u64> {
        let grown = self.0.iter().filter_map(|(name, count)| {
            let more = count.saturating_sub(before.0.get(name).copied().unwrap_or(0));
            (more > 0).then(|| (name.clone(), more))
        });
        grown.collect()
    }

    /// Waits until the service holds no more than before, and says what it still does.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn leaks(before: &Self, lab: &Lab, service: &Service<'_>) -> Result<BTreeMap<String, u64>> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let leaks = Self::of(lab, service)?.more_than(before);
            if leaks.is_empty() || Instant::now() > deadline {
                return Ok(leaks);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A kept connection from one tier's server to the next one's.
fn is_between_tiers(socket: &TcpSocket) -> bool {
    let ends = [socket.local, socket.remote];
    ends.iter().all(|end| end.ip().octets()[..3] == [10, 77, 1]) && ends.iter().any(|end| end.port() == 80)
}

/// What a process is; `None` for what is no part of the service, or has ended.
fn kind_of(process: &Path) -> Option<&'static str> {
    let command = std::fs::read(process.join("cmdline")).ok()?;
    let command = String::from_utf8_lossy(&command);
    let kinds = [("nginx: master", "nginx master"), ("nginx: worker", "nginx worker"), ("shuntd", "shuntd")];
    kinds.into_iter().find(|(part, _)| command.contains(part)).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_grew_is_a_leak() {
        let ledger = |counts: &[(&str, u64)]| Ledger(counts.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect());
        let before = ledger(&[("a", 1), ("b", 5)]);
        let after = ledger(&[("a", 2), ("b", 4), ("c", 3)]);
        assert_eq!(after.more_than(&before).into_iter().collect::<Vec<_>>(), [("a".into(), 1), ("c".into(), 3)]);
        assert!(before.more_than(&before).is_empty());
    }
}
