//! Headers and kinds of the frames between two agents. The module `peer` has the bodies.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a frame's header in bytes.
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();
/// Longest frame in bytes, header included.
pub const MAX_FRAME_BYTES: usize = 8192;

/// Kinds of frames.
pub mod kind {
    #![allow(missing_docs)]
    pub const HELLO: u16 = 1;
    pub const CLAIM: u16 = 2;
    pub const ABORT: u16 = 3;
    pub const ENDED: u16 = 4;
    pub const FETCH: u16 = 5;
    pub const FETCHED: u16 = 6;
    pub const REFUSED: u16 = 7;
    pub const SPACING: u16 = 8;
    pub const PING: u16 = 9;
    pub const CLOSED: u16 = 12;
    pub const SPEAKS_FOR: u16 = 13;
    pub const STORE: u16 = 20;
    pub const STORED: u16 = 21;
    pub const CLAIM_PARTS: u16 = 22;
    pub const ASK: u16 = 23;
    pub const ANSWER: u16 = 24;
    pub const PROVE: u16 = 25;
    pub const DIGEST: u16 = 26;
    pub const EXAMINE: u16 = 27;
    pub const EXAMINED: u16 = 28;
    pub const DELIVERED: u16 = 29;
    pub const WITHDRAWN: u16 = 30;
    pub const ADDRESSES: u16 = 31;
    pub const SOURCES: u16 = 32;
}

/// Header at the start of every frame.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// Length of the whole frame in bytes, this header included.
    pub length: U32,
    /// Kind of the frame, a constant of [`kind`].
    pub kind: U16,
    /// Reserved, zero.
    pub zero: U16,
}

impl FrameHeader {
    /// Appends a frame of this kind whose body is the concatenation of `parts`.
    pub(crate) fn emit(kind: u16, parts: &[&[u8]], out: &mut Vec<u8>) {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let header = Self { length: U32::new((HEADER_BYTES + bytes) as u32), kind: U16::new(kind), zero: U16::ZERO };
        out.extend_from_slice(header.as_bytes());
        parts.iter().for_each(|part| out.extend_from_slice(part));
    }
}
