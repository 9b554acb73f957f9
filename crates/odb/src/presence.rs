//! A word of shared memory that tells programs whether their machine's store is alive. The word is the time at which
//! the store was last alive. The store writes it four times a second. The *store* is the part of the agent that has the
//! programs' payloads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Value of the word after the store has ended.
const ENDED: u64 = 0;
/// Age of the word after which a store is considered lost, in milliseconds.
const LOST_AFTER_MS: u64 = 2_000;

/// Current time in milliseconds, of a clock that all processes of a machine share.
#[must_use]
pub fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let now = Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Writes that the store was alive at `now_ms`.
pub(crate) fn seen(word: &AtomicU64, now_ms: u64) {
    word.store(now_ms.max(1), Ordering::Relaxed);
}

/// Writes that the store has ended.
pub(crate) fn end(word: &AtomicU64) {
    word.store(ENDED, Ordering::Relaxed);
}

/// Whether the store has written that it has ended. A store that was killed has not.
pub(crate) fn has_ended(word: &AtomicU64) -> bool {
    word.load(Ordering::Relaxed) == ENDED
}

/// Whether the store has not ended, and was alive less than [`LOST_AFTER_MS`] ago.
pub(crate) fn is_there(word: &AtomicU64) -> bool {
    !has_ended(word) && now_ms().saturating_sub(word.load(Ordering::Relaxed)) < LOST_AFTER_MS
}
