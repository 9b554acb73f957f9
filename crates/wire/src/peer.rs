//! Messages between two agents. Each pair of machines has one persistent TCP connection, which carries the messages of
//! many handoffs as frames:
//!
//! ```text
//!  0      4      6      8                length
//!  +------+------+------+----------------+
//!  |length| kind | zero | body           |   all little-endian
//!  +------+------+------+----------------+
//! ```
//!
//! The *frontend* has the client's connection, its *flow*; the *backend* has the *payload*, the body of one response. A
//! *claim* is a frontend's message that asks the backend to send a payload on a flow. An *offer* is a payload that a
//! backend holds ready. A *handoff* is the frontend's grant of a flow's send side for one payload; each claim is for
//! one. A *fetch* brings a payload to the frontend through both agents instead. A *store* has the payloads of a
//! machine's programs under `shunt run`. A *worker* number is an agent's number of one connection with a server. A
//! *sender* is a backend's kernel socket for a client. A *session* is the use of the persistent connection. The
//! *digest* of a file is its SHA-256.
//!
//! A fetch has its own connection: FETCH, then FETCHED or REFUSED. After FETCHED come the payload and the end of the
//! stream. A program that reads from another machine's store has its own connection, too: STORE, then STORED or
//! REFUSED. After STORED come the messages between programs and stores (crates/odb). This module needs only an ordered
//! byte stream from an authenticated peer, such as TLS.

use std::net::{IpAddr, SocketAddr};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::{Address, Endpoint, with_ends};
use crate::addresses::Addresses;
use crate::flow::WireFlowState;
use crate::local::{Handoff, NAME_BYTES};
use crate::parts::Parts;
use crate::prefixes::Prefixes;
use crate::reason::Reason;
use crate::sources::Sources;
use crate::tag::Tag;
use crate::tls::{Generation, Keys};
use crate::trace::TraceId;
use crate::versions::{Growing, Versions};

pub use crate::frame::{FrameHeader, HEADER_BYTES, MAX_FRAME_BYTES, kind};

/// Versions of this protocol that this agent speaks.
pub const VERSIONS: Versions = Versions { oldest: 9, newest: 9 };
/// Magic number in the first message of a connection, by which a receiver recognizes that an agent is speaking.
pub const MAGIC: [u8; 4] = *b"SHNT";
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
            /// Appends this message as one frame to `out`.
            pub fn emit(&self, out: &mut Vec<u8>) {
                FrameHeader::emit($kind, &[self.as_bytes()], out);
            }
        }
    };
}

/// Magic number and protocol versions, at the start of the first message on any connection between two agents.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Protocol {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// Oldest version that the sender speaks.
    pub oldest: U16,
    /// Newest version that the sender speaks.
    pub newest: U16,
}

impl Protocol {
    /// Magic number and versions that this agent sends.
    pub const OURS: Self = Self { magic: MAGIC, oldest: U16::new(VERSIONS.oldest), newest: U16::new(VERSIONS.newest) };

    /// Returns the protocol version to speak with the sender of these fields.
    ///
    /// # Errors
    /// [`Reason::Version`] where no version is known to both agents, [`Reason::Malformed`] where the sender is no
    /// agent.
    pub fn version(&self) -> Result<u16, Reason> {
        if self.magic != MAGIC {
            return Err(Reason::Malformed);
        }
        VERSIONS.common(Versions { oldest: self.oldest.get(), newest: self.newest.get() })
    }
}

