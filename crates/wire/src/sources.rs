//! Sources of a machine: the stores that its programs can fetch from. A *store* has the payloads (bodies) of a
//! machine's programs under `shunt run`. Each agent tells its peers (other machines' agents) the sources of its
//! machine. A *reference* names bytes of a store, and is sent in their place. A program on a peer's machine looks at
//! the sources of a receiver's machine: it sends references only to programs that can fetch those bytes (crates/odb,
//! sources.rs).

use zerocopy::IntoBytes;

use crate::frame::{FrameHeader, kind};
use crate::reason::Reason;

/// Largest number of sources of one machine: its own store, and those of 256 peers.
pub const SOURCES_MAX: usize = 257;

/// Name of a store, as it stands in references.
pub type Source = [u8; 16];

/// A list of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sources {
    list: [Source; SOURCES_MAX],
    count: usize,
}

impl Sources {
    /// Makes a list of the first [`SOURCES_MAX`] of these stores.
    #[must_use]
    pub fn of(stores: impl IntoIterator<Item = Source>) -> Self {
        let mut all = Self { list: [[0; 16]; SOURCES_MAX], count: 0 };
        for (place, store) in all.list.iter_mut().zip(stores) {
            *place = store;
            all.count += 1;
        }
        all
    }

    /// Returns the sources in order.
    pub fn iter(&self) -> impl Iterator<Item = Source> + '_ {
        self.list[..self.count].iter().copied()
    }

    /// Appends the list as one frame (SOURCES).
    pub fn emit(&self, out: &mut Vec<u8>) {
        FrameHeader::emit(kind::SOURCES, &[self.list[..self.count].as_bytes()], out);
    }

    /// Reads the body of a frame.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where it is no list of sources, or one longer than [`SOURCES_MAX`].
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Reason> {
        let (stores, rest) = body.as_chunks::<16>();
        if !rest.is_empty() || stores.len() > SOURCES_MAX {
            return Err(Reason::Malformed);
        }
        Ok(Self::of(stores.iter().copied()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::Frame;

    fn stores(count: usize) -> impl Iterator<Item = Source> {
        (0..count).map(|number| [(number % 251) as u8 + 1; 16])
    }

    #[test]
    fn emit_then_parse_is_the_identity() {
        for count in [0, 1, 3, SOURCES_MAX, SOURCES_MAX + 1] {
            let mut bytes = Vec::new();
            Sources::of(stores(count)).emit(&mut bytes);
            let (frame, length) = Frame::parse(&bytes).unwrap().unwrap();
            assert_eq!(length, bytes.len());
            let Frame::Sources(sources) = frame else { panic!("{frame:?}") };
            assert!(sources.iter().eq(stores(count.min(SOURCES_MAX))), "{count}");
        }
    }

    #[test]
    fn a_longer_list_and_half_a_name_are_refused() {
        assert_eq!(Sources::parse(&[1; (SOURCES_MAX + 1) * 16]).unwrap_err(), Reason::Malformed);
        assert_eq!(Sources::parse(&[1; 17]).unwrap_err(), Reason::Malformed);
    }
}
