//! How much of a payload whoever its writer sent it to has needed itself: by a touch, by a call, or because its memory could
//! not be absent. Told with each share that comes back, summed by the store, read by the writer ([`crate::learnt`]).

use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What of a payload was needed. Whatever a peer says here makes a bad guess at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// The first byte that was touched, and the end of the last; the same where none was.
    pub first: u32,
    pub end: u32,
    /// Bytes that were fetched.
    pub bytes: u32,
    /// The time that the fetches took besides the copying, in quarters of a microsecond ([`crate::times`]).
    pub waited: u32,
}

impl Touched {
    /// Whether nothing was needed.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.bytes == 0
    }

    /// Whether a place is known.
    fn is_somewhere(&self) -> bool {
        self.first < self.end
    }

    /// What two shares say together.
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

    /// As two numbers.
    #[must_use]
    pub fn to_longs(self) -> [u64; 2] {
        [u64::from(self.first) | u64::from(self.end) << 32, u64::from(self.bytes) | u64::from(self.waited) << 32]
    }

    /// Back from there: any are good.
    #[must_use]
    pub fn from_longs([place, amount]: [u64; 2]) -> Self {
        Self { first: place as u32, end: (place >> 32) as u32, bytes: amount as u32, waited: (amount >> 32) as u32 }
    }
}

/// The same in a message.
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

/// The same while it is found out, by several threads.
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
    /// These bytes of the payload are fetched because somebody looks at them.
    pub fn touch(&self, offset: u64, bytes: u64) {
        self.first.fetch_min(short(offset), Ordering::Relaxed);
        self.end.fetch_max(short(offset.saturating_add(bytes)), Ordering::Relaxed);
        self.fetched(bytes);
    }

    /// So many are fetched for a reason that says nothing of their place: memory that cannot be absent.
    pub fn fetched(&self, bytes: u64) {
        self.bytes.fetch_add(short(bytes), Ordering::Relaxed);
    }

    /// So long, in quarters of a microsecond, a fetch of some took.
    pub fn waited(&self, quarters: u32) {
        self.waited.fetch_add(quarters, Ordering::Relaxed);
    }

    /// What has been found.
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
