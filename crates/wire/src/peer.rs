//! Messages between two agents: frames on one persistent TCP connection per pair of machines, many handoffs at once.
//!
//! ```text
//!  0      4      6      8                length
//!  +------+------+------+----------------+
//!  |length| kind | zero | body           |   all little-endian
//!  +------+------+------+----------------+
//! ```
//!
//! A fetch has a connection of its own: FETCH, then FETCHED or REFUSED, then (after FETCHED) the payload and the end
//! of the stream. So has a program that reads from another machine's store: STORE, then STORED or REFUSED, then (after
//! STORED) what programs and stores say to each other (crates/odb). The transport is whatever gives ordered bytes from an authenticated peer.

use std::net::{IpAddr, SocketAddr};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::{Address, Endpoint, with_ends};
use crate::addresses::Addresses;
use crate::flow::WireFlowState;
use crate::local::{Handoff, NAME_BYTES, Reason};
use crate::parts::Parts;
use crate::prefixes::Prefixes;
use crate::sources::Sources;
use crate::tag::Tag;
use crate::tls::{Generation, Keys};
use crate::trace::TraceId;
use crate::versions::{Growing, Versions};

/// Of this protocol.
pub const VERSIONS: Versions = Versions { oldest: 9, newest: 9 };
/// First in what opens a connection, so that a stray one is recognised.
pub const MAGIC: [u8; 4] = *b"SHNT";
/// Length of a frame's header.
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();
/// No frame is longer.
pub const MAX_FRAME_BYTES: usize = 2048;

/// What a frame is.
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

/// First in every frame.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// Of the whole frame, this header included.
    pub length: U32,
    /// One of [`kind`].
    pub kind: U16,
    /// Zero.
    pub zero: U16,
}

impl FrameHeader {
    /// Appends a frame of a kind, whose body has these parts.
    pub(crate) fn emit(kind: u16, parts: &[&[u8]], out: &mut Vec<u8>) {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let header = Self { length: U32::new((HEADER_BYTES + bytes) as u32), kind: U16::new(kind), zero: U16::ZERO };
        out.extend_from_slice(header.as_bytes());
        parts.iter().for_each(|part| out.extend_from_slice(part));
    }
}

macro_rules! body {
    ($(#[$doc:meta])* $name:ident, $kind:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Growing for $name {
            const LEAST: usize = size_of::<Self>();
        }

        impl $name {
            /// Appends this as one frame.
            pub fn emit(&self, out: &mut Vec<u8>) {
                FrameHeader::emit($kind, &[self.as_bytes()], out);
            }
        }
    };
}

/// First in whatever opens a connection between two agents.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Protocol {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// See [`Versions::oldest`].
    pub oldest: U16,
    /// See [`Versions::newest`].
    pub newest: U16,
}

impl Protocol {
    /// What this agent says.
    pub const OURS: Self = Self { magic: MAGIC, oldest: U16::new(VERSIONS.oldest), newest: U16::new(VERSIONS.newest) };

    /// The version that is spoken with whoever says this.
    ///
    /// # Errors
    /// [`Reason::Version`] where there is none that both know, [`Reason::Malformed`] where this is no agent.
    pub fn version(&self) -> Result<u16, Reason> {
        if self.magic != MAGIC {
            return Err(Reason::Malformed);
        }
        VERSIONS.common(Versions { oldest: self.oldest.get(), newest: self.newest.get() })
    }
}

