//! Messages between a server and the agent of its machine: one or more per `SOCK_SEQPACKET` packet. Numbers are in the
//! machine's byte order, ports and addresses in network order. `include/shunt.h` has the same layouts in C and
//! documents the fields; `tests/header.rs` checks that header and module agree.
//!
//! A *peer* is another machine's agent. A *handoff* lets a peer send a *payload*, the body of one response, on a
//! client's connection; a *region* is the range of sequence numbers that the payload takes there. The *frontend* has
//! the client's connection, and the *backend* has the payload. An *offer* is a payload that a backend's server holds
//! ready, and a *claim* is the message by which the frontend's agent asks for it. The *digest* of a file is its
//! SHA-256. A *store* has the payloads of a machine's programs under `shunt run`. A *fetch* brings a payload through
//! both agents to the frontend's server. The *board* is memory that the agent writes and servers read. A *ring*
//! (completion ring) is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs. A *worker*
//! is a process of a server. A *session* is the use of a connection between two agents.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::address::{Address, with_ends};
use crate::flow::FlowState;
use crate::parts::Parts;
use crate::prefixes::{PREFIXES_MAX, Prefix};
use crate::tag::Tag;
use crate::tls::{Generation, Keys};
use crate::trace::TraceId;
use crate::versions::{Growing, Versions};

pub use crate::reason::Reason;

/// Versions of this protocol: `SHUNT_VERSION_OLDEST` to `SHUNT_VERSION`.
pub const VERSIONS: Versions = Versions { oldest: 7, newest: 7 };
/// Bytes of an agent's name, NUL-padded (`SHUNT_NAME_BYTES`).
pub const NAME_BYTES: usize = 64;
/// Number of peers that the board has room for (`SHUNT_BOARD_PEERS`). The board is memory that the agent writes and
/// servers map read-only.
pub const BOARD_PEERS: usize = 256;
/// Magic number at the start of the board (`SHUNT_BOARD_MAGIC`).
pub const BOARD_MAGIC: u32 = 0x5342_4f41;
/// Number of counters per worker (`SHUNT_COUNTERS`).
pub const COUNTERS: usize = 64;
/// Peer number that means "no peer" (`SHUNT_NO_PEER`).
pub const NO_PEER: u32 = u32::MAX;
/// Longest packet in bytes (`SHUNT_PACKET_BYTES`). Only the text of `STATS_TEXT` may be longer.
pub const MAX_PACKET_BYTES: usize = 4096;
/// Most bytes of the text of `STATS_TEXT`. One packet of a Unix socket may have 212,960 bytes (net.core.wmem_default less
/// 32). With 256 peers, whose names have 63 bytes at most, and counters of 33 programs, the text has up to 62,528.
pub const MAX_TEXT_BYTES: usize = 200_000;
/// Longest `STATS_TEXT` in bytes: its header and its text.
pub const MAX_STATS_BYTES: usize = size_of::<Header>() + MAX_TEXT_BYTES;

/// Kinds of messages (`SHUNT_MSG_*`).
pub mod kind {
    #![allow(missing_docs)]
    pub const HELLO: u32 = 1;
    pub const WELCOME: u32 = 2;
    pub const OFFER: u32 = 3;
    pub const HANDOFF: u32 = 4;
    pub const ABORT: u32 = 5;
    pub const ENDED: u32 = 6;
    pub const FETCH: u32 = 7;
    pub const FETCHED: u32 = 8;
    pub const STATS: u32 = 9;
    pub const STATS_TEXT: u32 = 10;
    pub const HANDOFF_PARTS: u32 = 11;
    pub const CANCEL: u32 = 12;
    pub const ASK: u32 = 13;
    pub const ANSWER: u32 = 14;
    pub const PROVE: u32 = 15;
    pub const DIGEST: u32 = 16;
    pub const WITHDRAWN: u32 = 17;
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Messages about handoffs and fetches. The agent reads them at once.
    Control,
    /// Offers. The agent reads this connection when a claim comes, so that an offer wakes no process.
    Offers,
}

impl Channel {
    /// Builds the first message on a connection of this kind.
    pub fn hello(self) -> Hello {
        let Versions { oldest, newest } = VERSIONS;
        Hello { header: Hello::HEADER, oldest, newest, channel: self.number(), features: 0 }
    }

    /// Returns the number of this kind of connection (`SHUNT_CHANNEL_*`).
    pub fn number(self) -> u32 {
        match self {
            Channel::Control => 1,
            Channel::Offers => 2,
        }
    }
}

/// Header at the start of every message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Header {
    pub kind: u32,
    pub size: u32,
}

