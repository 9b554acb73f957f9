//! Messages between a server and the agent of its machine: one or more per `SOCK_SEQPACKET` packet, in the machine's byte
//! order, ports and addresses in network order. `include/shunt.h` is the same in C and documents every field;
//! `tests/header.rs` holds the two against each other.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::address::{Address, with_ends};
use crate::flow::FlowState;
use crate::parts::Parts;
use crate::prefixes::{PREFIXES_MAX, Prefix};
use crate::tag::Tag;
use crate::tls::{Generation, Keys};
use crate::trace::TraceId;
use crate::versions::{Growing, Versions};

/// `SHUNT_VERSION_OLDEST` to `SHUNT_VERSION`.
pub const VERSIONS: Versions = Versions { oldest: 7, newest: 7 };
/// `SHUNT_NAME_BYTES`: a peer's name, NUL-padded.
pub const NAME_BYTES: usize = 64;
/// `SHUNT_BOARD_PEERS`.
pub const BOARD_PEERS: usize = 64;
/// `SHUNT_BOARD_MAGIC`.
pub const BOARD_MAGIC: u32 = 0x5342_4f41;
/// `SHUNT_COUNTERS`.
pub const COUNTERS: usize = 64;
/// `SHUNT_NO_PEER`.
pub const NO_PEER: u32 = u32::MAX;
/// No packet is longer than this (`SHUNT_PACKET_BYTES`), except that with the text of `STATS_TEXT`.
pub const MAX_PACKET_BYTES: usize = 4096;

/// `SHUNT_MSG_*`.
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

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Handoffs and fetches; the agent answers at once.
    Control,
    /// Offers; the agent reads it when a claim comes, so that an offer wakes nobody.
    Offers,
}

impl Channel {
    /// What opens a connection of this kind.
    pub fn hello(self) -> Hello {
        let Versions { oldest, newest } = VERSIONS;
        Hello { header: Hello::HEADER, oldest, newest, channel: self.number(), features: 0 }
    }

    /// `SHUNT_CHANNEL_*`.
    pub fn number(self) -> u32 {
        match self {
            Channel::Control => 1,
            Channel::Offers => 2,
        }
    }
}

/// `SHUNT_REASON_*`: why a handoff or fetch ended, or a session was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Reason {
    #[error("no such offer (never made, or already used)")]
    UnknownOffer = 1,
    #[error("the offer expired")]
    Expired = 2,
    #[error("wrong tag")]
    Tag = 3,
    #[error("another length than the offer's")]
    Length = 4,
    #[error("the file changed after its header was made")]
    FileChanged = 5,
    #[error("a system call of the sender failed")]
    Socket = 6,
    #[error("the peer's agent is not connected")]
    PeerLost = 7,
    #[error("the client acknowledged nothing for too long")]
    NoProgress = 8,
    #[error("a limit of the agent is reached")]
    Limit = 9,
    #[error("malformed message")]
    Malformed = 10,
    #[error("another protocol version")]
    Version = 11,
    #[error("given up by the frontend")]
    Aborted = 12,
    #[error("the backend already sends on that flow")]
    Busy = 13,
    #[error("the client reset the connection")]
    ClientGone = 14,
    #[error("not allowed by the agent's configuration")]
    NotAllowed = 15,
    #[error("the backend's payload does not reach that client (its agent's log says why)")]
    Unreachable = 16,
}

impl Reason {
    /// Every reason, in the order of its number.
    pub const ALL: [Reason; 16] = [
        Reason::UnknownOffer,
        Reason::Expired,
        Reason::Tag,
        Reason::Length,
        Reason::FileChanged,
        Reason::Socket,
        Reason::PeerLost,
        Reason::NoProgress,
        Reason::Limit,
        Reason::Malformed,
        Reason::Version,
        Reason::Aborted,
        Reason::Busy,
        Reason::ClientGone,
        Reason::NotAllowed,
        Reason::Unreachable,
    ];

    /// From its number on the wire.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u32 == number)
    }
}

/// First in every message.
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
    /// Server to agent, first on every connection.
    Hello, kind::HELLO, { oldest: u16, newest: u16, channel: u32, features: u64, });
message!(
    /// Its answer. Descriptors: board, counters and, on a control connection of a frontend, the completion ring.
    Welcome, kind::WELCOME, { worker: u32, ring: u32, version: u32, pad: u32, features: u64, });
message!(
/// A payload that the agent may send; one descriptor, the file.
Offer, kind::OFFER, {
    peer: u32, flags: u32, number: u64, offset: u64, length: u64, tag: Tag, trace: TraceId, mtime_ns: i64, size: u64,
});
message!(
/// The send side of a client's connection, for one payload.
Handoff, kind::HANDOFF, {
    peer: u32, epoch: u32, bytes: u32, pad: u32, handoff: u64, offer: u64, length: u64, rate: u64, tag: Tag, trace: TraceId,
    flow: FlowState, tls: Tls,
});
message!(
    /// The server gave a handoff up.
    Abort, kind::ABORT, { handoff: u64, });
message!(
    /// A handoff that nobody sends, of a connection that is not the server's any more: its client is to be reset.
    Cancel, kind::CANCEL, { handoff: u64, });
