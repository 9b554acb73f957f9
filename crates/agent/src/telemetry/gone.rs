//! Counters of servers that are gone, which stay in the sums.

use shunt_wire::local::COUNTERS;

use crate::servers::board::WorkerCounters;

/// Sums of the counters of all servers that are gone.
#[derive(Debug)]
pub(crate) struct Gone([u64; COUNTERS]);

impl Default for Gone {
    fn default() -> Self {
        Self([0; COUNTERS])
    }
}

impl Gone {
    /// Adds the counters of a server that is going away. `counters` is `None` if the server has none, because it never
    /// sent HELLO.
    pub(crate) fn keep(&mut self, counters: Option<&WorkerCounters>) {
        if let Some(counters) = counters {
            add(&mut self.0, &counters.read().value);
        }
    }

    /// Returns the sums, together with the counters of the servers that are still connected (`living`).
    pub(crate) fn with<'a>(&self, living: impl Iterator<Item = &'a WorkerCounters>) -> [u64; COUNTERS] {
        let mut sum = self.0;
        living.for_each(|counters| add(&mut sum, &counters.read().value));
        sum
    }
}

fn add(sum: &mut [u64; COUNTERS], values: &[u64; COUNTERS]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum = sum.wrapping_add(*value);
    }
}
