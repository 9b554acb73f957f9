//! Filter of a mount, for the pages of one member.
//!
//! A member tells each mount, in order, which pages it has kept and which it has dropped. The mount counts them in a
//! quotient filter (Pandey et al., SIGMOD 2017), which can forget, grow and shrink. It answers "no" for a page that was
//! never told, or "perhaps". So a read of a page that no member has costs no request, but for the rare wrong "perhaps".
//!
//! A page that the member has kept, and that the mount has not heard of yet, is read from the source.

use qfilter::Filter;

use crate::name::PageName;

/// Least capacity of a filter, in pages (256 MiB).
const LEAST_CAPACITY: u64 = 1 << 16;
/// Capacity up to which a filter grows, in pages (1 TiB).
const MOST_CAPACITY: u64 = 1 << 28;
/// Greatest share of wrong answers, which a filter of MOST_CAPACITY pages has. Smaller filters have far fewer.
const WRONG_ANSWERS: f64 = 0.01;

/// Pages that a member may have.
pub struct Known {
    filter: Filter,
    /// Capacity of an empty filter: the number of pages that the member lends, within bounds.
    least: u64,
    answers: Answers,
}

/// Counts of answers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Answers {
    /// Pages that the member does not have.
    pub no: u64,
    /// Pages that the member may have.
    pub perhaps: u64,
    /// Pages of `perhaps` that the member did not have when it was asked.
    pub wrong: u64,
}

impl Known {
    /// Makes an empty filter for a member that lends `lent` pages. It grows if the member lends more later, but that
    /// takes some 20 ns for each page, in the thread that learns of a page.
    pub fn new(lent: u64) -> Self {
        let least = lent.clamp(LEAST_CAPACITY, MOST_CAPACITY);
        Self { filter: empty(least), least, answers: Answers::default() }
    }

    /// Notes that the member has kept the page. Returns whether there was room: beyond 2^28 pages it may stay unknown,
    /// and is read from the source.
    pub fn kept(&mut self, page: PageName) -> bool {
        self.filter.insert_fingerprint(true, page.low).is_ok()
    }

    /// Notes that the member has dropped the page. A filter that has grown shrinks when it is less than a quarter full.
    pub fn dropped(&mut self, page: PageName) {
        self.filter.remove_fingerprint(page.low);
        if self.filter.capacity() > self.least * 2 && self.filter.len() < self.filter.capacity() / 4 {
            self.filter.shrink_to_fit();
        }
    }

    /// Forgets all pages: the member has begun anew, or what it told was lost.
    pub fn clear(&mut self) {
        self.filter = empty(self.least);
    }

    /// Returns whether the member may have the page.
    pub fn may_have(&mut self, page: PageName) -> bool {
        let found = self.filter.contains_fingerprint(page.low);
        if found {
            self.answers.perhaps += 1;
        } else {
            self.answers.no += 1;
        }
        found
    }

    /// Notes that the member did not have a page that it might have had.
    pub fn was_wrong(&mut self) {
        self.answers.wrong += 1;
    }

    /// Returns the number of pages that the member has, as far as the mount knows.
    pub fn pages(&self) -> u64 {
        self.filter.len()
    }

    /// Returns the filter's size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.filter.memory_usage()
    }

    /// Returns the expected share of wrong answers for pages that the member does not have.
    pub fn expected_wrong(&self) -> f64 {
        self.filter.current_error_ratio()
    }

    pub fn answers(&self) -> Answers {
        self.answers
    }
}

/// Makes an empty filter with room for `capacity` pages.
///
/// # Panics
/// If the processor lacks POPCNT or BMI2, as some before 2015 do.
fn empty(capacity: u64) -> Filter {
    Filter::new_resizeable(capacity, MOST_CAPACITY, WRONG_ANSWERS).expect("sizes within qfilter's limits")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::name::{FileId, Namer};

    fn page(index: u64) -> PageName {
        Namer::new(&[1; 16]).page(FileId { filesystem: 1, inode: 1, generation: 0 }, 0, index)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

        #[test]
        fn a_page_that_the_member_has_is_never_denied(
            steps in prop::collection::vec((0u64..300, any::<bool>()), 0..2000),
        ) {
            let (mut known, mut has) = (Known::new(100), HashSet::new());
            for (index, kept) in steps {
                // A member says "kept" only of a page that it did not have, and "dropped" only of one that it had.
                if kept && has.insert(index) {
                    known.kept(page(index));
                } else if !kept && has.remove(&index) {
                    known.dropped(page(index));
                }
                prop_assert_eq!(known.pages(), has.len() as u64);
            }
            for index in &has {
                prop_assert!(known.may_have(page(*index)));
            }
        }
    }

    #[test]
    fn it_grows_and_shrinks_and_rarely_errs() {
        let (mut known, pages) = (Known::new(0), 4 * LEAST_CAPACITY);
        let small = known.bytes();
        assert!((0..pages).all(|index| known.kept(page(index))));
        assert!((0..pages).all(|index| known.may_have(page(index))));
        let large = known.bytes();
        assert!(large > 2 * small, "{small} bytes before, {large} after");
        assert!(large as u64 <= 6 * pages, "{large} bytes for {pages} pages");

        let wrong = (pages..2 * pages).filter(|index| known.may_have(page(*index))).count();
        assert!(wrong as u64 <= pages / 1000, "{wrong} wrong answers of {pages}");
        assert_eq!(known.answers(), Answers { no: pages - wrong as u64, perhaps: pages + wrong as u64, wrong: 0 });

        (0..pages).for_each(|index| known.dropped(page(index)));
        assert_eq!(known.pages(), 0);
        assert!(known.bytes() <= 4 * small, "{} bytes when empty, {small} when new", known.bytes());
    }

    #[test]
    fn it_has_room_for_what_the_member_lends() {
        let mut known = Known::new(4 * LEAST_CAPACITY);
        let before = known.bytes();
        assert!((0..4 * LEAST_CAPACITY).all(|index| known.kept(page(index))));
        assert_eq!(known.bytes(), before);
    }

    #[test]
    fn a_member_that_begins_anew_has_nothing() {
        let mut known = Known::new(0);
        known.kept(page(1));
        known.clear();
        assert!(!known.may_have(page(1)));
        assert_eq!(known.pages(), 0);
    }
}