body!(
    /// First on a session's connection, from both sides.
    Hello, kind::HELLO, {
        /// Which protocol it speaks.
        protocol: Protocol,
        /// A bit for each thing that it can do with a peer that can do it, too: none yet.
        features: U64,
        /// Port that the sender's sockets for this peer's clients have, 0 where it offers nothing.
        sender_port: U16,
        /// Zero.
        zero: U16,
        /// Milliseconds after which it wants to hear something, whatever the other's own heartbeat is.
        heartbeat_ms: U32,
        /// Address of those sockets that send to clients of IPv4, all zero where it has none.
        sender_ipv4: Address,
        /// The same for IPv6.
        sender_ipv6: Address,
        /// The sender's name, NUL-padded.
        name: [u8; NAME_BYTES],
        /// Key of the tags of its offers to this peer in this session.
        offer_key: [u8; 16],
    }
);
body!(
    /// Frontend's agent to backend's: send this payload on that flow. Answered only by ENDED, where it fails.
    Claim, kind::CLAIM, {
        /// Returned in ENDED: the frontend's worker.
        worker: U32,
        /// Of this message: where the parts of CLAIM_PARTS begin.
        bytes: U16,
        /// Zero.
        zero: U16,
        /// Returned in ENDED.
        handoff: U64,
        /// Which payload.
        offer: U64,
        /// Its length in bytes.
        length: U64,
        /// Bytes a second, 0: no limit.
        rate: U64,
        /// See [`Tag`].
        tag: Tag,
        /// Of the request, for logs.
        trace: TraceId,
        /// The connection.
        flow: WireFlowState,
        /// Of the generation of write keys for this payload, where the connection is encrypted; else 0, as all of
        /// the rest. See [`Generation`].
        suite: U16,
        /// See [`Generation::record`].
        record: U64,
        /// See [`Generation::content_bytes`].
        content_bytes: U16,
        /// See [`Generation::skip`].
        skip: U16,
        /// Secret: only over a session that nobody else can read.
        keys: Keys,
    }
);
body!(
    /// Frontend's agent to a store's: would you send bytes of yours to that client, in that server's name?
    Ask, kind::ASK, {
        /// Returned in ANSWER: the frontend's worker.
        worker: U32,
        /// Zero.
        zero: U32,
        /// Returned in ANSWER.
        handoff: U64,
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// Network order.
        client_port: [u8; 2],
        /// Network order.
        server_port: [u8; 2],
    }
);
body!(
    /// The answer. Unasked: that claim of bytes of the store waits until more can be sent, and others would, too.
    Answer, kind::ANSWER, {
        /// From the question, or the claim.
        worker: U32,
        /// A [`Reason`], or 0: it would.
        reason: U32,
        /// From the question, or the claim.
        handoff: U64,
    }
);
body!(
    /// The frontend gave a handoff up: stop, and say nothing to the client.
    Abort, kind::ABORT, { worker: U32, handoff: U64, }
);
body!(
    /// A handoff ended without success.
    Ended, kind::ENDED, {
        /// From the claim.
        worker: U32,
        /// A [`Reason`].
        reason: U32,
        /// From the claim.
        handoff: U64,
        /// From the claim, for logs.
        trace: TraceId,
    }
);
body!(
    /// Backend's agent to frontend's: how many of a flow's ACKs its sender needs.
    Spacing, kind::SPACING, {
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// Network order.
        client_port: [u8; 2],
        /// Network order.
        server_port: [u8; 2],
        /// Payload bytes from one ACK to the next, at least 1. It holds until something seems lost on that flow; then
        /// the sender gets every ACK until it says so again.
        bytes: U32,
    }
);
body!(
    /// Backend's agent to frontend's: the client has acknowledged all of a claim with [`FlowState::WORD`], which has been
    /// sent.
    Delivered, kind::DELIVERED, {
        /// From the claim.
        handoff: U64,
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// Network order.
        client_port: [u8; 2],
        /// Network order.
        server_port: [u8; 2],
    }
);
body!(
    /// Frontend's agent to backend's, before a claim: which file is behind this offer? Answered by DIGEST.
    Prove, kind::PROVE, {
        /// Returned in DIGEST: the frontend's worker.
        worker: U32,
        /// Zero.
        zero: U32,
        /// Returned in DIGEST.
        handoff: U64,
        /// Which payload.
        offer: U64,
        /// Its length in bytes.
        length: U64,
        /// See [`Tag`].
        tag: Tag,
    }
);
body!(
    /// Backend's agent to frontend's: the file behind an offer; unasked, that behind a claim with
    /// [`FlowState::DIGEST`] that has been under way for a while.
    Digest, kind::DIGEST, {
        /// From the question, or the claim.
        worker: U32,
        /// 1, or 0: it is not known, or no longer.
        known: U32,
        /// From the question, or the claim.
        handoff: U64,
        /// Where in the file the payload begins, in bytes.
        offset: U64,
        /// SHA-256 of the whole file.
        sha256: [u8; 32],
    }
);
body!(
    /// Frontend's agent to backend's: the server knows that this claim's DIGEST is taken back. Until then the backend seals
    /// nothing more.
    Withdrawn, kind::WITHDRAWN, {
        /// From the claim.
        worker: U32,
        /// Zero.
        zero: U32,
        /// From the claim.
        handoff: U64,
    }
);
body!(
    /// Nothing else to say, but here: whoever hears nothing for too long takes the other side for lost.
    Ping, kind::PING, {}
);
body!(
    /// Frontend's agent to backend's: whether it takes offers. Offers from before are as good as ever.
    Closed, kind::CLOSED, {
        /// 1: make none, 0: make them again.
        offers: U32,
    }
);
body!(
    /// First on a fetch's connection.
    Fetch, kind::FETCH, {
        /// Which protocol the sender speaks.
        protocol: Protocol,
        /// Which payload.
        offer: U64,
        /// Its length in bytes.
        length: U64,
        /// See [`Tag`].
        tag: Tag,
        /// Of the request, for logs.
        trace: TraceId,
    }
);
body!(
    /// The payload follows.
    Fetched, kind::FETCHED, { length: U64, }
);
body!(
    /// First on the connection of a program that reads from the other machine's store.
    Store, kind::STORE, {
        /// Which protocol the sender speaks.
        protocol: Protocol,
    }
);
body!(
    /// It may. No other frame follows.
    Stored, kind::STORED, {}
);
body!(
    /// First on the connection of a peer's `shunt doctor`.
    Examine, kind::EXAMINE, {
        /// Which protocol the sender speaks.
        protocol: Protocol,
        /// How many of `servers` count, at most [`Examine::MOST`].
        count: U16,
        /// What the peer's clients know it by: addresses, and ports in network order.
        servers: [[u8; 18]; 16],
    }
);
body!(
    /// The answer. No other frame follows.
    Examined, kind::EXAMINED, {
        /// Nanoseconds since 1970.
        time_ns: U64,
        /// [`Examined::FRONTEND`], [`Examined::BACKEND`].
        roles: U32,
        /// A bit for each of the servers that were asked about, the lowest first: payload may be sent as that.
        may: U32,
        /// What is wrong there, for payload on behalf of whoever asks: [`Examined::NO_ROUTE`] and so on.
        faults: U32,
    }
);
body!(
    /// A HELLO, FETCH or STORE is refused; the connection closes.
    Refused, kind::REFUSED, {
        /// A [`Reason`].
        reason: U32,
    }
);

