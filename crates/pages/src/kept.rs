//! Which pages a member keeps, and in which place of its memory.
//!
//! A page that is new comes into a small part of the memory and stays there for a short time, unless somebody gets it
//! meanwhile. So a scan, whose pages nobody gets again, drives out few others. A page that returns soon after it was
//! dropped comes into the large part at once. That is S3-FIFO (Yang et al., SOSP 2023) as quick_cache has it;
//! tests/hit_ratios.rs compares it with others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::unsync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, UnitWeighter};

use crate::name::PageName;

/// Number of dropped pages that are remembered, by the capacity. With 0.5 instead of 1.0, a mix with a loop that just
/// fits loses a fifth of its hits, and all others win at most 0.01 (tests/hit_ratios.rs).
const REMEMBERED: f64 = 1.0;

/// Index of a page's bytes in the member's memory, in pages.
pub type Place = u32;

type Pages = Cache<PageName, Place, UnitWeighter, DefaultHashBuilder, Evicted>;

/// Pages of a member, and the free places.
pub struct Kept {
    pages: Pages,
    evicted: Evicted,
    free: Vec<Place>,
    /// Number of places that have been used so far.
    places: Place,
    /// Number of places there are.
    most_places: Place,
    capacity: Place,
}

/// What `Kept::put` did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Put {
    /// The page is kept: its bytes belong into this place.
    At(Place),
    /// The page was there before, and nothing has changed.
    Already,
    /// The page is not kept: the member lends no memory now, all places are taken, or all kept pages are needed more.
    Refused,
}

impl Kept {
    /// Makes an empty memory of `capacity` pages. One place more is used, for a page that comes before another goes.
    pub fn new(capacity: Place) -> Self {
        let evicted = Evicted::default();
        let pages = pages(capacity, &evicted);
        Self { pages, evicted, free: Vec::new(), places: 0, most_places: capacity.saturating_add(1), capacity }
    }

    /// Keeps a page, and calls `dropped` with each page that goes for it. Places that were used before come first, so
    /// that memory is touched only when it is needed.
    pub fn put(&mut self, page: PageName, dropped: impl FnMut(PageName)) -> Put {
        if self.capacity == 0 {
            return Put::Refused;
        }
        if self.pages.contains_key(&page) {
            return Put::Already;
        }
        let Some(place) = self.free.pop().or_else(|| self.unused()) else { return Put::Refused };
        self.pages.insert(page, place);
        if self.reclaim(Some(page), dropped) { Put::At(place) } else { Put::Refused }
    }

    /// Returns the page's place, and notes that somebody wanted the page. The bytes are there until the next call of
    /// `put` or `set_capacity`: whoever sends them later than that takes the page instead.
    pub fn get(&self, page: PageName) -> Option<Place> {
        self.pages.get(&page).copied()
    }

    /// Returns the page's place, and drops the page. The place is not used again before `release`.
    pub fn take(&mut self, page: PageName) -> Option<Place> {
        self.pages.remove(&page).map(|(_, place)| place)
    }

    /// Gives back the place of a page that was taken, once, when its bytes are no longer needed.
    pub fn release(&mut self, place: Place) {
        debug_assert!(place < self.places, "place {place} was never given out");
        self.free.push(place);
    }

    /// Changes the number of pages that the member keeps, and calls `dropped` with each page that goes. The places of
    /// these pages are in `free_places` then. More capacity costs a new index, some 0.1 us for each page that is kept.
    pub fn set_capacity(&mut self, capacity: Place, dropped: impl FnMut(PageName)) {
        let shrinks = capacity < self.capacity;
        self.capacity = capacity;
        self.most_places = self.most_places.max(capacity.saturating_add(1));
        if shrinks {
            self.pages.set_capacity(u64::from(capacity));
        } else {
            // quick_cache 0.7 rounds the shares of its two parts anew at each change, and keeps what that costs. From a
            // capacity of 0 it would never find them again.
            let old = std::mem::replace(&mut self.pages, pages(capacity, &self.evicted));
            old.iter().for_each(|(page, place)| self.pages.insert(*page, *place));
        }
        self.reclaim(None, dropped);
    }

    /// Returns the places whose bytes nobody needs. The machine can have this memory back: a place that is used again
    /// is written first.
    pub fn free_places(&self) -> &[Place] {
        &self.free
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Returns the size of the index in memory, in bytes. It does not include the pages.
    pub fn index_bytes(&self) -> usize {
        self.pages.memory_used().total() + self.free.capacity() * size_of::<Place>()
    }

    /// Takes a place that was never used, if there is one.
    fn unused(&mut self) -> Option<Place> {
        let place = self.places;
        (place < self.most_places).then(|| {
            self.places += 1;
            place
        })
    }

    /// Frees the places of dropped pages. Returns whether `new`, the page that was just put, is kept: it is not if all
    /// other pages have been wanted more.
    fn reclaim(&mut self, new: Option<PageName>, mut dropped: impl FnMut(PageName)) -> bool {
        let mut is_kept = true;
        for (page, place) in self.evicted.lock().drain(..) {
            self.free.push(place);
            if Some(page) == new {
                is_kept = false;
            } else {
                dropped(page);
            }
        }
        is_kept
    }
}

fn pages(capacity: Place, evicted: &Evicted) -> Pages {
    let mut options = OptionsBuilder::new();
    options.estimated_items_capacity(capacity as usize).weight_capacity(u64::from(capacity));
    options.ghost_allocation(REMEMBERED);
    let options = options.build().expect("both sizes are given");
    Cache::with_options(options, UnitWeighter, DefaultHashBuilder::default(), evicted.clone())
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
                        prop_assert_eq!(put == Put::Already, capacity > 0 && has.contains_key(&index), "{:?}", put);
                        prop_assert!(capacity > 0 || put == Put::Refused, "{:?}", put);
                        for index in gone.drain(..) {
                            prop_assert!(has.remove(&index).is_some(), "page {} was dropped, and not there", index);
                        }
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
    fn a_page_that_is_dropped_at_once_is_refused() {
        let mut kept = Kept::new(100);
        for index in 0..200 {
            kept.put(page(index), |_| ());
        }
        // Some pages are remembered, and all that are kept are wanted.
        let wanted = (0..200).filter(|index| kept.get(page(*index)).is_some()).count();
        assert_eq!(wanted, 100);
        let mut refused = 0;
        for index in 0..200 {
            let mut gone = Vec::new();
            let put = kept.put(page(index), |page| gone.push(page.high));
            assert!(!gone.contains(&index), "page {index} was dropped when it was put");
            assert_eq!(kept.get(page(index)).is_none(), put == Put::Refused, "page {index}: {put:?}");
            refused += u32::from(put == Put::Refused);
        }
        assert!(refused > 0);
    }

    #[test]
    fn pages_that_are_taken_and_not_released_use_no_more_places() {
        let mut kept = Kept::new(10);
        let mut taken = Vec::new();
        for index in 0..200 {
            if let Put::At(place) = kept.put(page(index), |_| ()) {
                assert!(place <= 10, "place {place}");
                taken.extend(kept.take(page(index)));
            }
        }
        assert_eq!(taken.len(), 11);
        kept.release(taken[3]);
        assert_eq!(kept.put(page(1000), |_| ()), Put::At(taken[3]));
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
