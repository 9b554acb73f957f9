//! Choice of the version that two parties speak. Each party sends the oldest and the newest version that it knows, and
//! they speak the newest one that both know. Within a version a message may grow at its end. An older reader skips the
//! fields that it does not know, and fields that an older writer leaves out read as zero. A feature that needs the
//! other party's help has its own bit in the first message.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::reason::Reason;

/// Range of versions of a protocol, from `oldest` to `newest`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Oldest version that the party still knows.
    pub oldest: u16,
    /// Newest version that the party knows, which it prefers.
    pub newest: u16,
}

impl Versions {
    /// Returns the newest version that both parties know.
    ///
    /// # Errors
    /// [`Reason::Version`] where no version is known to both, [`Reason::Malformed`] where `other` is no range.
    pub fn common(self, other: Self) -> Result<u16, Reason> {
        if other.oldest > other.newest {
            return Err(Reason::Malformed);
        }
        let newest = self.newest.min(other.newest);
        if newest >= self.oldest.max(other.oldest) { Ok(newest) } else { Err(Reason::Version) }
    }
}

/// A message that may grow at its end.
pub trait Growing: FromBytes + FromZeros + IntoBytes + Immutable + KnownLayout + Sized {
    /// Smallest number of bytes that any writer sends, whatever its version is.
    const LEAST: usize;

    /// Reads a message from a writer of any version.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where the message is shorter than [`Self::LEAST`].
    fn read(bytes: &[u8]) -> Result<Self, Reason> {
        if bytes.len() < Self::LEAST {
            return Err(Reason::Malformed);
        }
        let mut message = Self::new_zeroed();
        let known = bytes.len().min(size_of::<Self>());
        message.as_mut_bytes()[..known].copy_from_slice(&bytes[..known]);
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_take_the_newest_that_both_know() {
        let versions = |oldest, newest| Versions { oldest, newest };
        for (ours, theirs, common) in [
            (versions(3, 5), versions(3, 5), Ok(5)),
            (versions(3, 5), versions(5, 9), Ok(5)),
            (versions(3, 5), versions(1, 3), Ok(3)),
            (versions(3, 5), versions(6, 9), Err(Reason::Version)),
            (versions(3, 5), versions(1, 2), Err(Reason::Version)),
            (versions(3, 5), versions(4, 3), Err(Reason::Malformed)),
        ] {
            assert_eq!(ours.common(theirs), common, "{ours:?} {theirs:?}");
        }
    }

    #[derive(Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
    #[repr(C)]
    struct Grown {
        always: u32,
        later: u32,
    }

    impl Growing for Grown {
        const LEAST: usize = 4;
    }

    #[test]
    fn missing_bytes_are_zero_and_unknown_bytes_are_skipped() {
        let bytes: Vec<u8> = [7u32, 8, 9].iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(Grown::read(&bytes[..4]), Ok(Grown { always: 7, later: 0 }));
        assert_eq!(Grown::read(&bytes[..8]), Ok(Grown { always: 7, later: 8 }));
        assert_eq!(Grown::read(&bytes), Ok(Grown { always: 7, later: 8 }));
        assert_eq!(Grown::read(&bytes[..3]), Err(Reason::Malformed));
    }
}