/// A frame's contents.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Frame {
    Hello(Hello),
    Claim(Claim),
    /// Of bytes of the backend's store, in place of an offer.
    ClaimParts(Claim, Parts),
    Ask(Ask),
    Answer(Answer),
    Prove(Prove),
    Digest(Digest),
    Withdrawn(Withdrawn),
    Abort(Abort),
    Ended(Ended),
    Spacing(Spacing),
    Delivered(Delivered),
    Ping(Ping),
    Closed(Closed),
    /// As which servers the sender sends payloads for the receiver. Follows HELLO.
    SpeaksFor(Prefixes),
    /// The addresses of the sender's programs, whenever they have changed.
    Addresses(Addresses),
    /// The stores that the sender's programs can fetch from, whenever they have changed.
    Sources(Sources),
    Fetch(Fetch),
    Fetched(Fetched),
    Refused(Refused),
    Store(Store),
    Stored(Stored),
    Examine(Examine),
    Examined(Examined),
}

impl Frame {
    /// Reads the first frame of `bytes`: itself and its length, or `None` where more bytes are needed.
    ///
    /// # Errors
    /// [`Reason::Malformed`] or [`Reason::Version`]; the stream cannot be read any further.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Reason> {
        let Ok((header, _)) = FrameHeader::read_from_prefix(bytes) else {
            return Ok(None);
        };
        let length = header.length.get() as usize;
        if !(HEADER_BYTES..=MAX_FRAME_BYTES).contains(&length) || header.zero.get() != 0 {
            return Err(Reason::Malformed);
        }
        let Some(body) = bytes.get(HEADER_BYTES..length) else {
            return Ok(None);
        };
        Ok(Some((Self::parse_body(header.kind.get(), body)?, length)))
    }

    fn parse_body(kind: u16, body: &[u8]) -> Result<Self, Reason> {
        match kind {
            kind::HELLO => Hello::read(body)?.checked().map(Frame::Hello),
            kind::CLAIM => Claim::read(body)?.checked().map(Frame::Claim),
            kind::CLAIM_PARTS => Self::parse_parts(body),
            kind::ASK => Ask::read(body)?.checked().map(Frame::Ask),
            kind::ANSWER => Answer::read(body).map(Frame::Answer),
            kind::PROVE => Prove::read(body)?.checked().map(Frame::Prove),
            kind::DIGEST => Digest::read(body)?.checked().map(Frame::Digest),
            kind::WITHDRAWN => Withdrawn::read(body)?.checked().map(Frame::Withdrawn),
            kind::ABORT => Abort::read(body).map(Frame::Abort),
            kind::ENDED => Ended::read(body).map(Frame::Ended),
            kind::SPACING => Spacing::read(body)?.checked().map(Frame::Spacing),
            kind::DELIVERED => Delivered::read(body)?.checked().map(Frame::Delivered),
            kind::PING => Ping::read(body).map(Frame::Ping),
            kind::CLOSED => Closed::read(body)?.checked().map(Frame::Closed),
            kind::SPEAKS_FOR => Prefixes::parse(body).map(Frame::SpeaksFor),
            kind::ADDRESSES => Addresses::parse(body).map(Frame::Addresses),
            kind::SOURCES => Sources::parse(body).map(Frame::Sources),
            kind::FETCH => Fetch::read(body)?.checked().map(Frame::Fetch),
            kind::FETCHED => Fetched::read(body).map(Frame::Fetched),
            kind::REFUSED => Refused::read(body).map(Frame::Refused),
            kind::STORE => Store::read(body)?.checked().map(Frame::Store),
            kind::STORED => Stored::read(body).map(Frame::Stored),
            kind::EXAMINE => Examine::read(body)?.checked().map(Frame::Examine),
            kind::EXAMINED => Examined::read(body).map(Frame::Examined),
            _ => Err(Reason::Malformed),
        }
    }
}

