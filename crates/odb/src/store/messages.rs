//! What programs and the store of their machine say to each other (SOCK_SEQPACKET), and readers and stores (crate::channel).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::place::Version;
use crate::records::Sealing;
use crate::reference::{Holder, REFERENCE_BYTES};
use crate::touched::TouchedLayout;

/// What a program asks.
pub mod ask {
    /// Whose store is this? First on each connection.
    pub const HELLO: u32 = 1;
    /// A segment to write into; with its memfd.
    pub const LEASE: u32 = 2;
    /// To look into a segment of this store; with its memfd, read-only.
    pub const MAP: u32 = 3;
    /// A connection to a store, this one or another; with its socket.
    pub const REACH: u32 = 4;
    /// To count in (super::usage), while the connection lives; with its memfd.
    pub const COUNT: u32 = 5;
    /// To hand off connections with clients (include/shunt.h): a connection with the agent.
    pub const HAND_OFF: u32 = 6;
    /// Keep this file, with its descriptor: what is in it will be referred to by a number of the program's choice.
    pub const KEEP_FILE: u32 = 7;
    /// To look into a file that a program has sent; with a descriptor of it.
    pub const OPEN_FILE: u32 = 8;
    /// First on a connection that programs of many users will inherit: from now on it takes ENTER, and nothing else.
    pub const ENTRANCE: u32 = 9;
    /// At an entrance, with one end of a pair of sockets: serve the program that made it, as if it had connected. No answer.
    pub const ENTER: u32 = 10;
    /// To read which machines' programs can fetch from which stores (crate::sources); with its memfd, read-only.
    pub const SOURCES: u32 = 11;
}

/// How it is answered.
pub mod outcome {
    pub const GOOD: u32 = 0;
    /// The store is full, or as many connections as there may be.
    pub const FULL: u32 = 1;
    /// This program may not.
    pub const NOT_ALLOWED: u32 = 2;
    /// There is no such thing, or nobody that it could be had from.
    pub const NOT_THERE: u32 = 3;
}

/// A program asks. Each but ENTER is answered by [`Told`], in order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Ask {
    pub kind: U32,
    /// MAP, KEEP_FILE, OPEN_FILE: which.
    pub segment: U32,
    /// REACH: whose.
    pub holder: Holder,
    /// KEEP_FILE, OPEN_FILE: its number.
    pub file: U32,
    pub zero: U32,
}

/// The store answers.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Told {
    /// As it was asked.
    pub kind: U32,
    pub outcome: U32,
    /// LEASE: which.
    pub segment: U32,
    pub zero: U32,
    /// Of the store that answers.
    pub holder: Holder,
    /// REACH: how the connection goes on.
    pub sealing: Sealing,
    /// KEEP_FILE, OPEN_FILE: what the file was when the store got it.
    pub version: Version,
}

/// Asks for the bytes of a reference. Its weight stays where it is.
pub const FETCH: u32 = 1;
/// Gives a reference's weight back, and says what was needed of its payload. No answer.
pub const RETURN: u32 = 2;

/// What a reader says.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Request {
    pub kind: U32,
    pub zero: U32,
    pub reference: [u8; REFERENCE_BYTES],
    /// Of FETCH: zeros.
    pub touched: TouchedLayout,
}

/// What goes before the bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Answer {
    /// 1: all the bytes follow; 0: there is no such payload any more, and none follow.
    pub found: U32,
    pub zero: U32,
    pub length: U64,
}
