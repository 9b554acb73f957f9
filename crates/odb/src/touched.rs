//! Bytes of a payload that its first receiver needed itself. The first receiver is the program that the payload's
//! writer sent it to. It touched the bytes, or a call needed them, or their memory could not be absent. Each share that
//! comes back reports such bytes. The store adds the reports up, and the writer reads the sum ([`crate::learnt`]). A
//! *share* is a part of the right to fetch the payload. Memory is *absent* while it only stands for bytes of a payload.

use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a payload that were needed. A reader that reports wrong bytes can only cause bad guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Offset in the payload of the first byte that was touched. `end` is the offset behind the last one. Both are
    /// equal if none was touched.
    pub first: u32,
    pub end: u32,
    /// Number of bytes that were fetched.
    pub bytes: u32,
    /// Time of the fetches besides the copying, in quarters of a microsecond ([`crate::times`]).
    pub waited: u32,
}

impl Touched {
    /// Whether nothing was needed.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the place of the touched bytes is known.
    fn is_somewhere(&self) -> bool {
        self.first < self.end
    }

    /// Adds the reports of two shares.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let (first, end) = match (self.is_somewhere(), other.is_somewhere()) {
            (true, true) => (self.first.min(other.first), self.end.max(other.end)),
            (false, _) => (other.first, other.end),
            (true, false) => (self.first, self.end),
        };
        Self {
            first,
            end,
            bytes: self.bytes.saturating_add(other.bytes),
            waited: self.waited.saturating_add(other.waited),
        }
    }

    /// Converts to two numbers.
    #[must_use]
    pub fn to_longs(self) -> [u64; 2] {
        [u64::from(self.first) | u64::from(self.end) << 32, u64::from(self.bytes) | u64::from(self.waited) << 32]
    }

    /// Converts from the numbers of [`Self::to_longs`]. Any numbers are valid.
    #[must_use]
    pub fn from_longs([place, amount]: [u64; 2]) -> Self {
        Self { first: place as u32, end: (place >> 32) as u32, bytes: amount as u32, waited: (amount >> 32) as u32 }
    }
}

/// [`Touched`] in a message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TouchedLayout([U32; 4]);

impl From<Touched> for TouchedLayout {
    fn from(Touched { first, end, bytes, waited }: Touched) -> Self {
        Self([first, end, bytes, waited].map(U32::from))
    }
}

impl From<TouchedLayout> for Touched {
    fn from(TouchedLayout([first, end, bytes, waited]): TouchedLayout) -> Self {
        Self { first: first.get(), end: end.get(), bytes: bytes.get(), waited: waited.get() }
    }
}

/// [`Touched`] while several threads record it.
#[derive(Debug)]
pub struct Touching {
    first: AtomicU32,
    end: AtomicU32,
    bytes: AtomicU32,
    waited: AtomicU32,
}

impl Default for Touching {
    fn default() -> Self {
        let zero = || AtomicU32::new(0);
        Self { first: AtomicU32::new(u32::MAX), end: zero(), bytes: zero(), waited: zero() }
    }
}

fn short(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

impl Touching {
    /// Records that these bytes of the payload are fetched because they are touched.
    pub fn touch(&self, offset: u64, bytes: u64) {
        self.first.fetch_min(short(offset), Ordering::Relaxed);
        self.end.fetch_max(short(offset.saturating_add(bytes)), Ordering::Relaxed);
        self.fetched(bytes);
    }

    /// Records that `bytes` bytes are fetched because their memory cannot be absent. This says nothing about which
    /// bytes the program reads.
    pub fn fetched(&self, bytes: u64) {
        self.bytes.fetch_add(short(bytes), Ordering::Relaxed);
    }

    /// Records the duration of a fetch, in quarters of a microsecond.
    pub fn waited(&self, quarters: u32) {
        self.waited.fetch_add(quarters, Ordering::Relaxed);
    }

    /// Returns what was recorded.
    #[must_use]
    pub fn found(&self) -> Touched {
        let load = |value: &AtomicU32| value.load(Ordering::Relaxed);
        let (first, end) = (load(&self.first), load(&self.end));
        let (first, end) = if first < end { (first, end) } else { (0, 0) };
        Touched { first, end, bytes: load(&self.bytes), waited: load(&self.waited) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_say_together_what_one_would_say(
            touches in proptest::collection::vec((0u64..100_000, 1u64..100_000, any::<bool>(), any::<bool>()), 0..20),
        ) {
            let (one, two, all) = (Touching::default(), Touching::default(), Touching::default());
            for (offset, bytes, first, somewhere) in touches {
                for share in [if first { &one } else { &two }, &all] {
                    if somewhere { share.touch(offset, bytes) } else { share.fetched(bytes) }
                    share.waited(offset as u32 % 1000);
                }
            }
            prop_assert_eq!(one.found().and(&two.found()), all.found());
            prop_assert_eq!(Touched::from_longs(all.found().to_longs()), all.found());
            prop_assert_eq!(Touched::from(TouchedLayout::from(all.found())), all.found());
        }

        #[test]
        fn whatever_a_peer_says_adds_up_to_something(one in any::<[u64; 2]>(), two in any::<[u64; 2]>()) {
            let sum = Touched::from_longs(one).and(&Touched::from_longs(two));
            prop_assert!(sum.bytes >= Touched::from_longs(one).bytes);
        }
    }
}