macro_rules! message {
    ($(#[$doc:meta])* $name:ident, $kind:expr, { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name {
            pub header: Header,
            $(pub $field: $type,)*
        }

        impl Growing for $name {
            const LEAST: usize = size_of::<Self>();
        }

        impl $name {
            /// The header that this message carries.
            pub const HEADER: Header = Header { kind: $kind, size: size_of::<$name>() as u32 };
        }
    };
}

message!(
    /// First message of a server on a connection with its agent. Only STATS may come before it.
    Hello, kind::HELLO, { oldest: u16, newest: u16, channel: u32, features: u64, });
message!(
    /// Answer to HELLO. Its descriptors: board, counters and, on a control connection of a frontend, the completion
    /// ring.
    Welcome, kind::WELCOME, { worker: u32, ring: u32, version: u32, pad: u32, features: u64, });
message!(
/// A payload that the agent may send. Its one descriptor is the file.
Offer, kind::OFFER, {
    peer: u32, flags: u32, number: u64, offset: u64, length: u64, tag: Tag, trace: TraceId, mtime_ns: i64, size: u64,
});
message!(
/// The server has handed off the send side of a client's connection for one payload.
Handoff, kind::HANDOFF, {
    peer: u32, epoch: u32, bytes: u32, pad: u32, handoff: u64, offer: u64, length: u64, rate: u64, tag: Tag, trace: TraceId,
    flow: FlowState, tls: Tls,
});
message!(
    /// The server has given a handoff up.
    Abort, kind::ABORT, { handoff: u64, });
message!(
    /// No peer sends a handoff's payload, and the server no longer has the client's connection: the agent is to reset
    /// that connection.
    Cancel, kind::CANCEL, { handoff: u64, });
message!(
/// Question: would a peer send bytes of its store on a connection with these ends?
Ask, kind::ASK, {
    handoff: u64, peer: u32, epoch: u32,
    client_address: Address, server_address: Address, client_port: [u8; 2], server_port: [u8; 2], pad: u32,
});
message!(
    /// Answer to ASK about `handoff`. Sent without a question, it says that this handoff waits until the peer can send
    /// more.
    Answer, kind::ANSWER, { handoff: u64, reason: u32, peer: u32, });
message!(
    /// A handoff or fetch ended without success.
    Ended, kind::ENDED, { handoff: u64, reason: u32, peer: u32, });
message!(
    /// Request to fetch the payload of an offer to this server, as a stream.
    Fetch, kind::FETCH, { peer: u32, pad: u32, fetch: u64, offer: u64, length: u64, tag: Tag, trace: TraceId, });
message!(
    /// Question before a claim: what is the digest of the file behind this offer?
    Prove, kind::PROVE, { peer: u32, epoch: u32, handoff: u64, offer: u64, length: u64, tag: Tag, });
message!(
    /// SHA-256 of the whole file behind a handoff's payload, or, in answer to PROVE, behind an offer.
    Digest, kind::DIGEST, { handoff: u64, offset: u64, peer: u32, known: u32, sha256: [u8; 32], });
message!(
    /// The server has forgotten a handoff's digest, because DIGEST with `known` 0 has taken it back.
    Withdrawn, kind::WITHDRAWN, { peer: u32, epoch: u32, handoff: u64, });
message!(
    /// Answer to FETCH. Its one descriptor is a socket that yields the payload and then ends.
    Fetched, kind::FETCHED, { fetch: u64, length: u64, });

/// One generation of a TLS 1.3 connection's write keys (`struct shunt_tls`): those between two KeyUpdates. All zeros
/// where the connection is not encrypted.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Tls {
    pub suite: u16,
    pub content_bytes: u16,
    pub skip: u16,
    pub pad: u16,
    pub record: u64,
    pub keys: Keys,
    pub pad2: [u8; 4],
}

impl Tls {
    /// Returns these fields without the keys.
    pub fn generation(&self) -> Generation {
        let Self { suite, content_bytes, skip, record, .. } = *self;
        Generation { suite, content_bytes, skip, record }
    }
}

impl Handoff {
    /// Builds the message HANDOFF_PARTS: the fields of this one, followed by the list of the payload's parts.
    pub fn emit_with(&self, parts: &Parts) -> Vec<u8> {
        let list = parts.as_slice().as_bytes();
        let bytes = size_of::<Self>() as u32;
        let size = (size_of::<Self>() + list.len()) as u32;
        let header = Header { kind: kind::HANDOFF_PARTS, size };
        [Self { header, bytes, ..*self }.as_bytes(), list].concat()
    }
}

