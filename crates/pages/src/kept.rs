//! Which pages a member keeps, and in which place of its memory.
//!
//! A page that is new comes into a small part of the memory and stays there for a short time, unless somebody gets it
//! meanwhile. So a scan, whose pages nobody gets again, drives out few others. A page that returns soon after it was
//! dropped comes into the large part at once. That is S3-FIFO (Yang et al., SOSP 2023) as quick_cache has
//! it; tests/hit_ratios.rs compares it with others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::unsync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, UnitWeighter};

use crate::name::PageName;

/// Number of dropped pages that are remembered, by the capacity. With 0.5 instead of 1.0, a mix with a loop that just
/// fits loses a fifth of its hits, and all others win at most 0.01 (tests/hit_ratios.rs).
const REMEMBERED: f64 = 1.0;

/// Index of a page's bytes in the member's memory, in pages.
pub type Place = u32;

/// Pages of a member, and the free places.
pub struct Kept {
    cache: Cache<PageName, Place, UnitWeighter, DefaultHashBuilder, Evicted>,
    evicted: Evicted,
    free: Vec<Place>,
    places: Place,
    capacity: Place,
}

/// What `Kept::put` did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Put {
    /// The page is kept: its bytes belong into this place.
    At(Place),
    /// The page was there before, and nothing has changed.
    Already,
    /// The member lends no memory now.
    Refused,
}

impl Kept {
    /// Makes an empty memory of `capacity` pages. One place more is used, for a page that comes before another goes.
    pub fn new(capacity: Place) -> Self {
        let evicted = Evicted::default();
        let mut options = OptionsBuilder::new();
        options.estimated_items_capacity(capacity as usize).weight_capacity(u64::from(capacity));
        options.ghost_allocation(REMEMBERED);
        let options = options.build().expect("both sizes are given");
        let cache = Cache::with_options(options, UnitWeighter, DefaultHashBuilder::default(), evicted.clone());
        Self { cache, evicted, free: Vec::new(), places: 0, capacity }
    }

    /// Keeps a page, and calls `dropped` with each page that goes for it. A place that was free for long comes before
    /// one that was never used, so that memory is touched only when it is needed.
    pub fn put(&mut self, page: PageName, dropped: impl FnMut(PageName)) -> Put {
        if self.capacity == 0 {
            return Put::Refused;
        }
        if self.cache.contains_key(&page) {
            return Put::Already;
        }
        let place = self.free.pop().unwrap_or_else(|| {
            self.places += 1;
            self.places - 1
        });
        self.cache.insert(page, place);
        self.reclaim(dropped);
        Put::At(place)
    }

    /// Returns the page's place, and notes that somebody wanted the page.
    pub fn get(&self, page: PageName) -> Option<Place> {
        self.cache.get(&page).copied()
    }

    /// Returns the page's place, and drops the page. The place is used again after `release`.
    pub fn take(&mut self, page: PageName) -> Option<Place> {
        self.cache.remove(&page).map(|(_, place)| place)
    }

    /// Gives back the place of a page that was taken, when its bytes are no longer needed.
    pub fn release(&mut self, place: Place) {
        debug_assert!(place < self.places, "place {place} was never given out");
        self.free.push(place);
    }

    /// Changes the number of pages that the member keeps, and calls `dropped` with each page that goes. The places of
    /// these pages are in `free_places` then.
    pub fn set_capacity(&mut self, capacity: Place, dropped: impl FnMut(PageName)) {
        self.capacity = capacity;
        self.cache.set_capacity(u64::from(capacity));
        self.reclaim(dropped);
    }

    /// Returns the places whose bytes nobody needs. The machine can have this memory back: a place that is used again
    /// is written first.
    pub fn free_places(&self) -> &[Place] {
        &self.free
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.cache.len()
    }

    /// Returns the size of the index in memory, in bytes. It does not include the pages.
    pub fn index_bytes(&self) -> usize {
        self.cache.memory_used().total() + self.free.capacity() * size_of::<Place>()
    }

    fn reclaim(&mut self, mut dropped: impl FnMut(PageName)) {
        for (page, place) in self.evicted.lock().drain(..) {
            self.free.push(place);
            dropped(page);
        }
    }
}

/// Receives the pages that the cache drops. The lock is never contended, since cache and owner are in one thread.
#[derive(Clone, Default)]
struct Evicted(Arc<Mutex<Vec<(PageName, Place)>>>);

impl Evicted {
    fn lock(&self) -> MutexGuard<'_, Vec<(PageName, Place)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lifecycle<PageName, Place> for Evicted {
    type RequestState = ();

    fn on_evict(&self, (): &mut (), page: PageName, place: Place) {
        self.lock().push((page, place));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn page(index: u64) -> PageName {
        PageName { high: index, low: !index }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u64),
        Get(u64),
        Take(u64),
        SetCapacity(Place),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0u64..60).prop_map(Step::Put),
            3 => (0u64..60).prop_map(Step::Get),
            2 => (0u64..60).prop_map(Step::Take),
            1 => (0u32..40).prop_map(Step::SetCapacity),
        ];
        prop::collection::vec(step, 0..400)
    }

    proptest! {
        /// `has` is what the member must have: all that was put, and neither dropped nor taken since.
        #[test]
        fn each_page_has_one_place_until_it_is_dropped_or_taken(mut capacity in 0u32..40, steps in steps()) {
            let (mut kept, mut has) = (Kept::new(capacity), HashMap::new());
            for step in steps {
                let mut gone = Vec::new();
                match step {
                    Step::Put(index) => {
                        let put = kept.put(page(index), |page| gone.push(page.high));
                        let expected = capacity > 0 && !has.contains_key(&index);
                        prop_assert_eq!(matches!(put, Put::At(_)), expected, "{:?}", put);
                        if let Put::At(place) = put {
                            prop_assert!(!has.values().any(|other| *other == place), "two pages in place {}", place);
                            has.insert(index, place);
                        }
                    }
                    Step::Get(index) => prop_assert_eq!(kept.get(page(index)), has.get(&index).copied()),
                    Step::Take(index) => {
                        let place = kept.take(page(index));
                        prop_assert_eq!(place, has.remove(&index));
                        place.into_iter().for_each(|place| kept.release(place));
                    }
                    Step::SetCapacity(pages) => {
                        capacity = pages;
                        kept.set_capacity(pages, |page| gone.push(page.high));
                    }
                }
                for index in gone {
                    prop_assert!(has.remove(&index).is_some(), "page {} was dropped twice", index);
                }
                prop_assert_eq!(kept.pages(), has.len());
                prop_assert!(has.len() <= capacity as usize);
                for place in kept.free_places() {
                    prop_assert!(!has.values().any(|used| used == place), "place {} is free and in use", place);
                }
            }
        }
    }

    #[test]
    fn places_are_used_again() {
        let mut kept = Kept::new(10);
        for index in 0..1000 {
            let Put::At(place) = kept.put(page(index), |_| ()) else { panic!("page {index} is new") };
            assert!(place <= 10, "place {place}");
        }
    }
}