message!(
/// Whether a peer would send bytes of its store on a connection with these ends.
Ask, kind::ASK, {
    handoff: u64, peer: u32, epoch: u32,
    client_address: Address, server_address: Address, client_port: [u8; 2], server_port: [u8; 2], pad: u32,
});
message!(
    /// Its answer, with the name of the question; or of a handoff that waits until the peer can send more.
    Answer, kind::ANSWER, { handoff: u64, reason: u32, peer: u32, });
message!(
    /// A handoff or fetch ended without success.
    Ended, kind::ENDED, { handoff: u64, reason: u32, peer: u32, });
message!(
    /// The payload of an offer, as a stream for this server.
    Fetch, kind::FETCH, { peer: u32, pad: u32, fetch: u64, offer: u64, length: u64, tag: Tag, trace: TraceId, });
message!(
    /// Which file is behind an offer: its digest.
    Prove, kind::PROVE, { peer: u32, epoch: u32, handoff: u64, offer: u64, length: u64, tag: Tag, });
message!(
    /// SHA-256 of the whole file behind a handoff's payload, or behind an offer (PROVE).
    Digest, kind::DIGEST, { handoff: u64, offset: u64, peer: u32, known: u32, sha256: [u8; 32], });
message!(
    /// The server has forgotten a handoff's digest, as it was told (DIGEST with `known` 0).
    Withdrawn, kind::WITHDRAWN, { peer: u32, epoch: u32, handoff: u64, });
message!(
    /// Its answer; one descriptor, a socket that yields the payload and then ends.
    Fetched, kind::FETCHED, { fetch: u64, length: u64, });

/// One generation of a TLS 1.3 connection's write keys (`struct shunt_tls`). All zeros: the connection is not encrypted.
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
    /// What its keys are used for.
    pub fn generation(&self) -> Generation {
        let Self { suite, content_bytes, skip, record, .. } = *self;
        Generation { suite, content_bytes, skip, record }
    }
}

impl Handoff {
    /// As a message with the parts that it is of.
    pub fn emit_with(&self, parts: &Parts) -> Vec<u8> {
        let list = parts.as_slice().as_bytes();
        let bytes = size_of::<Self>() as u32;
        let size = (size_of::<Self>() + list.len()) as u32;
        let header = Header { kind: kind::HANDOFF_PARTS, size };
        [Self { header, bytes, ..*self }.as_bytes(), list].concat()
    }
}

/// What a server may say.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
#[expect(clippy::large_enum_variant, reason = "one at a time, for as long as it is looked at: a box would cost more")]
pub enum Request {
    /// And the version that both speak.
    Hello(Channel, u16),
    Offer(Offer),
    Handoff(Handoff),
    /// Of bytes of the peer's store, in place of an offer.
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
    /// Reads the first message of a packet from a server: itself, and what follows it.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where kind, size or a field is out of range, [`Reason::Version`] for a HELLO of another
    /// version.
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), Reason> {
        let (header, _) = Header::read_from_prefix(packet).map_err(|_| Reason::Malformed)?;
        let (message, rest) = packet.split_at_checked(header.size as usize).ok_or(Reason::Malformed)?;
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
    /// In `flags`: what is in front of the range may be written to, and changes the file's time; its size is compared alone.
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
    /// [`Answer::reason`]: it would.
    pub const YES: u32 = 0;
}

impl Fetch {
    fn checked(self) -> Result<Self, Reason> {
        require((self.peer as usize) < BOARD_PEERS && self.length > 0)?;
        Ok(self)
    }
}

/// One peer on the board (`struct shunt_board_peer`).
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
    /// Not seen yet, or not trusted any more: no keys.
    pub const DOWN: u32 = 0;
    /// There is a session.
    pub const UP: u32 = 1;
    /// There is none now; what was offered before is still to be had by FETCH.
    pub const LOST: u32 = 2;
}

/// Before the peers on the board (`struct shunt_board`).
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
    /// `SHUNT_FAMILY_IPV4`.
    pub const IPV4: u32 = 1;
    /// `SHUNT_FAMILY_IPV6`.
    pub const IPV6: u32 = 2;
}

/// What a server says to the kernel where another machine is to send (`struct shunt_begin`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Begin {
    pub peer: u32,
    pub ring: u32,
    pub handoff: u64,
    pub length: u64,
}

/// How each record of a completion ring begins (`struct shunt_event`).
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
    /// `SHUNT_EVENT_COMPLETE`.
    pub const COMPLETE: u32 = 1;
    /// `SHUNT_EVENT_RESET`.
    pub const RESET: u32 = 2;
    /// `SHUNT_EVENT_STATE`.
    pub const STATE: u32 = 3;
}

impl State {
    /// `SHUNT_REGION_UNPROVEN`.
    pub const UNPROVEN: u32 = 4;
}

/// A connection as it was when a region began (`struct shunt_state`).
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

with_ends!(Ask);

impl Handoff {
    /// Of a region that has just begun.
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

/// What a server counts (`struct shunt_counters`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Counters {
    pub value: [u64; COUNTERS],
    pub handoffs: [u32; BOARD_PEERS],
}

/// Bits of [`BoardHead::closed`] and [`BoardPeer::closed`] (`SHUNT_CLOSED_*`).
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
    }

    #[test]
    fn what_a_newer_server_appends_is_skipped() {
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
    fn reasons_survive_the_wire() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason as u32), Some(reason));
        }
        assert_eq!(Reason::from_number(0), None);
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