body!(
    /// First message on a session's connection, from both sides.
    Hello, kind::HELLO, {
        /// Protocol versions that the sender speaks.
        protocol: Protocol,
        /// Optional features that the sender has, one bit each. A feature is used where both agents have it. None is
        /// defined yet.
        features: U64,
        /// Port from which the sender of this message sends payload to the receiver's clients; 0: it sends none.
        sender_port: U16,
        /// Reserved, zero.
        zero: U16,
        /// Interval at which the sender wants to hear from the receiver, in milliseconds, whatever the receiver's own
        /// heartbeat is. After four intervals of silence the sender takes the receiver for lost.
        heartbeat_ms: U32,
        /// Address from which payload goes to IPv4 clients; all zero where there is none.
        sender_ipv4: Address,
        /// Address from which payload goes to IPv6 clients; all zero where there is none.
        sender_ipv6: Address,
        /// The sender's name, NUL-padded.
        name: [u8; NAME_BYTES],
        /// Key of the tags of the sender's offers to this peer in this session.
        offer_key: [u8; 16],
    }
);
body!(
    /// Frontend's agent to the backend's: send this payload on that flow. The backend's agent does not confirm the
    /// claim. If the handoff fails or waits, it sends ENDED or ANSWER. For a flow with `FlowState::WORD` it also sends
    /// DELIVERED, and for one with `FlowState::DIGEST` it sends DIGEST.
    Claim, kind::CLAIM, {
        /// Number of the frontend's worker; returned in ENDED.
        worker: U32,
        /// Length of these fields in bytes. In CLAIM_PARTS, the list of parts begins after that many bytes of the body.
        bytes: U16,
        /// Reserved, zero.
        zero: U16,
        /// Name of the handoff, a number that the frontend's server has chosen; returned in ENDED.
        handoff: U64,
        /// Number of the offer to send; 0 in CLAIM_PARTS.
        offer: U64,
        /// Length of the payload in bytes.
        length: U64,
        /// Rate limit in bytes per second; 0: no limit.
        rate: U64,
        /// Proof that the offer was made for this request ([`Tag`]).
        tag: Tag,
        /// Trace-id of the request, for logs.
        trace: TraceId,
        /// State of the client's connection.
        flow: WireFlowState,
        /// Cipher suite of the write keys for this payload ([`Generation::suite`]). On an unencrypted connection this
        /// and all following fields are 0.
        suite: U16,
        /// Number of the payload's first TLS record ([`Generation::record`]).
        record: U64,
        /// Largest content of a TLS record, in bytes ([`Generation::content_bytes`]).
        content_bytes: U16,
        /// Number of leading bytes of the first TLS record that the client already has ([`Generation::skip`]).
        skip: U16,
        /// Write keys. They are secret: an agent sends them only over an encrypted session.
        keys: Keys,
    }
);
body!(
    /// Frontend's agent to the agent of a store. Asks whether that agent would send bytes of its store to this client
    /// in this server's name.
    Ask, kind::ASK, {
        /// Number of the frontend's worker; returned in ANSWER.
        worker: U32,
        /// Reserved, zero.
        zero: U32,
        /// Name of the handoff; returned in ANSWER.
        handoff: U64,
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// The client's port, in network order.
        client_port: [u8; 2],
        /// The frontend's port, in network order.
        server_port: [u8; 2],
    }
);
body!(
    /// Answer to ASK. Sent without a question, it says that a claim of bytes in the store waits for a sender or a port,
    /// and that other claims would wait, too.
    Answer, kind::ANSWER, {
        /// Number of the frontend's worker, from the question or the claim.
        worker: U32,
        /// A [`Reason`] for a refusal or for the wait; 0: this machine would send.
        reason: U32,
        /// Name of the handoff, from the question or the claim.
        handoff: U64,
    }
);
body!(
    /// The frontend has given a handoff up: stop sending, and send nothing else to the client.
    Abort, kind::ABORT, { worker: U32, handoff: U64, }
);
body!(
    /// A handoff ended without success.
    Ended, kind::ENDED, {
        /// Number of the frontend's worker, from the claim.
        worker: U32,
        /// Why it ended: a [`Reason`].
        reason: U32,
        /// Name of the handoff, from the claim.
        handoff: U64,
        /// Trace-id of the request, from the claim, for logs.
        trace: TraceId,
    }
);
body!(
    /// Backend's agent to the frontend's: which of the client's ACKs the flow's sender needs.
    Spacing, kind::SPACING, {
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// The client's port, in network order.
        client_port: [u8; 2],
        /// The frontend's port, in network order.
        server_port: [u8; 2],
        /// Payload bytes from one needed ACK to the next, at least 1. Valid until the flow shows a sign of loss. From
        /// then on the frontend passes every ACK on, until the backend's agent sends SPACING again.
        bytes: U32,
    }
);
body!(
    /// Backend's agent to the frontend's: the client has acknowledged the whole payload of a claim with
    /// `FlowState::WORD`, and the backend had sent all of it.
    Delivered, kind::DELIVERED, {
        /// Name of the handoff, from the claim.
        handoff: U64,
        /// The client's end.
        client_address: Address,
        /// The frontend's end, as the client knows it.
        server_address: Address,
        /// The client's port, in network order.
        client_port: [u8; 2],
        /// The frontend's port, in network order.
        server_port: [u8; 2],
    }
);
body!(
    /// Frontend's agent to the backend's, before a claim: what is the digest of the file behind this offer? The answer
    /// is DIGEST.
    Prove, kind::PROVE, {
        /// Number of the frontend's worker; returned in DIGEST.
        worker: U32,
        /// Reserved, zero.
        zero: U32,
        /// Name of the handoff; returned in DIGEST.
        handoff: U64,
        /// Number of the offer in question.
        offer: U64,
        /// Length of the payload in bytes.
        length: U64,
        /// Proof that the offer was made for this request ([`Tag`]).
        tag: Tag,
    }
);
body!(
    /// Backend's agent to the frontend's: digest of the file behind an offer, in answer to PROVE. Without a question:
    /// digest of the file behind a claim with `FlowState::DIGEST` that has been under way for a while.
    Digest, kind::DIGEST, {
        /// Number of the frontend's worker, from the question or the claim.
        worker: U32,
        /// 1: the digest is known; 0: it is unknown, or an earlier DIGEST for this claim is no longer true.
        known: U32,
        /// Name of the handoff, from the question or the claim.
        handoff: U64,
        /// Offset in the file at which the payload begins, in bytes.
        offset: U64,
        /// SHA-256 of the whole file.
        sha256: [u8; 32],
    }
);
body!(
    /// Frontend's agent to the backend's: the frontend's server has forgotten this claim's digest, because DIGEST with
    /// `known` 0 has taken it back. Until this message comes, the backend encrypts no further records.
    Withdrawn, kind::WITHDRAWN, {
        /// Number of the frontend's worker, from the claim.
        worker: U32,
        /// Reserved, zero.
        zero: U32,
        /// Name of the handoff, from the claim.
        handoff: U64,
    }
);
body!(
    /// Sign of life from an agent that has nothing else to send. An agent that hears nothing from a peer for too long
    /// takes the peer for lost.
    Ping, kind::PING, {}
);
body!(
    /// Frontend's agent to the backend's: whether the backend's servers may make new offers to the frontend. Offers
    /// made before stay valid.
    Closed, kind::CLOSED, {
        /// 1: make no new offers; 0: make them again.
        offers: U32,
    }
);
body!(
    /// First message on the connection of a fetch.
    Fetch, kind::FETCH, {
        /// Protocol versions that the sender speaks.
        protocol: Protocol,
        /// Number of the offer to fetch.
        offer: U64,
        /// Length of the payload in bytes.
        length: U64,
        /// Proof that the offer was made for this request ([`Tag`]).
        tag: Tag,
        /// Trace-id of the request, for logs.
        trace: TraceId,
    }
);
body!(
    /// Answer to FETCH: the payload follows, `length` bytes.
    Fetched, kind::FETCHED, { length: U64, }
);
body!(
    /// First message on the connection by which a program reads from the other machine's store.
    Store, kind::STORE, {
        /// Protocol versions that the sender speaks.
        protocol: Protocol,
    }
);
body!(
    /// Answer to STORE: the program may read. No other frame follows.
    Stored, kind::STORED, {}
);
body!(
    /// First message on a connection of a peer's `shunt doctor`: asks what is wrong at this machine for that peer.
    Examine, kind::EXAMINE, {
        /// Protocol versions that the sender speaks.
        protocol: Protocol,
        /// Number of valid entries in `servers`, at most [`Examine::MOST`].
        count: U16,
        /// Endpoints by which the peer's clients know its servers: an address (16 bytes) and a port in network order
        /// each.
        servers: [[u8; 18]; 16],
    }
);
body!(
    /// Answer to EXAMINE. No other frame follows.
    Examined, kind::EXAMINED, {
        /// Clock of the machine, in nanoseconds since 1970.
        time_ns: U64,
        /// Roles of the machine: [`Examined::FRONTEND`], [`Examined::BACKEND`].
        roles: U32,
        /// One bit per server in the question, the first in the lowest bit: set where payload may be sent in that
        /// server's name.
        may: U32,
        /// Faults that affect payload for the peer that asks: the bits from [`Examined::NO_ROUTE`] on.
        faults: U32,
    }
);
body!(
    /// Answer that refuses a HELLO, FETCH, STORE or EXAMINE. The connection is closed after it.
    Refused, kind::REFUSED, {
        /// Why: a [`Reason`].
        reason: U32,
    }
);

