//! Payload of a handoff without an offer: an ordered list of ranges of bytes in the store of the backend's machine. In
//! a message, the list follows the other fields, and the message's length tells how many parts the list has. In a
//! *handoff*, a backend sends a payload on a client's connection. An *offer* is a payload that a backend's server holds
//! ready. A *store* has the payloads of a machine's programs under `shunt run`. A *peer* is the agent of the backend's
//! machine. A *reference* names bytes in a store.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::reason::Reason;

/// Largest number of parts of one handoff (`SHUNT_PARTS_MAX`).
pub const PARTS_MAX: usize = 32;
/// Size of one part in bytes (`struct shunt_part`).
pub const PART_BYTES: usize = size_of::<Part>();

/// A range of bytes in the peer's store (`struct shunt_part`): a reference (crates/odb) without two fields. The store's
/// name is left out, because the store is the peer's. The weight is left out, because the program with the reference
/// keeps it. (The weight says how large a part of the right to fetch the payload this reference has.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Part {
    pub segment: U32,
    pub slot: U32,
    pub secret: U64,
    pub offset: U64,
    pub length: U64,
}

/// All parts of a handoff: at least one, each of at least one byte.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    list: [Part; PARTS_MAX],
    count: usize,
}

impl Parts {
    /// Makes a list of these parts. `None` where there are none, or more than [`PARTS_MAX`].
    #[must_use]
    pub fn new(parts: &[Part]) -> Option<Self> {
        let mut list = [Part::default(); PARTS_MAX];
        list.get_mut(..parts.len())?.copy_from_slice(parts);
        (!parts.is_empty()).then_some(Self { list, count: parts.len() })
    }

    /// Returns the parts in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Part] {
        &self.list[..self.count]
    }

    /// Reads the list of parts of a payload of `length` bytes.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where `bytes` is no list of parts, or its lengths do not add up to `length`.
    pub(crate) fn parse(bytes: &[u8], length: u64) -> Result<Self, Reason> {
        let parts = <[Part]>::ref_from_bytes(bytes).map_err(|_| Reason::Malformed)?;
        let fits = |part: &Part| part.length.get() > 0 && part.offset.get().checked_add(part.length.get()).is_some();
        let total = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.length.get()));
        if !parts.iter().all(fits) || total != Some(length) {
            return Err(Reason::Malformed);
        }
        Self::new(parts).ok_or(Reason::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(length: u64) -> Part {
        Part { length: length.into(), ..Part::default() }
    }

    #[test]
    fn a_list_has_the_length_that_was_said() {
        let parts = [part(7), part(5)];
        assert_eq!(Parts::parse(parts.as_bytes(), 12).unwrap().as_slice(), parts);
        assert_eq!(Parts::parse(parts.as_bytes(), 13).unwrap_err(), Reason::Malformed);
        assert_eq!(Parts::parse(&parts.as_bytes()[1..], 12).unwrap_err(), Reason::Malformed);
        assert_eq!(Parts::parse(&[], 0).unwrap_err(), Reason::Malformed);
        assert_eq!(Parts::parse([part(0), part(12)].as_bytes(), 12).unwrap_err(), Reason::Malformed);
    }

    #[test]
    fn no_list_overflows() {
        let far = Part { offset: u64::MAX.into(), ..part(1) };
        assert_eq!(Parts::parse(far.as_bytes(), 1).unwrap_err(), Reason::Malformed);
        assert_eq!(Parts::parse([part(u64::MAX), part(2)].as_bytes(), 1).unwrap_err(), Reason::Malformed);
        assert_eq!(Parts::parse([part(1); PARTS_MAX + 1].as_bytes(), 33).unwrap_err(), Reason::Malformed);
        assert!(Parts::parse([part(1); PARTS_MAX].as_bytes(), 32).is_ok());
    }
}