/// Messages of a server to its agent.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
#[expect(clippy::large_enum_variant, reason = "one at a time, for as long as it is looked at: a box would cost more")]
pub enum Request {
    /// HELLO: the connection's purpose, and the version that both sides speak.
    Hello(Channel, u16),
    Offer(Offer),
    Handoff(Handoff),
    /// A handoff of bytes in the peer's store, in place of an offer.
    HandoffParts(Handoff, Parts),
    Abort(Abort),
    Cancel(Cancel),
    Ask(Ask),
    Prove(Prove),
    Withdrawn(Withdrawn),
    Fetch(Fetch),
    Stats,
}

impl Request {
    /// Reads the first message of a packet from a server: returns the message and the bytes that follow it.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where kind, size or a field is out of range, [`Reason::Version`] for a HELLO of another
    /// version.
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), Reason> {
        let (header, _) = Header::read_from_prefix(packet).map_err(|_| Reason::Malformed)?;
        let (message, rest) = packet.split_at_checked(header.size as usize).ok_or(Reason::Malformed)?;
        require(message.len() >= size_of::<Header>())?;
        Ok((Self::parse_message(header.kind, message)?, rest))
    }

    fn parse_message(kind: u32, packet: &[u8]) -> Result<Self, Reason> {
        match kind {
            kind::HELLO => Self::parse_hello(Hello::read(packet)?),
            kind::OFFER => Offer::read(packet)?.checked().map(Request::Offer),
            kind::HANDOFF => Handoff::read(packet)?.checked().map(Request::Handoff),
            kind::HANDOFF_PARTS => Self::parse_parts(packet),
            kind::ABORT => Abort::read(packet).map(Request::Abort),
            kind::CANCEL => Cancel::read(packet).map(Request::Cancel),
            kind::ASK => Ask::read(packet)?.checked().map(Request::Ask),
            kind::PROVE => Prove::read(packet)?.checked().map(Request::Prove),
            kind::WITHDRAWN => Withdrawn::read(packet)?.checked().map(Request::Withdrawn),
            kind::FETCH => Fetch::read(packet)?.checked().map(Request::Fetch),
            kind::STATS => Ok(Request::Stats),
            _ => Err(Reason::Malformed),
        }
    }

    fn parse_parts(packet: &[u8]) -> Result<Self, Reason> {
        let bytes = Handoff::read(packet)?.bytes as usize;
        let (handoff, parts) = packet.split_at_checked(bytes).ok_or(Reason::Malformed)?;
        let handoff = Handoff::read(handoff)?.checked()?;
        require(handoff.offer == 0)?;
        Ok(Self::HandoffParts(handoff, Parts::parse(parts, handoff.length)?))
    }

    fn parse_hello(hello: Hello) -> Result<Self, Reason> {
        let version = VERSIONS.common(Versions { oldest: hello.oldest, newest: hello.newest })?;
        match hello.channel {
            1 => Ok(Request::Hello(Channel::Control, version)),
            2 => Ok(Request::Hello(Channel::Offers, version)),
            _ => Err(Reason::Malformed),
        }
    }
}

fn require(condition: bool) -> Result<(), Reason> {
    if condition { Ok(()) } else { Err(Reason::Malformed) }
}

impl Offer {
    /// Bit of `flags`: bytes of the file before the range may still be written, which changes the file's modification
    /// time. So the agent checks only that the file's size is still the same.
    pub const BODY: u32 = 1;

    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.length > 0)?;
        let end = self.offset.checked_add(self.length).ok_or(Reason::Malformed)?;
        require(end <= self.size && end <= i64::MAX as u64)?;
        Ok(self)
    }
}

impl Handoff {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.length > 0)?;
        require(self.flow.is_possible())?;
        require(self.tls.generation().region_bytes(self.length).is_some())?;
        Ok(self)
    }
}

impl Ask {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.has_ends())?;
        Ok(self)
    }
}

impl Prove {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.length > 0)?;
        Ok(self)
    }
}

impl Withdrawn {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS)?;
        Ok(self)
    }
}

impl Answer {
    /// Value of [`Answer::reason`] where the peer would send.
    pub const YES: u32 = 0;
}

impl Fetch {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.length > 0)?;
        Ok(self)
    }
}

/// A peer's entry on the board (`struct shunt_board_peer`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BoardPeer {
    pub epoch: u32,
    pub state: u32,
    pub closed: u32,
    pub families: u32,
    pub name: [u8; NAME_BYTES],
    pub our_key: [u8; 16],
    pub their_key: [u8; 16],
    pub prefixes: u32,
    pub prefix: [Prefix; PREFIXES_MAX],
}