/// A frame of any kind, with its contents.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Frame {
    Hello(Hello),
    Claim(Claim),
    /// A claim of ranges of bytes (parts) in the backend's store, in place of an offer.
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
    /// Server addresses in whose name the sender of this frame may send payloads for the receiver. Sent after HELLO.
    SpeaksFor(Prefixes),
    /// Addresses of the sender's programs, sent whenever they have changed.
    Addresses(Addresses),
    /// Stores that the sender's programs can fetch from, sent whenever they have changed.
    Sources(Box<Sources>),
    Fetch(Fetch),
    Fetched(Fetched),
    Refused(Refused),
    Store(Store),
    Stored(Stored),
    Examine(Examine),
    Examined(Examined),
}

impl Frame {
    /// Returns the claim if the frame is a claim, whether of an offer or of bytes in a store. A claim may have keys.
    pub fn claim(&self) -> Option<&Claim> {
        match self {
            Self::Claim(claim) | Self::ClaimParts(claim, _) => Some(claim),
            _ => None,
        }
    }

    /// Reads the first frame of `bytes`: returns the frame and its length, or `None` where more bytes are needed.
    ///
    /// # Errors
    /// [`Reason::Malformed`] or [`Reason::Version`]. After an error the rest of the stream cannot be parsed.
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
            kind::SOURCES => Sources::parse(body).map(|sources| Frame::Sources(Box::new(sources))),
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
    /// The message that this agent sends for a program that wants to read.
    pub const REQUEST: Self = Self { protocol: Protocol::OURS };

