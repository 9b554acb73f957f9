//! The shares of payloads that a process has, and their way back.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Return { payload, weight, touched });
    }

    /// All that has come, for sending.
    pub fn take(&self) -> Vec<Return> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Until the value is dropped nobody else changes it: before a fork, so that the child can [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        Still(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
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
    weight_log2: AtomicU8,
    of_bytes: AtomicU64,
    since_ms: u64,
    /// Where it has come straight from the payload's writer, who sends for real what is needed here. To others a payload
    /// has passed by somebody, and its reference was worth it, whatever they do.
    touching: Option<Touching>,
    returns: Arc<Returns>,
}

impl Hold {
    /// A share that came in a reference to so many bytes.
    #[must_use]
    pub fn new(payload: PayloadId, weight: Weight, of_bytes: u64, returns: &Arc<Returns>) -> Self {
        let (weight_log2, of_bytes) = (AtomicU8::new(weight.log2()), AtomicU64::new(of_bytes));
        Self { payload, weight_log2, of_bytes, since_ms: now_ms(), touching: None, returns: Arc::clone(returns) }
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

    /// A reference to some of its bytes for somebody else, with half of the share. `None` when it cannot be
    /// halved any more.
    #[must_use]
    pub fn refer(&self, offset: u64, length: u64) -> Option<Reference> {
        let before = self.weight_log2.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |log2| log2.checked_sub(1));
        let weight = Weight::from_log2(before.ok()? - 1)?;
        Some(Reference { payload: self.payload, weight, offset, length })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(weight) = Weight::from_log2(*self.weight_log2.get_mut()) {
            let touched = self.touching.as_ref().map(Touching::found).unwrap_or_default();
            self.returns.give_touched(self.payload, weight, touched);
        }
    }
}