impl BoardPeer {
    /// Value of `state`: no session yet, or the peer is not trusted any more. The entry has no keys.
    pub const DOWN: u32 = 0;
    /// Value of `state`: the session is established.
    pub const UP: u32 = 1;
    /// Value of `state`: the session is lost. Payloads that the peer offered before can still be fetched.
    pub const LOST: u32 = 2;
}

/// Head of the board, before the entries of the peers (`struct shunt_board`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BoardHead {
    pub magic: u32,
    pub oldest: u16,
    pub newest: u16,
    pub peers_at: u32,
    pub peer_bytes: u32,
    pub alive: u32,
    pub frontend: u32,
    pub backend: u32,
    pub offer_lifetime_ms: u32,
    pub closed: u32,
    pub families: u32,
    pub beat: u32,
    pub peers: u32,
    pub netns: u64,
    pub name: [u8; NAME_BYTES],
}

impl BoardHead {
    /// Bit of `families`: payload can be sent to IPv4 clients (`SHUNT_FAMILY_IPV4`).
    pub const IPV4: u32 = 1;
    /// Bit of `families`: payload can be sent to IPv6 clients (`SHUNT_FAMILY_IPV6`).
    pub const IPV6: u32 = 2;
}

/// First fields of every record of a completion ring (`struct shunt_event`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Event {
    pub handoff: u64,
    pub acked: u64,
    pub kind: u32,
    pub pad: u32,
}

impl Event {
    /// Value of `kind`: the client has the whole region (`SHUNT_EVENT_COMPLETE`).
    pub const COMPLETE: u32 = 1;
    /// Value of `kind`: the client has reset the connection while the region was active (`SHUNT_EVENT_RESET`).
    pub const RESET: u32 = 2;
    /// Value of `kind`: the record is a [`State`] (`SHUNT_EVENT_STATE`).
    pub const STATE: u32 = 3;
}

/// Record of a completion ring: state of a connection and of the connection's newest region (`struct shunt_state`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct State {
    pub handoff: u64,
    pub acked: u64,
    pub kind: u32,
    pub status: u32,
    pub regions: u32,
    pub flow: FlowState,
    pub answered: u8,
    pub shut: u8,
    pub pad: [u8; 2],
}

/// Values of [`State::status`] (`SHUNT_REGION_*`).
impl State {
    /// The connection has had no region.
    pub const NONE: u32 = 0;
    /// A region is active: its peer sends.
    pub const ACTIVE: u32 = 1;
    /// The client has the whole region.
    pub const COMPLETE: u32 = 2;
    /// The region was ended before the client had all of it.
    pub const CANCELLED: u32 = 3;
    /// The region was refused: nothing proves that the client's packets pass the steering programs (BPF).
    pub const UNPROVEN: u32 = 4;
    /// The region was refused: not all of the server's own bytes have been sent.
    pub const UNSENT: u32 = 5;
    /// The region was refused: the peer is not connected now.
    pub const NO_PEER: u32 = 6;
    /// The region was refused: the peer does not send in the client's IP version.
    pub const FAMILY: u32 = 7;
}

with_ends!(Ask);

impl Handoff {
    /// Builds the message for the region that `state` describes, which has just begun.
    pub fn of(state: &State, peer: u32, epoch: u32, length: u64) -> Self {
        Self {
            header: Self::HEADER,
            peer,
            epoch,
            bytes: size_of::<Self>() as u32,
            handoff: state.handoff,
            length,
            flow: state.flow,
            ..Self::new_zeroed()
        }
    }
}

/// Memory that one worker (server process) writes and the agent reads: its counters, and the number of its handoffs
/// that are not over, for each peer (`struct shunt_counters`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Counters {
    pub value: [u64; COUNTERS],
    pub handoffs: [u32; BOARD_PEERS],
}

/// Bits of [`BoardHead::closed`] and [`BoardPeer::closed`]: what servers must not begin, because a limit is reached,
/// the agent drains, or the peer takes no offers (`SHUNT_CLOSED_*`).
pub mod closed {
    #![allow(missing_docs)]
    pub const OFFERS: u32 = 1;
    pub const HANDOFFS: u32 = 2;
}

