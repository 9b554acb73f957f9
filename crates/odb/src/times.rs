//! Time that fetches take besides the copying, as a mean for each *holder*: a store that has payloads (bodies that
//! programs have written). For payloads in memory that this process has mapped, this time is a switch between threads.
//! For payloads of other machines it is a round trip through the network. The time is reported to a payload's writer
//! ([`crate::learnt`]). All times are in quarters of a microsecond.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::reference::Holder;

/// Number of holders whose means are kept. A further holder takes the place of another.
const PLACES: usize = 32;
/// Mean of a holder before the first fetch from it, in quarters of a microsecond (15 us).
const FIRST: u32 = 60;
/// Divisor of the mean: the newest fetch counts for one eighth, and the mean so far for seven eighths.
const OF: u32 = 8;
/// Largest multiple of the mean that a fetch counts as. A thread that did not run for a while, or had to connect first,
/// has not waited only for bytes.
const MOST: u32 = 8;
/// Longest mean that is kept, in quarters of a microsecond: 100 ms.
const LONGEST: u32 = 4 * 100_000;
/// Bytes that are copied in a quarter of a microsecond. As in [`crate::learnt`], copying a page takes one microsecond.
const BYTES_A_QUARTER: u64 = 1024;

/// One word per place: the first four bytes of the holder's name in the lower half, and its mean in the upper half.
#[derive(Debug, Default)]
pub struct Times([AtomicU64; PLACES]);

impl Times {
    /// Takes in a fetch of `bytes` bytes that took `time`. Returns the holder's new mean.
    pub fn took(&self, holder: &Holder, time: Duration, bytes: u64) -> u32 {
        let all = u64::try_from(time.as_nanos() / 250).unwrap_or(u64::MAX);
        let quarters = u32::try_from(all.saturating_sub(bytes / BYTES_A_QUARTER)).unwrap_or(u32::MAX);
        // Names are digests, so any part of one serves as a hash.
        let which = holder.as_bytes().iter().take(4).fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let place = &self.0[which as usize % PLACES];
        let known = place.load(Ordering::Relaxed);
        let mean = if known as u32 == which && known != 0 { (known >> 32) as u32 } else { FIRST };
        let newest = quarters.clamp(1, mean.saturating_mul(MOST));
        let mean = ((mean * (OF - 1)).saturating_add(newest) / OF).clamp(1, LONGEST);
        // If two threads do this at the same time, one of the fetches is not counted.
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
    fn each_holder_has_its_own_time() {
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
            // 1 MiB in 261 us, of which 256 us are the copy.
            times.took(&holder, Duration::from_micros(261), 1 << 20);
        }
        let usual = times.took(&holder, NEAR, 0);
        assert!((18..=22).contains(&usual), "{usual}");
        let after = times.took(&holder, Duration::from_secs(3600), 0);
        assert!(after < 2 * usual, "{after}");
        assert!(times.took(&holder, Duration::ZERO, u64::MAX) >= 1);
    }
}