    fn checked(self) -> Result<Self, Reason> {
        self.protocol.version().map(|_| self)
    }
}

impl Examine {
    /// Largest number of servers that one message can ask about.
    pub const MOST: usize = 16;

    /// Builds the question about these servers. Only the first [`Self::MOST`] of them fit.
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

    /// Returns the servers that the message asks about.
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
    /// Bit of [`Self::roles`]: the machine is a frontend.
    pub const FRONTEND: u32 = 1;
    /// Bit of [`Self::roles`]: the machine is a backend.
    pub const BACKEND: u32 = 2;

    /// Bit of [`Self::faults`], as are the next three: no route leads from the examined machine to the peer that asks.
    pub const NO_ROUTE: u32 = 1;
    /// Payload would leave the examined machine by an interface that its configuration does not list.
    pub const PAYLOAD_ELSEWHERE: u32 = 2;
    /// A strict rp_filter on the examined machine drops the clients' ACKs.
    pub const FILTERED: u32 = 4;
    /// An interface of the examined machine is missing, or lacks its steering programs.
    pub const WITHOUT_PROGRAMS: u32 = 8;

    /// Whether the examined machine is a backend.
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

    /// Returns the address from which the sender of this message sends payload to IPv4 clients, if it has one.
    pub fn ipv4(&self) -> Option<IpAddr> {
        (self.sender_ipv4 != Address::NONE).then(|| self.sender_ipv4.ip())
    }

