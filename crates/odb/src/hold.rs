//! Shares of payloads that a process has, and their return to the *holders*, the stores that have the payloads. A
//! *share* is a part of the right to fetch a payload. It came with a *reference*, which names bytes of the payload. Its
//! size is its *weight*, a power of two. Memory is *absent* while it only stands for bytes of a payload. *Real* bytes
//! are sent as they are, without a reference.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use shunt_sys::lock::{Mutex, MutexGuard};

use crate::reference::{PayloadId, Reference, Weight};
use crate::segment::now_ms;
use crate::touched::{Touched, Touching};

/// A share that goes back to its holder, with a record of the bytes that this process needed of the payload.
#[derive(Clone, Copy, Debug)]
pub struct Return {
    pub payload: PayloadId,
    pub weight: Weight,
    pub touched: Touched,
}

/// Unused shares that wait to be sent to their holders.
#[derive(Debug, Default)]
pub struct Returns(Mutex<Vec<Return>>);

impl Returns {
    /// Queues a share to be given back to its holder. No byte of its payload was needed.
    pub fn give(&self, payload: PayloadId, weight: Weight) {
        self.give_touched(payload, weight, Touched::default());
    }

    /// Queues a share to be given back to its holder, with a record of the payload's bytes that were needed.
    pub fn give_touched(&self, payload: PayloadId, weight: Weight, touched: Touched) {
        self.0.lock().push(Return { payload, weight, touched });
    }

    /// Queues `units` of a payload's weight to be given back, as one or more shares. The first of them has the record
    /// of the payload's bytes that were needed.
    pub fn give_units(&self, payload: PayloadId, mut units: u64, mut touched: Touched) {
        while let Some(weight) = Weight::most_of(units) {
            self.give_touched(payload, weight, std::mem::take(&mut touched));
            units -= weight.units();
        }
    }

    /// Takes all shares that wait, for sending.
    pub fn take(&self) -> Vec<Return> {
        std::mem::take(&mut self.0.lock())
    }

    /// Prevents changes until the value is dropped. To be held during a fork, so that the child can call
    /// [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        Still(self.0.lock())
    }

    /// Number of shares that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.lock().len()
    }
}

/// Lock held by [`Returns::hold_still`].
#[derive(Debug)]
pub struct Still<'a>(MutexGuard<'a, Vec<Return>>);

impl Still<'_> {
    /// Drops the shares, in the child of a fork: the parent returns them.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

/// A process's share of a payload. When this value is dropped, the rest of the share's weight is queued to be given
/// back.
#[derive(Debug)]
pub struct Hold {
    payload: PayloadId,
    /// Units of the weight that are left.
    units: AtomicU64,
    /// Number of references that were made for other programs.
    passed_on: AtomicU32,
    of_bytes: AtomicU64,
    since_ms: u64,
    /// Bytes needed by this process. They are recorded only if the share came straight from the payload's writer,
    /// because the writer then sends such bytes as real ones. If another program has passed the payload on, the payload
    /// was worth a reference, whatever is needed here.
    touching: Option<Touching>,
    is_excused: AtomicBool,
    returns: Arc<Returns>,
}

impl Hold {
    /// Keeps a share that came with a reference. `of_bytes`: offset in the payload at which the reference's bytes end.
    #[must_use]
    pub fn new(payload: PayloadId, weight: Weight, of_bytes: u64, returns: &Arc<Returns>) -> Self {
        let (units, passed_on, of_bytes) =
            (AtomicU64::new(weight.units()), AtomicU32::new(0), AtomicU64::new(of_bytes));
        let (since_ms, returns) = (now_ms(), Arc::clone(returns));
        let is_excused = AtomicBool::new(false);
        Self { payload, units, passed_on, of_bytes, since_ms, touching: None, is_excused, returns }
    }

    /// The same as [`Self::new`] for a share straight from the payload's writer.
    #[must_use]
    pub fn from_writer(payload: PayloadId, weight: Weight, of_bytes: u64, returns: &Arc<Returns>) -> Self {
        let mut hold = Self::new(payload, weight, of_bytes, returns);
        hold.touching = Some(Touching::default());
        hold
    }

    /// Records that these bytes of the payload are needed here.
    pub fn touch(&self, offset: u64, bytes: u64) {
        self.touching.iter().for_each(|touching| touching.touch(offset, bytes));
    }

    /// Records that `bytes` bytes are fetched because their memory cannot be absent, whether or not anything reads
    /// them.
    pub fn fetched(&self, bytes: u64) {
        self.touching.iter().for_each(|touching| touching.fetched(bytes));
    }

    /// Records the duration of a fetch of needed bytes, in quarters of a microsecond ([`crate::times`]).
    pub fn waited(&self, quarters: u32) {
        self.touching.iter().for_each(|touching| touching.waited(quarters));
    }

    /// Suppresses the report on needed bytes: they are fetched for a reason that does not hold for later payloads of
    /// this kind.
    pub fn excuse(&self) {
        self.is_excused.store(true, Ordering::Relaxed);
    }

    /// Offset in the payload at which the last bytes end to which this process has got a reference. The process may
    /// have got no references to some of the bytes before.
    #[must_use]
    pub fn of_bytes(&self) -> u64 {
        self.of_bytes.load(Ordering::Relaxed)
    }

    /// Records that another reference's bytes end at offset `bytes` of the payload.
    pub fn reaches(&self, bytes: u64) {
        self.of_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Time at which this process got the share, by the clock of [`now_ms`].
    #[must_use]
    pub fn since_ms(&self) -> u64 {
        self.since_ms
    }

    /// Payload of the share.
    #[must_use]
    pub fn payload(&self) -> PayloadId {
        self.payload
    }

    /// Makes a reference to some of the bytes for another program. The first eight references each get about half of
    /// the weight that is left, and later ones about a 64th. `None` if the weight cannot be divided any more.
    #[must_use]
    pub fn refer(&self, offset: u64, length: u64) -> Option<Reference> {
        /// Number of references that get half of the weight that is left. Half of a power of two is again a power of
        /// two, so the rest goes back as one share. After other parts the rest goes back as several shares.
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
    fn excused_shares_are_not_reported() {
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
