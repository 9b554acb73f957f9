//! The physical limit: what a response would cost if Shunt's own work cost nothing. The response's header passes every
//! tier, and its body comes straight from the backend.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use anyhow::Result;

use super::bed::{Bed, Side};
use super::effort::Effort;
use super::rounds::CONNECTIONS;
use crate::report::Sample;
use crate::wire::Wire;

/// Costs that several cases share, in microseconds of the service's core per response.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// Cost of a header-only response through the tiers, by the number of intermediates and the kind of links.
    chain: HashMap<(u8, Wire), f64>,
    /// Cost of a response straight from the backend, by the body's size and the kind of links. It does not depend on
    /// the number of tiers before the backend.
    direct: HashMap<(u64, Wire), f64>,
}

impl Limits {
    /// The limit for bodies of `size` bytes with the tiers of the bed (labs with all services), in microseconds of CPU
    /// per response. All tiers of the bed must be on the measured core.
    pub(super) fn of(&mut self, bed: &Bed, size: u64, effort: Effort) -> Result<f64> {
        let shape = bed.shape();
        let key = (shape.intermediates, shape.wire);
        let chain = known_or(&mut self.chain, key, || median_of_runs(effort, || chain_cost(bed, effort)))?;
        Ok(chain + self.direct(bed, size, effort)? - self.direct(bed, 0, effort)?)
    }

    fn direct(&mut self, bed: &Bed, size: u64, effort: Effort) -> Result<f64> {
        let key = (size, bed.shape().wire);
        known_or(&mut self.direct, key, || median_of_runs(effort, || direct_cost(bed, size, effort)))
    }
}

fn known_or<K: Eq + Hash>(known: &mut HashMap<K, f64>, key: K, measure: impl FnOnce() -> Result<f64>) -> Result<f64> {
    Ok(match known.entry(key) {
        Entry::Occupied(entry) => *entry.get(),
        Entry::Vacant(entry) => *entry.insert(measure()?),
    })
}

/// Cost of a header-only response through the tiers, in microseconds of CPU, from one run.
pub(super) fn chain_cost(bed: &Bed, effort: Effort) -> Result<f64> {
    Ok(bed.load(Side::KeptHeap, 0, CONNECTIONS, effort.load())?.microseconds(&bed.background()))
}

/// Cost of a response straight from the backend, in microseconds of CPU, from one run.
pub(super) fn direct_cost(bed: &Bed, size: u64, effort: Effort) -> Result<f64> {
    Ok(bed.load_direct(size, effort.load())?.microseconds(&bed.background()))
}

fn median_of_runs(effort: Effort, mut run: impl FnMut() -> Result<f64>) -> Result<f64> {
    let values = (0..effort.side_rounds()).map(|_| run()).collect::<Result<Vec<_>>>()?;
    Ok(Sample(values).median())
}