    /// Returns the address from which the sender of this message sends payload to IPv6 clients, if it has one.
    pub fn ipv6(&self) -> Option<IpAddr> {
        (self.sender_ipv6 != Address::NONE).then(|| self.sender_ipv6.ip())
    }

    /// Returns the name of this message's sender, or `None` where it is not a name that a configuration accepts.
    pub fn name(&self) -> Option<&str> {
        let end = self.name.iter().position(|byte| *byte == 0)?;
        let name = std::str::from_utf8(&self.name[..end]).ok()?;
        (is_name(name) && self.name[end..].iter().all(|byte| *byte == 0)).then_some(name)
    }
}

/// Whether an agent may have this name: 1 to 63 characters of `a-z 0-9 . _ -`, so that it fits a header field
/// unescaped.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    !name.is_empty() && name.len() < NAME_BYTES && name.bytes().all(allowed)
}

/// Pads a name with NUL bytes to its length on the wire.
///
/// # Panics
/// Panics where `name` is longer than 63 bytes; check [`is_name`] first.
pub fn padded_name(name: &str) -> [u8; NAME_BYTES] {
    let mut padded = [0; NAME_BYTES];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    padded
}

/// The frontend's worker and handoff that a claim was made for, so that this agent can tell the frontend how the
/// handoff ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Number of the peer in whose session the claim came.
    pub peer: u32,
    /// Number of the frontend's worker ([`Claim::worker`]).
    pub worker: u32,
    /// Name of the handoff ([`Claim::handoff`]).
    pub handoff: u64,
    /// Trace-id of the client's request, for logs.
    pub trace: TraceId,
}

impl Claimant {
    /// Takes the claimant from a claim that came in the session with `peer`.
    pub fn of(peer: u32, claim: &Claim) -> Self {
        Self { peer, worker: claim.worker.get(), handoff: claim.handoff.get(), trace: claim.trace }
    }

    /// Builds the message that the handoff has ended.
    pub fn ended(&self, reason: Reason) -> Ended {
        let &Self { worker, handoff, trace, .. } = self;
        Ended { worker: worker.into(), reason: (reason as u32).into(), handoff: handoff.into(), trace }
    }
}

impl Claim {
    /// Builds the claim for a handoff that a worker of the frontend has asked for.
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

    /// Appends this claim as one frame, followed by its list of parts.
    pub fn emit_with(&self, parts: &Parts, out: &mut Vec<u8>) {
        FrameHeader::emit(kind::CLAIM_PARTS, &[self.as_bytes(), parts.as_slice().as_bytes()], out);
    }

    /// Returns the TLS parameters for this payload.
    pub fn generation(&self) -> Generation {
        Generation {
            suite: self.suite.get(),
            content_bytes: self.content_bytes.get(),
            skip: self.skip.get(),
            record: self.record.get(),
        }
    }

    /// Returns the number of bytes that the backend sends for this claim: the length of the payload, or of the
    /// payload's TLS records without [`Claim::skip`]. `None` where the TLS parameters are invalid. The parameters of a
    /// parsed claim are valid.
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

    /// A newer agent may append fields to a message. The list of parts still comes after these fields.
    #[test]
    fn bytes_that_a_newer_agent_appends_are_skipped() {
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
        // A list of parts that begins inside the claim, or past the frame's end, is malformed.
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
