//! Counters of the steering programs (STEER_COUNTER_LIST in bpf/steering.h).

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::error::SteeringError;

/// Names and meanings of the counters, in the order of the map's indices.
pub const COUNTERS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// One counter, summed over all CPUs, since the maps were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Name, as in `shunt stats`.
    pub name: &'static str,
    /// Meaning, as a text for people.
    pub meaning: &'static str,
    /// Number of times that it was counted.
    pub value: u64,
}

/// Reads the counters whose names start with `prefix`: `fe_` or `be_`.
pub(crate) fn read(map: &MapHandle, prefix: &str) -> Result<Vec<Counter>, SteeringError> {
    let mut counters = Vec::new();
    for (index, &(name, meaning)) in COUNTERS.iter().enumerate() {
        if !name.starts_with(prefix) {
            continue;
        }
        counters.push(Counter { name, meaning, value: sum(map, index as u32)? });
    }
    Ok(counters)
}

fn sum(map: &MapHandle, index: u32) -> Result<u64, SteeringError> {
    let per_cpu = map
        .lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY)
        .map_err(SteeringError::map("lookup", "counters"))?
        .unwrap_or_default();
    Ok(per_cpu.iter().map(|bytes| bytes.as_slice().try_into().map_or(0, u64::from_ne_bytes)).sum())
}

/// Reads the counter with a name of [`COUNTERS`].
///
/// # Panics
/// If there is no such counter.
pub(crate) fn read_one(map: &MapHandle, name: &str) -> Result<u64, SteeringError> {
    let index = COUNTERS.iter().position(|(of, _)| *of == name).expect("a counter of bpf/steering.h") as u32;
    sum(map, index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_belongs_to_one_side_and_has_a_meaning() {
        assert!(COUNTERS.len() > 20);
        for (name, meaning) in COUNTERS {
            assert!(name.starts_with("fe_") != name.starts_with("be_"), "{name}");
            assert!(!meaning.is_empty() && !meaning.ends_with('.'), "{name}: {meaning}");
        }
    }
}
