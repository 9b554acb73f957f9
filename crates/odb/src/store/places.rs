//! Limit on the number of a store's *readers*, the programs that fetch payloads from it. A reader gets one of a fixed
//! number of places before it is told that it is admitted. A program that was told so accepts references instead of
//! bytes, so the store must not find afterwards that there are too many readers.

use std::collections::HashMap;
use std::sync::Arc;

use shunt_sys::lock::{Mutex, MutexGuard};

/// Largest share of all places that programs of one machine may have, in quarters. With more they could keep all other
/// machines' programs out.
const QUARTERS: usize = 3;

/// Places of a store for readers.
#[derive(Clone, Debug)]
pub struct Places {
    most: usize,
    /// Number of places taken by the programs of each machine, this one included.
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

/// A place for one reader. It is given back when this value is dropped.
#[derive(Debug)]
pub struct Place {
    of: Places,
    machine: u32,
}

/// Number of the store's own machine. The other machines have the numbers that this machine's agent gives them, from 0
/// up.
pub(super) const OWN: u32 = u32::MAX;

impl Places {
    pub(super) fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.taken.lock()
    }

    /// Takes a place for a program of the machine with this number. `None`: too many are taken, in all or by that
    /// machine.
    #[must_use]
    pub fn take(&self, machine: u32) -> Option<Place> {
        let mut taken = self.lock();
        let all: usize = taken.values().sum();
        let share = (self.most * QUARTERS).div_ceil(4);
        if all >= self.most || taken.get(&machine).is_some_and(|own| *own >= share) {
            return None;
        }
        *taken.entry(machine).or_default() += 1;
        Some(Place { of: self.clone(), machine })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.of.lock();
        if let Some(own) = taken.get_mut(&self.machine) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.machine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_machine_leaves_places_for_others() {
        let places = Places::new(8);
        let many: Vec<Place> = (0..6).map(|_| places.take(1).unwrap()).collect();
        assert!(places.take(1).is_none());
        let others = [places.take(2).unwrap(), places.take(OWN).unwrap()];
        assert!(places.take(3).is_none() && places.take(2).is_none(), "all are taken");
        drop(others);
        assert!(places.take(1).is_none());
        drop(many);
        assert!(places.lock().is_empty());
        assert!(places.take(1).is_some());
        assert!(Places::new(1).take(7).is_some(), "one place is somebody's");
    }
}