impl Frame {
    fn parse_parts(body: &[u8]) -> Result<Self, Reason> {
        let bytes = usize::from(Claim::read(body)?.bytes.get());
        let (claim, parts) = body.split_at_checked(bytes).ok_or(Reason::Malformed)?;
        let claim = Claim::read(claim)?.checked()?;
        if claim.offer.get() != 0 {
            return Err(Reason::Malformed);
        }
        Ok(Self::ClaimParts(claim, Parts::parse(parts, claim.length.get())?))
    }
}

impl Store {
    /// What a program's agent says first.
    pub const REQUEST: Self = Self { protocol: Protocol::OURS };

    fn checked(self) -> Result<Self, Reason> {
        self.protocol.version().map(|_| self)
    }
}

impl Examine {
    /// As many as can be asked about at once.
    pub const MOST: usize = 16;

    /// Asks about some servers, the first [`Self::MOST`] of them.
    pub fn of(servers: &[SocketAddr]) -> Self {
        let mut asked = [[0; 18]; Self::MOST];
        for (place, server) in asked.iter_mut().zip(servers) {
            let at = Endpoint::from(*server);
            place[..16].copy_from_slice(&at.address.0);
            place[16..].copy_from_slice(&at.port_be);
        }
        let count = U16::new(servers.len().min(Self::MOST) as u16);
        Self { protocol: Protocol::OURS, count, servers: asked }
    }

