//! How long fetches take besides the copying: a mean for each holder, because it is a turn of a thread where its payloads are mapped,
//! and a way through the network and back elsewhere. What a payload's writer learns goes by it ([`crate::learnt`]). All in
//! quarters of a microsecond.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::reference::Holder;

/// Holders whose means are kept at a time: one more takes another's place.
const PLACES: usize = 32;
/// The mean of a holder of which nothing is known yet.
const FIRST: u32 = 60;
/// The newest fetch counts as one of so many.
const OF: u32 = 8;
/// It counts as so many means at most: who did not run for a while, or made a connection first, has not waited for bytes alone.
const MOST: u32 = 8;
/// The longest mean that is kept.
const LONGEST: u32 = 4 * 100_000;
/// As in [`crate::learnt`]: a page is copied in a microsecond.
const BYTES_A_QUARTER: u64 = 1024;

/// By place: which holder, and above that its mean.
#[derive(Debug, Default)]
pub struct Times([AtomicU64; PLACES]);

impl Times {
    /// A fetch of so many bytes took so long: the holder's mean with it.
    pub fn took(&self, holder: &Holder, time: Duration, bytes: u64) -> u32 {
        let all = u64::try_from(time.as_nanos() / 250).unwrap_or(u64::MAX);
        let quarters = u32::try_from(all.saturating_sub(bytes / BYTES_A_QUARTER)).unwrap_or(u32::MAX);
        // Names are hashes: any part of one is as good.
        let which = holder.as_bytes().iter().take(4).fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let place = &self.0[which as usize % PLACES];
        let known = place.load(Ordering::Relaxed);
        let mean = if known as u32 == which && known != 0 { (known >> 32) as u32 } else { FIRST };
        let newest = quarters.clamp(1, mean.saturating_mul(MOST));
        let mean = ((mean * (OF - 1)).saturating_add(newest) / OF).clamp(1, LONGEST);
        // Where two threads tell it at a time, one of them is forgotten.
        place.store(u64::from(mean) << 32 | u64::from(which), Ordering::Relaxed);
        mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAR: Duration = Duration::from_micros(5);
    const FAR: Duration = Duration::from_millis(2);

    #[test]
    fn each_holder_has_a_time_of_its_own() {
        let (times, near, far) = (Times::default(), Holder::named("fe1"), Holder::named("be1"));
        for _ in 0..100 {
            times.took(&near, NEAR, 0);
            times.took(&far, FAR, 0);
        }
        assert!((18..=22).contains(&times.took(&near, NEAR, 0)));
        assert!((7900..=8000).contains(&times.took(&far, FAR, 0)));
    }

    #[test]
    fn copying_is_no_wait_and_one_that_did_not_run_counts_little() {
        let (times, holder) = (Times::default(), Holder::named("be1"));
        for _ in 0..100 {
            // A MiB in 261 us, of which the copy is 256.
            times.took(&holder, Duration::from_micros(261), 1 << 20);
        }
        let usual = times.took(&holder, NEAR, 0);
        assert!((18..=22).contains(&usual), "{usual}");
        let after = times.took(&holder, Duration::from_secs(3600), 0);
        assert!(after < 2 * usual, "{after}");
        assert!(times.took(&holder, Duration::ZERO, u64::MAX) >= 1);
    }
}