/// Size of the board in bytes.
pub const BOARD_BYTES: usize = size_of::<BoardHead>() + BOARD_PEERS * size_of::<BoardPeer>();

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::Part;
    use proptest::prelude::*;

    fn hello(oldest: u16, newest: u16, channel: u32) -> Hello {
        Hello { oldest, newest, channel, ..Channel::Control.hello() }
    }

    #[test]
    fn hello_of_another_version_is_named() {
        let Versions { oldest, newest } = VERSIONS;
        let parse = |hello: Hello| Request::parse(hello.as_bytes()).map(|(request, _)| request);
        assert_eq!(parse(hello(newest + 1, newest + 2, 1)).unwrap_err(), Reason::Version);
        assert_eq!(parse(hello(0, oldest - 1, 1)).unwrap_err(), Reason::Version);
        assert_eq!(parse(hello(oldest, newest, 3)).unwrap_err(), Reason::Malformed);
        let spoken = parse(hello(oldest, newest + 5, 2));
        assert!(matches!(spoken, Ok(Request::Hello(Channel::Offers, version)) if version == newest));
    }

    #[test]
    fn a_size_that_is_not_the_messages_is_malformed() {
        let mut hello = Channel::Control.hello();
        hello.header.size += 4;
        assert_eq!(Request::parse(hello.as_bytes()).unwrap_err(), Reason::Malformed, "more than the packet has");
        hello.header.size -= 8;
        assert_eq!(Request::parse(hello.as_bytes()).unwrap_err(), Reason::Malformed, "less than any writer's");
        hello.header.size = 0;
        assert_eq!(Request::parse(hello.as_bytes()).unwrap_err(), Reason::Malformed);
        assert_eq!(Request::parse(&[]).unwrap_err(), Reason::Malformed);
        // A size shorter than a header: the next message would begin within this one, or where this one begins.
        let header = size_of::<Header>() as u32;
        let stats = |size| Request::parse(Header { kind: kind::STATS, size }.as_bytes()).map(|(_, rest)| rest.len());
        assert_eq!([0, header - 1, header].map(stats), [Err(Reason::Malformed), Err(Reason::Malformed), Ok(0)]);
    }

    #[test]
    fn bytes_that_a_newer_server_appends_are_skipped() {
        let mut hello = Channel::Control.hello();
        hello.header.size += 4;
        let packet = [hello.as_bytes(), &[9; 4], Channel::Offers.hello().as_bytes()].concat();
        let (first, rest) = Request::parse(&packet).unwrap();
        assert!(matches!(first, Request::Hello(Channel::Control, _)));
        assert!(matches!(Request::parse(rest).unwrap().0, Request::Hello(Channel::Offers, _)));
    }

    #[test]
    fn a_packet_holds_several_messages() {
        let packet = [Channel::Control.hello().as_bytes(), Channel::Offers.hello().as_bytes()].concat();
        let (first, rest) = Request::parse(&packet).unwrap();
        let (second, rest) = (Request::parse(rest).unwrap().0, &rest[size_of::<Hello>()..]);
        assert!(matches!((first, second), (Request::Hello(Channel::Control, _), Request::Hello(Channel::Offers, _))));
        assert!(rest.is_empty());
    }

    #[test]
    fn an_offer_past_the_end_of_its_file_is_malformed() {
        let mut offer = Offer::new_zeroed();
        offer.header = Offer::HEADER;
        (offer.offset, offer.length, offer.size) = (10, 10, 20);
        assert!(Request::parse(offer.as_bytes()).is_ok());
        offer.size = 19;
        assert_eq!(Request::parse(offer.as_bytes()).unwrap_err(), Reason::Malformed);
        (offer.offset, offer.size) = (u64::MAX, u64::MAX);
        assert_eq!(Request::parse(offer.as_bytes()).unwrap_err(), Reason::Malformed);
    }

    #[test]
    fn a_handoff_of_parts_has_no_offer() {
        let part = Part { length: 5.into(), ..Part::default() };
        let parts = Parts::new(&[part, part]).unwrap();
        let flow = FlowState { mss: 1448, client_port: [1; 2], server_port: [2; 2], ..FlowState::new_zeroed() };
        let handoff = Handoff { flow, length: 10, ..Handoff::new_zeroed() };
        let parse = |handoff: &Handoff| Request::parse(&handoff.emit_with(&parts)).map(|(request, _)| request);
        assert!(matches!(parse(&handoff), Ok(Request::HandoffParts(_, parsed)) if parsed.as_slice() == [part, part]));
        assert_eq!(parse(&Handoff { offer: 1, ..handoff }).unwrap_err(), Reason::Malformed);
        assert_eq!(parse(&Handoff { length: 11, ..handoff }).unwrap_err(), Reason::Malformed);
    }

    proptest! {
        #[test]
        fn no_packet_panics(packet in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Request::parse(&packet);
        }

        #[test]
        fn no_packet_of_a_known_kind_panics(kind in 0u32..18, body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let header = Header { kind, size: 8 + body.len() as u32 };
            let _ = Request::parse(&[header.as_bytes(), &body].concat());
        }
    }
}