    /// Those that are asked about.
    pub fn servers(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.servers[..usize::from(self.count.get())].iter().map(|place| {
            let (address, port) = place.split_at(16);
            let address = Address(address.try_into().expect("16 of 18 bytes"));
            SocketAddr::new(address.ip(), u16::from_be_bytes([port[0], port[1]]))
        })
    }

    fn checked(self) -> Result<Self, Reason> {
        self.protocol.version()?;
        if usize::from(self.count.get()) <= Self::MOST { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Examined {
    /// Clients connect to it.
    pub const FRONTEND: u32 = 1;
    /// It sends payload.
    pub const BACKEND: u32 = 2;

    /// No route leads from there to whoever asks.
    pub const NO_ROUTE: u32 = 1;
    /// Payload leaves there by an interface that is not listed.
    pub const PAYLOAD_ELSEWHERE: u32 = 2;
    /// Clients' ACKs are dropped there by a strict rp_filter.
    pub const FILTERED: u32 = 4;
    /// An interface there is missing, or lacks its steering programs.
    pub const WITHOUT_PROGRAMS: u32 = 8;

    /// Whether it sends payload.
    pub fn is_backend(&self) -> bool {
        self.roles.get() & Self::BACKEND != 0
    }
}

impl Hello {
    fn checked(self) -> Result<Self, Reason> {
        self.protocol.version()?;
        self.name().ok_or(Reason::Malformed)?;
        let senders = self.sender_port.get() == 0 || self.ipv4().is_some() || self.ipv6().is_some();
        let families = self.ipv4().is_none_or(|ip| ip.is_ipv4()) && self.ipv6().is_none_or(|ip| ip.is_ipv6());
        if senders && families { Ok(self) } else { Err(Reason::Malformed) }
    }

    /// Where its senders for clients of IPv4 are, if it has any.
    pub fn ipv4(&self) -> Option<IpAddr> {
        (self.sender_ipv4 != Address::NONE).then(|| self.sender_ipv4.ip())
    }

    /// The same for IPv6.
    pub fn ipv6(&self) -> Option<IpAddr> {
        (self.sender_ipv6 != Address::NONE).then(|| self.sender_ipv6.ip())
    }

    /// The peer's name: `None` where it is empty or not what a configuration accepts.
    pub fn name(&self) -> Option<&str> {
        let end = self.name.iter().position(|byte| *byte == 0)?;
        let name = std::str::from_utf8(&self.name[..end]).ok()?;
        (is_name(name) && self.name[end..].iter().all(|byte| *byte == 0)).then_some(name)
    }
}

/// Whether an agent may have this name: 1 to 63 of `a-z 0-9 . _ -`, so that it fits a header field as it is.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    !name.is_empty() && name.len() < NAME_BYTES && name.bytes().all(allowed)
}

/// A name as the wire has it.
///
/// # Panics
/// Where `name` is longer than 63 bytes: [`is_name`] comes first.
pub fn padded_name(name: &str) -> [u8; NAME_BYTES] {
    let mut padded = [0; NAME_BYTES];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    padded
}

impl Claim {
    /// From what a worker of the frontend asked.
    pub fn of(worker: u32, handoff: &Handoff) -> Self {
        Self {
            worker: worker.into(),
            bytes: (size_of::<Self>() as u16).into(),
            zero: U16::ZERO,
            handoff: handoff.handoff.into(),
            offer: handoff.offer.into(),
            length: handoff.length.into(),
            rate: handoff.rate.into(),
            tag: handoff.tag,
            trace: handoff.trace,
            flow: handoff.flow.into(),
            suite: handoff.tls.suite.into(),
            record: handoff.tls.record.into(),
            content_bytes: handoff.tls.content_bytes.into(),
            skip: handoff.tls.skip.into(),
            keys: handoff.tls.keys,
        }
    }

    /// Appends it as one frame, with the parts that it is of.
    pub fn emit_with(&self, parts: &Parts, out: &mut Vec<u8>) {
        FrameHeader::emit(kind::CLAIM_PARTS, &[self.as_bytes(), parts.as_slice().as_bytes()], out);
    }

    /// How the connection is encrypted for this payload.
    pub fn generation(&self) -> Generation {
        Generation {
            suite: self.suite.get(),
            content_bytes: self.content_bytes.get(),
            skip: self.skip.get(),
            record: self.record.get(),
        }
    }

    /// Bytes of the region: of the payload, or of its records. A claim that was read has them.
    pub fn region_bytes(&self) -> Option<u64> {
        self.generation().region_bytes(self.length.get())
    }

    fn checked(self) -> Result<Self, Reason> {
        let sizes = self.length.get() > 0 && self.region_bytes().is_some();
        if sizes && self.flow.is_possible() && self.zero == U16::ZERO { Ok(self) } else { Err(Reason::Malformed) }
    }
}

with_ends!(Ask, Spacing, Delivered);

impl Ask {
    fn checked(self) -> Result<Self, Reason> {
        if self.has_ends() && self.zero == U32::ZERO { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Delivered {
    fn checked(self) -> Result<Self, Reason> {
        if self.has_ends() { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Spacing {
    fn checked(self) -> Result<Self, Reason> {
        if self.bytes.get() > 0 { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Prove {
    fn checked(self) -> Result<Self, Reason> {
        if self.length.get() > 0 && self.zero == U32::ZERO { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Digest {
    fn checked(self) -> Result<Self, Reason> {
        if self.known.get() <= 1 { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Withdrawn {
    fn checked(self) -> Result<Self, Reason> {
        if self.zero == U32::ZERO { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Closed {
    fn checked(self) -> Result<Self, Reason> {
        if self.offers.get() <= 1 { Ok(self) } else { Err(Reason::Malformed) }
    }
}

impl Fetch {
    fn checked(self) -> Result<Self, Reason> {
        self.protocol.version()?;
        if self.length.get() > 0 { Ok(self) } else { Err(Reason::Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::FromZeros;

    fn hello(name: &str) -> Hello {
        Hello {
            protocol: Protocol::OURS,
            features: 0.into(),
            sender_port: 61000.into(),
            zero: 0.into(),
            heartbeat_ms: 250.into(),
            sender_ipv4: IpAddr::from([10, 0, 0, 4]).into(),
            sender_ipv6: Address::NONE,
            name: padded_name(name),
            offer_key: [7; 16],
        }
    }

    #[test]
    fn emit_then_parse_is_the_identity() {
        let mut bytes = Vec::new();
        hello("be-1").emit(&mut bytes);
        Ended { worker: 1.into(), reason: 2.into(), handoff: 3.into(), trace: TraceId([4; 16]) }.emit(&mut bytes);
        let (first, used) = Frame::parse(&bytes).unwrap().unwrap();
        assert!(matches!(first, Frame::Hello(hello) if hello.name() == Some("be-1")));
        let (second, rest) = Frame::parse(&bytes[used..]).unwrap().unwrap();
        assert!(matches!(second, Frame::Ended(ended) if ended.handoff.get() == 3));
        assert_eq!(used + rest, bytes.len());
    }

    #[test]
    fn a_frame_in_parts_waits_for_the_rest() {
        let mut bytes = Vec::new();
        hello("fe").emit(&mut bytes);
        for cut in 0..bytes.len() {
            assert!(Frame::parse(&bytes[..cut]).unwrap().is_none(), "cut at {cut}");
        }
    }

    /// A later version appends to a message, and its list still comes behind.
    #[test]
    fn what_a_newer_agent_appends_is_skipped() {
        let flow = WireFlowState { mss: 1448.into(), ..WireFlowState::new_zeroed() };
        let flow = WireFlowState { client_port: [1; 2], server_port: [2; 2], ..flow };
        let mut claim = Claim { flow, length: 12.into(), ..Claim::new_zeroed() };
        let part = crate::parts::Part { length: 12.into(), ..Default::default() };
        let appended = [9; 20];
        claim.bytes = ((size_of::<Claim>() + appended.len()) as u16).into();
        let mut bytes = Vec::new();
        FrameHeader::emit(kind::CLAIM, &[claim.as_bytes(), &appended], &mut bytes);
        FrameHeader::emit(kind::CLAIM_PARTS, &[claim.as_bytes(), &appended, part.as_bytes()], &mut bytes);
        let (frame, used) = Frame::parse(&bytes).unwrap().unwrap();
        assert!(matches!(frame, Frame::Claim(_)));
        let (frame, _) = Frame::parse(&bytes[used..]).unwrap().unwrap();
        assert!(matches!(frame, Frame::ClaimParts(_, parts) if parts.as_slice() == [part]));
        // Parts that begin in the claim, or behind the frame, are none.
        for wrong in [0, 1, size_of::<Claim>() - 1, 2000] {
            claim.bytes = (wrong as u16).into();
            bytes.clear();
            FrameHeader::emit(kind::CLAIM_PARTS, &[claim.as_bytes(), part.as_bytes()], &mut bytes);
            assert_eq!(Frame::parse(&bytes).unwrap_err(), Reason::Malformed, "{wrong}");
        }
    }

    #[test]
    fn names_fit_a_header_field() {
        for bad in ["", "A", "a b", "a;b", "a\"b", &"x".repeat(64), "é"] {
            assert!(!is_name(bad), "{bad:?}");
        }
        assert!(is_name(&"x".repeat(63)));
        let mut hidden = hello("fe");
        hidden.name[10] = b'!';
        assert_eq!(hidden.name(), None);
    }

    #[test]
    fn senders_are_somewhere_and_in_their_family() {
        let parse = |hello: Hello| {
            let mut bytes = Vec::new();
            hello.emit(&mut bytes);
            Frame::parse(&bytes).map(drop)
        };
        let (ipv4, ipv6) = (hello("be").sender_ipv4, Address::from(IpAddr::from([0xfd77, 0, 0, 1, 0, 0, 0, 4])));
        let none = Address::NONE;
        for (port, sender_ipv4, sender_ipv6, good) in [
            (1, ipv4, ipv6, true),
            (1, none, ipv6, true),
            (0, none, none, true),
            (1, none, none, false),
            (1, ipv6, none, false),
            (1, ipv4, ipv4, false),
        ] {
            let parsed = parse(Hello { sender_port: port.into(), sender_ipv4, sender_ipv6, ..hello("be") });
            assert_eq!(parsed.is_ok(), good, "{port} {sender_ipv4:?} {sender_ipv6:?}");
        }
    }

    #[test]
    fn a_doctor_asks_about_the_servers_that_it_names() {
        let servers: Vec<SocketAddr> = vec!["192.0.2.1:80".parse().unwrap(), "[2001:db8::1]:443".parse().unwrap()];
        let mut bytes = Vec::new();
        Examine::of(&servers).emit(&mut bytes);
        let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
        assert!(matches!(frame, Frame::Examine(asked) if asked.servers().collect::<Vec<_>>() == servers));
        let many = vec![servers[0]; 40];
        assert_eq!(Examine::of(&many).servers().count(), Examine::MOST);
        bytes.clear();
        Examine { count: 17.into(), ..Examine::of(&servers) }.emit(&mut bytes);
        assert_eq!(Frame::parse(&bytes).unwrap_err(), Reason::Malformed);
    }

    #[test]
    fn another_version_is_told_from_noise() {
        let mut bytes = Vec::new();
        let newer = Protocol { oldest: (VERSIONS.newest + 1).into(), newest: u16::MAX.into(), ..Protocol::OURS };
        Hello { protocol: newer, ..hello("fe") }.emit(&mut bytes);
        assert_eq!(Frame::parse(&bytes).unwrap_err(), Reason::Version);
        assert_eq!(Frame::parse(b"GET / HTTP/1.1\r\n\r\n").unwrap_err(), Reason::Malformed);
    }

    proptest! {
        #[test]
        fn no_stream_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Frame::parse(&bytes);
        }

        #[test]
        fn no_frame_of_a_known_kind_panics(kind in 0u16..=kind::SOURCES, body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let length = U32::new((HEADER_BYTES + body.len()) as u32);
            let header = FrameHeader { length, kind: kind.into(), zero: U16::ZERO };
            let _ = Frame::parse(&[header.as_bytes(), &body].concat());
        }
    }
}
