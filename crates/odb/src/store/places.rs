//! How many may read from a store. Whoever is let in has a place first: a program that was told that it can fetch gives up
//! memory for what it is referred to, so a store may not find afterwards that there are too many.

use std::collections::HashMap;
use std::sync::Arc;

use shunt_sys::lock::{Mutex, MutexGuard};

/// The programs of one machine may have so many quarters of all places: with more they would keep all others out.
const QUARTERS: usize = 3;

/// A store's places for readers.
#[derive(Clone, Debug)]
pub struct Places {
    most: usize,
    /// By machine, this one among them, whose programs have some.
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One of them, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    of: Places,
    machine: u32,
}

/// In place of a peer's index: programs of the store's own machine.
pub(super) const OWN: u32 = u32::MAX;

impl Places {
    pub(super) fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.taken.lock()
    }

    /// A place for a program of the machine with that number; `None`: there are too many, or too many of that machine.
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
