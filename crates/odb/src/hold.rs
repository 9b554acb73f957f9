//! The shares of payloads that a process has, and their way back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use shunt_sys::lock::{Mutex, MutexGuard};

use crate::reference::{PayloadId, Reference, Weight};
use crate::segment::now_ms;
use crate::touched::{Touched, Touching};

/// A share that goes back, and what whoever had it needed of the payload.
#[derive(Clone, Copy, Debug)]
pub struct Return {
    pub payload: PayloadId,
    pub weight: Weight,
    pub touched: Touched,
}

/// Shares that nobody has a use for any more, until somebody sends them to their holders.
#[derive(Debug, Default)]
pub struct Returns(Mutex<Vec<Return>>);

impl Returns {
    /// Takes a share back of which nobody needed anything.
    pub fn give(&self, payload: PayloadId, weight: Weight) {
        self.give_touched(payload, weight, Touched::default());
    }

    /// Takes a share back.
    pub fn give_touched(&self, payload: PayloadId, weight: Weight, touched: Touched) {
        self.0.lock().push(Return { payload, weight, touched });
    }

    /// Takes back so many units of a payload's weight, as shares, and what whoever had them needed.
    pub fn give_units(&self, payload: PayloadId, mut units: u64, mut touched: Touched) {
        while let Some(weight) = Weight::most_of(units) {
            self.give_touched(payload, weight, std::mem::take(&mut touched));
            units -= weight.units();
        }
    }

    /// All that has come, for sending.
    pub fn take(&self) -> Vec<Return> {
        std::mem::take(&mut self.0.lock())
    }

    /// Until the value is dropped nobody else changes it: before a fork, so that the child can [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        Still(self.0.lock())
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.lock().len()
    }
}

/// [`Returns::hold_still`].
#[derive(Debug)]
pub struct Still<'a>(MutexGuard<'a, Vec<Return>>);

impl Still<'_> {
    /// In the child: the parent gives these back.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

/// A share of a payload. What is left of it goes back when this is dropped.
#[derive(Debug)]
pub struct Hold {
    payload: PayloadId,
    /// What is left of the weight.
    units: AtomicU64,
    /// How often some of it was passed on.
    passed_on: AtomicU32,
    of_bytes: AtomicU64,
    since_ms: u64,
    /// Where it has come straight from the payload's writer, who sends for real what is needed here. To others a payload
    /// has passed by somebody, and its reference was worth it, whatever they do.
    touching: Option<Touching>,
    is_excused: AtomicBool,
    returns: Arc<Returns>,
}

impl Hold {
    /// A share that came in a reference to so many bytes.
    #[must_use]
    pub fn new(payload: PayloadId, weight: Weight, of_bytes: u64, returns: &Arc<Returns>) -> Self {
        let (units, passed_on, of_bytes) =
            (AtomicU64::new(weight.units()), AtomicU32::new(0), AtomicU64::new(of_bytes));
        let (since_ms, returns) = (now_ms(), Arc::clone(returns));
        let is_excused = AtomicBool::new(false);
        Self { payload, units, passed_on, of_bytes, since_ms, touching: None, is_excused, returns }
    }

    /// The same, straight from the payload's writer.
    #[must_use]
    pub fn from_writer(payload: PayloadId, weight: Weight, of_bytes: u64, returns: &Arc<Returns>) -> Self {
        let mut hold = Self::new(payload, weight, of_bytes, returns);
        hold.touching = Some(Touching::default());
        hold
    }

    /// These bytes of the payload are needed here.
    pub fn touch(&self, offset: u64, bytes: u64) {
        self.touching.iter().for_each(|touching| touching.touch(offset, bytes));
    }

    /// So many bytes are fetched because the memory that they are for cannot be absent, whoever looks at them.
    pub fn fetched(&self, bytes: u64) {
        self.touching.iter().for_each(|touching| touching.fetched(bytes));
    }

    /// So long, in quarters of a microsecond, a fetch of what is needed took ([`crate::times`]).
    pub fn waited(&self, quarters: u32) {
        self.touching.iter().for_each(|touching| touching.waited(quarters));
    }

    /// What of this payload is fetched, others like it would not be: it is not told of.
    pub fn excuse(&self) {
        self.is_excused.store(true, Ordering::Relaxed);
    }

    /// How much of the payload the process has heard of: what it has of that is a part.
    #[must_use]
    pub fn of_bytes(&self) -> u64 {
        self.of_bytes.load(Ordering::Relaxed)
    }

    /// Another reference reaches so far.
    pub fn reaches(&self, bytes: u64) {
        self.of_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// When this process got it, by the clock of [`now_ms`].
    #[must_use]
    pub fn since_ms(&self) -> u64 {
        self.since_ms
    }

    /// Of which payload.
    #[must_use]
    pub fn payload(&self) -> PayloadId {
        self.payload
    }

    /// A reference to some of its bytes for somebody else, with half of the share, or, of one that is passed on in many
    /// parts, with less. `None` when it cannot be divided any more.
    #[must_use]
    pub fn refer(&self, offset: u64, length: u64) -> Option<Reference> {
        /// With so many halves nothing is left over that takes more than one message to give back.
        const HALVES: u32 = 8;
        let part = if self.passed_on.fetch_add(1, Ordering::Relaxed) < HALVES { 2 } else { 64 };
        let share = |units: u64| Weight::most_of((units / part).max(1)).filter(|_| units > 1);
        let less = |units| Some(units - share(units)?.units());
        let before = self.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(Reference { payload: self.payload, weight: share(before)?, offset, length })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let told = self.touching.as_ref().filter(|_| !*self.is_excused.get_mut());
        let touched = told.map(Touching::found).unwrap_or_default();
        self.returns.give_units(self.payload, *self.units.get_mut(), touched);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::Holder;

    #[test]
    fn a_body_that_is_passed_on_in_a_thousand_parts_is_whole_again_when_all_have_come_back() {
        let payload = PayloadId { holder: Holder::named("be1"), segment: 0, slot: 0, secret: 0 };
        let returns = Arc::new(Returns::default());
        let first = Hold::from_writer(payload, Weight::WHOLE, 1000, &returns);
        for part in 0..1000 {
            let passed = first.refer(part, 1).unwrap_or_else(|| panic!("part {part}"));
            let next = Hold::new(payload, passed.weight, 1, &returns);
            assert!(part > 500 || next.refer(part, 1).map(|last| returns.give(payload, last.weight)).is_some());
        }
        first.touch(7, 3);
        first.waited(60);
        drop(first);
        let returned = returns.take();
        assert_eq!(returned.iter().map(|share| share.weight.units()).sum::<u64>(), Weight::WHOLE.units());
        let touched = returned.iter().fold(Touched::default(), |sum, share| sum.and(&share.touched));
        assert_eq!(touched, Touched { first: 7, end: 10, bytes: 3, waited: 60 });
    }

    #[test]
    fn what_is_excused_is_not_told_of() {
        let payload = PayloadId { holder: Holder::named("be1"), segment: 0, slot: 0, secret: 0 };
        let returns = Arc::new(Returns::default());
        let hold = Hold::from_writer(payload, Weight::WHOLE, 1000, &returns);
        hold.touch(0, 1000);
        hold.excuse();
        drop(hold);
        let returned = returns.take();
        assert!(returned.iter().all(|share| share.touched == Touched::default()));
        assert_eq!(returned.iter().map(|share| share.weight.units()).sum::<u64>(), Weight::WHOLE.units());
    }
}
