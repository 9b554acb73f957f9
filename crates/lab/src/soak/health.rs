//! Memory and descriptors of every process of the service, and whether they grow.

use anyhow::Result;
use serde::Serialize;

use crate::faults::ProcessUse;
use crate::lab::Lab;

/// Allowed growth of a process's memory, as a difference in KiB and as a factor: the growth may exceed one of these
/// limits, but not both. A heap keeps free memory between pieces that are in use, and a process of 10 MiB may have a
/// few more pages later.
const MEMORY_GROWTH_KIB: u64 = 4 << 10;
const MEMORY_GROWTH: f64 = 1.25;

/// All processes of the service, at one moment.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub(super) struct Health(pub(super) Vec<ProcessUse>);

impl Health {
    pub(super) fn now(lab: &Lab) -> Result<Self> {
        let of_hosts = lab.tiers().map(ProcessUse::of_host).collect::<Result<Vec<_>>>()?;
        Ok(Self(of_hosts.into_iter().flatten().collect()))
    }

    /// Describes the growth of the processes that existed at `before` and still exist.
    pub(super) fn growth_since(&self, before: &Self) -> Vec<String> {
        let pairs = self.0.iter().filter_map(|now| Some((before.0.iter().find(|then| then.pid == now.pid)?, now)));
        pairs.filter_map(|(then, now)| grown(then, now)).collect()
    }

    /// Number of processes that existed at `before` and still exist.
    pub(super) fn survivors(&self, before: &Self) -> usize {
        self.0.iter().filter(|now| before.0.iter().any(|then| then.pid == now.pid)).count()
    }
}

fn grown(then: &ProcessUse, now: &ProcessUse) -> Option<String> {
    let more_memory = now.memory_kib > then.memory_kib + MEMORY_GROWTH_KIB
        && now.memory_kib as f64 > then.memory_kib as f64 * MEMORY_GROWTH;
    let more_descriptors = now.descriptors > then.descriptors;
    (more_memory || more_descriptors).then(|| {
        format!(
            "{} on {}: from {} KiB and {} descriptors to {} KiB and {}",
            now.kind, now.host, then.memory_kib, then.descriptors, now.memory_kib, now.descriptors
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health(pid: i32, memory_kib: u64, descriptors: u64) -> Health {
        Health(vec![ProcessUse { host: "fe".into(), kind: "shuntd", pid, memory_kib, descriptors }])
    }

    #[test]
    fn what_grows_is_named() {
        let before = health(7, 10_000, 20);
        assert!(health(7, 13_000, 20).growth_since(&before).is_empty(), "30%, but little");
        assert!(health(7, 10_000, 19).growth_since(&before).is_empty());
        assert!(health(8, 90_000, 90).growth_since(&before).is_empty(), "another process");
        assert_eq!(health(7, 15_000, 20).growth_since(&before).len(), 1);
        assert_eq!(health(7, 10_000, 21).growth_since(&before).len(), 1);
    }
}
