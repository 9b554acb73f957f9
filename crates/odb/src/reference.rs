//! A reference: where some bytes of a payload can be had, and a share of the right to have them.
//!
//! The share is a weight, a power of two. A payload begins with [`Weight::WHOLE`] in one reference; two are made of one
//! by halving; the holder frees the payload when the whole has come back. So forwarding needs no message to the
//! holder, and nobody can free what somebody else still has a reference to.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A share of a payload, as a power of two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Weight(u8);

impl Weight {
    /// All of it.
    pub const WHOLE: Self = Self(62);

    /// `None` where it is no weight.
    #[must_use]
    pub const fn from_log2(log2: u8) -> Option<Self> {
        if log2 <= Self::WHOLE.0 { Some(Self(log2)) } else { None }
    }

    /// The largest that is not more than so many units; `None` of none.
    #[must_use]
    pub fn most_of(units: u64) -> Option<Self> {
        units.checked_ilog2().map(|log2| Self(Self::WHOLE.0.min(log2 as u8)))
    }

    /// Its binary logarithm.
    #[must_use]
    pub fn log2(self) -> u8 {
        self.0
    }

    /// As a number: what a holder adds up.
    #[must_use]
    pub fn units(self) -> u64 {
        1 << self.0
    }

    /// Each of its halves; `None` when it is the smallest.
    #[must_use]
    pub fn half(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }
}

/// Whose store: a digest of the name of the agent that has it, the same on every machine. Where that agent is, and
/// whether it may be asked, a reader's own agent knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Holder([u8; 16]);

impl Holder {
    /// The store of the agent of that name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let mut hasher = SipHasher24::new();
        hasher.write(name.as_bytes());
        Self(hasher.finish128().as_bytes())
    }
}

impl From<[u8; 16]> for Holder {
    fn from(digest: [u8; 16]) -> Self {
        Self(digest)
    }
}

impl From<Holder> for [u8; 16] {
    fn from(holder: Holder) -> Self {
        holder.0
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {:08x}", u128::from_be_bytes(self.0) >> 96)
    }
}

/// Which payload: unguessable, and never another one's again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadId {
    /// Whose store has it.
    pub holder: Holder,
    /// The segment of the holder's store.
    pub segment: u32,
    /// The slot in the segment.
    pub slot: u32,
    /// Who has this may read the payload.
    pub secret: u64,
}

impl fmt::Debug for PayloadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payload {}/{} of {:?}", self.segment, self.slot, self.holder)
    }
}

/// Some bytes of a payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference {
    pub payload: PayloadId,
    pub weight: Weight,
    /// The first byte of the payload that is meant.
    pub offset: u64,
    /// How many; at least 1.
    pub length: u64,
}

/// Bytes of a [`Reference`] in a connection.
pub const REFERENCE_BYTES: usize = size_of::<Layout>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Layout {
    holder: Holder,
    weight_log2: u8,
    zero: [u8; 3],
    segment: U32,
    slot: U32,
    secret: U64,
    offset: U64,
    length: U64,
}

impl Reference {
    /// As it goes through a connection.
    #[must_use]
    pub fn emit(&self) -> [u8; REFERENCE_BYTES] {
        let layout = Layout {
            holder: self.payload.holder,
            weight_log2: self.weight.log2(),
            zero: [0; 3],
            segment: self.payload.segment.into(),
            slot: self.payload.slot.into(),
            secret: self.payload.secret.into(),
            offset: self.offset.into(),
            length: self.length.into(),
        };
        zerocopy::transmute!(layout)
    }

    /// `None` where no [`Self::emit`] has made these bytes.
    #[must_use]
    pub fn parse(bytes: &[u8; REFERENCE_BYTES]) -> Option<Self> {
        let layout: Layout = zerocopy::transmute!(*bytes);
        let (offset, length) = (layout.offset.get(), layout.length.get());
        if layout.zero != [0; 3] || length == 0 || offset.checked_add(length).is_none() {
            return None;
        }
        let payload = PayloadId {
            holder: layout.holder,
            segment: layout.segment.get(),
            slot: layout.slot.get(),
            secret: layout.secret.get(),
        };
        Some(Self { payload, weight: Weight::from_log2(layout.weight_log2)?, offset, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_emitted_parses_to_itself(
            name in "[a-z]{1,63}", log2 in 0u8..=62, segment in any::<u32>(),
            slot in any::<u32>(), secret in any::<u64>(), offset in 0..u64::MAX / 2, length in 1..u64::MAX / 2,
        ) {
            let payload = PayloadId { holder: Holder::named(&name), segment, slot, secret };
            let reference = Reference { payload, weight: Weight::from_log2(log2).unwrap(), offset, length };
            prop_assert_eq!(Reference::parse(&reference.emit()), Some(reference));
        }

        #[test]
        fn no_bytes_make_a_reference_that_overflows(bytes in any::<[u8; REFERENCE_BYTES]>()) {
            if let Some(reference) = Reference::parse(&bytes) {
                prop_assert!(reference.offset.checked_add(reference.length).is_some());
                prop_assert_eq!(reference.emit(), bytes);
            }
        }

        #[test]
        fn halves_add_up(splits in proptest::collection::vec(any::<prop::sample::Index>(), 0..200)) {
            let mut shares = vec![Weight::WHOLE];
            for split in splits {
                let at = split.index(shares.len());
                if let Some(half) = shares[at].half() {
                    shares[at] = half;
                    shares.push(half);
                }
            }
            prop_assert_eq!(shares.iter().map(|share| share.units()).sum::<u64>(), Weight::WHOLE.units());
        }
    }

    #[test]
    fn the_smallest_weight_has_no_half_and_the_largest_is_the_whole() {
        assert_eq!(Weight::from_log2(0).unwrap().half(), None);
        assert_eq!(Weight::from_log2(63), None);
    }
}
