//! A reference: the place of some bytes of a payload, and a share of the right to fetch them. A *payload* is a body
//! that a program has written.
//!
//! The share is a weight, a power of two. A new payload has one reference with [`Weight::WHOLE`]. To make two
//! references of one, its weight is halved. The holder frees the payload when the whole weight has come back. So
//! forwarding needs no message to the holder. A payload is not freed while a reference to it exists, unless its *lease*
//! (the time for which the holder keeps it) has ended. The holder is a store, a part of an *agent* (Shunt's daemon on
//! each machine). The store leases *segments* of memory to programs; a *slot* is a segment's entry for one payload.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Share of a payload: a power of two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Weight(u8);

impl Weight {
    /// Weight of a new payload.
    pub const WHOLE: Self = Self(62);

    /// Returns the weight 2^`log2`; `None` if that is more than [`Self::WHOLE`].
    #[must_use]
    pub const fn from_log2(log2: u8) -> Option<Self> {
        if log2 <= Self::WHOLE.0 { Some(Self(log2)) } else { None }
    }

    /// Largest weight of at most `units` units; `None` for 0.
    #[must_use]
    pub fn most_of(units: u64) -> Option<Self> {
        units.checked_ilog2().map(|log2| Self(Self::WHOLE.0.min(log2 as u8)))
    }

    /// Binary logarithm of the weight.
    #[must_use]
    pub fn log2(self) -> u8 {
        self.0
    }

    /// The weight as a number of units, which a holder adds up.
    #[must_use]
    pub fn units(self) -> u64 {
        1 << self.0
    }

    /// Half of the weight; `None` if it is the smallest.
    #[must_use]
    pub fn half(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }
}

/// Name of a store: a digest of the name of the agent that has it, the same on every machine. The agent of a program
/// that fetches knows where the store's agent is, and whether the program may fetch there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Holder([u8; 16]);

impl Holder {
    /// Name of the store of the agent with this name.
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

/// Identity of a payload. It cannot be guessed, and is never used again for another payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadId {
    /// Store that holds the payload.
    pub holder: Holder,
    /// Number of the segment in the store.
    pub segment: u32,
    /// Number of the slot in the segment.
    pub slot: u32,
    /// Secret number without which the store gives no bytes of the payload.
    pub secret: u64,
}

impl fmt::Debug for PayloadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payload {}/{} of {:?}", self.segment, self.slot, self.holder)
    }
}

/// Reference to some bytes of a payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference {
    pub payload: PayloadId,
    pub weight: Weight,
    /// Offset of the first byte in the payload.
    pub offset: u64,
    /// Number of bytes, at least 1.
    pub length: u64,
}

/// Length of a [`Reference`] in a connection, in bytes.
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
    /// Serializes the reference for a connection.
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

    /// Parses the bytes of [`Self::emit`]; `None`: the bytes are no reference.
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
        fn an_emitted_reference_parses_to_itself(
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
