//! Messages between programs and the store of their machine (SOCK_SEQPACKET), and between readers and stores
//! (crate::channel). A *segment* is memory that the store leases to a program for its payloads. An *entrance* is a
//! connection to the store that child processes inherit. A *reference* names bytes of a payload, and has a share of the
//! right to fetch them. The share's size is its *weight*. A *reader* is a program that fetches payloads. The *agent* is
//! Shunt's daemon on each machine.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::place::Version;
use crate::records::Sealing;
use crate::reference::{Holder, REFERENCE_BYTES};
use crate::touched::TouchedLayout;

/// Kinds of questions that a program asks.
pub mod ask {
    /// Asks for the name of the store. A program asks this first on each connection that does not become an entrance.
    pub const HELLO: u32 = 1;
    /// Asks for a segment to write into. The answer has the segment's memfd.
    pub const LEASE: u32 = 2;
    /// Asks to map a segment of this store. The answer has the segment's memfd, read-only.
    pub const MAP: u32 = 3;
    /// Asks for a connection to a store, this one or another. The answer has the connection's socket.
    pub const REACH: u32 = 4;
    /// Asks for memory in which the program keeps its counts (super::usage) as long as the connection lives. The answer
    /// has the memory's memfd.
    pub const COUNT: u32 = 5;
    /// Asks for a connection with the agent, to hand off connections with clients (include/shunt.h). The answer has the
    /// socket of the connection with the agent.
    pub const HAND_OFF: u32 = 6;
    /// Gives the store a file, with its descriptor. References will name it by a number that the program has chosen.
    pub const KEEP_FILE: u32 = 7;
    /// Asks to read a file that a program has sent. The answer has a descriptor of the file.
    pub const OPEN_FILE: u32 = 8;
    /// Makes the connection an entrance, which programs of many users will inherit. From then on the store takes only
    /// ENTER on it. Allowed as long as the program has got no segment, no connection to another machine's store and no
    /// memory for counts over the connection.
    pub const ENTRANCE: u32 = 9;
    /// At an entrance, with one end of a pair of sockets: asks to serve the program that made the pair, as if it had
    /// connected. There is no answer.
    pub const ENTER: u32 = 10;
    /// Asks for the table of which machines' programs can fetch from which stores (crate::sources). The answer has the
    /// table's memfd, read-only.
    pub const SOURCES: u32 = 11;
}

/// Outcomes of questions.
pub mod outcome {
    pub const GOOD: u32 = 0;
    /// The store is full, or there are as many connections as it allows.
    pub const FULL: u32 = 1;
    /// This program is not allowed to do that.
    pub const NOT_ALLOWED: u32 = 2;
    /// The thing that was asked for does not exist, or cannot be had from any machine.
    pub const NOT_THERE: u32 = 3;
}

/// Question of a program. Each question but ENTER is answered by [`Told`], in order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Ask {
    pub kind: U32,
    /// MAP, KEEP_FILE, OPEN_FILE: number of the segment.
    pub segment: U32,
    /// REACH: store to connect to.
    pub holder: Holder,
    /// KEEP_FILE, OPEN_FILE: number of the file.
    pub file: U32,
    pub zero: U32,
}

/// Answer of the store.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Told {
    /// Kind of the question.
    pub kind: U32,
    pub outcome: U32,
    /// LEASE: number of the segment.
    pub segment: U32,
    pub zero: U32,
    /// Name of the store that answers.
    pub holder: Holder,
    /// REACH: state of the connection's encryption.
    pub sealing: Sealing,
    /// KEEP_FILE, OPEN_FILE: state of the file when the store got it.
    pub version: Version,
}

/// Kind of request: asks for the bytes of a reference. The reader keeps the reference's weight.
pub const FETCH: u32 = 1;
/// Kind of request: gives a reference's weight back, and reports which bytes of the payload were needed. There is no
/// answer.
pub const RETURN: u32 = 2;

/// Request of a reader.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Request {
    pub kind: U32,
    pub zero: U32,
    pub reference: [u8; REFERENCE_BYTES],
    /// RETURN: bytes that were needed. FETCH: zeros.
    pub touched: TouchedLayout,
}

/// Head of the answer to FETCH, before the payload bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Answer {
    /// 1: all the bytes follow; 0: the payload is gone, and no bytes follow.
    pub found: U32,
    pub zero: U32,
    pub length: U64,
}
