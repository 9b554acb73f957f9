//! Sessions with other agents. Each pair of agents has one connection, made by the agent whose name sorts first. It
//! stays open between payloads. An agent closes it only if the peer is silent, breaks the protocol, begins a new
//! session, or has another configuration or certificate now. A *peer* is another machine's agent. A *session* lasts
//! from the second HELLO until the connection is lost. A *sender* is a backend's kernel socket for a client. An *offer*
//! is a payload that a backend holds ready, and its *tag* proves for which request it was made. A *turn* is one pass of
//! the daemon's event loop.
//!
//! ```text
//!              dialled, or admitted            HELLO of the peer
//!   Down ------------------------> Opening --------------------> Up
//!    ^                                |                           |
//!    +--------------------------------+------- lost --------------+
//! ```

pub mod hearing;
pub mod incoming;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use shunt_wire::Address;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Hello, Ping, Protocol, padded_name};
use shunt_wire::prefixes::Prefixes;

use crate::settings::{PeerSettings, Settings};
use hearing::Hearing;

/// Shortest and longest pause before the next attempt to connect to a peer. The pause doubles with each failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Time that a new connection may take until its session begins. A peer that dials this agent may stay away for at
/// least this time before its absence is logged.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Number of heartbeat intervals without any frame after which a peer is lost.
pub const SILENT_HEARTBEATS: u32 = 4;
/// Shortest heartbeat that a configuration may have. With a shorter one, machines that are only busy would count as
/// lost.
pub const HEARTBEAT_MIN: Duration = Duration::from_millis(50);
/// Optional features of the protocol that this agent has, one per bit ([`Hello::features`]). There are none yet.
const FEATURES: u64 = 0;

/// Addresses of this machine's senders for the clients of one peer, one of each IP version at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderAddresses {
    /// Address of the senders for clients of IPv4.
    pub ipv4: Option<IpAddr>,
    /// Address of the senders for clients of IPv6.
    pub ipv6: Option<IpAddr>,
}

impl SenderAddresses {
    /// Returns whether there is no address at all.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the addresses in the form of HELLO: IPv4, then IPv6.
    pub fn on_the_wire(&self) -> [Address; 2] {
        [self.ipv4, self.ipv6].map(|address| address.map_or(Address::NONE, Address::from))
    }

    /// Returns the address of the senders for a client.
    pub fn towards(&self, client: Address) -> Option<IpAddr> {
        if client.ip().is_ipv4() { self.ipv4 } else { self.ipv6 }
    }
}

/// Data of a new connection with a peer, from the daemon.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// Addresses of this machine's senders for the peer's clients. They may depend on the connection's local address.
    pub senders: SenderAddresses,
    /// A new random key for the tags of offers to the peer, used if the peer has no key yet.
    pub key: [u8; 16],
}

/// State of the session with a peer.
#[derive(Clone, Copy, Debug)]
enum Link {
    Down { next_attempt: Instant },
    Opening { deadline: Instant },
    Up(Session),
}

/// A session's state.
#[derive(Clone, Copy, Debug)]
struct Session {
    /// The peer has sent SPEAKS_FOR: the server addresses in whose name it sends payloads for this machine.
    has_spoken: bool,
    /// Time at which the last frame from the peer came (`heard`), and at which the last frame to the peer was sent
    /// (`told`). [`Peers::excuse`] may set `heard` to a later time.
    heard: Instant,
    told: Instant,
    /// Longest time that this agent sends nothing to the peer. After this time, it sends PING. The peer's heartbeat or
    /// this agent's, whichever is shorter.
    beat: Duration,
}

/// One configured peer.
pub struct Peer {
    name: String,
    /// Address that the peer's agent listens at.
    address: SocketAddr,
    is_dialled: bool,
    link: Link,
    backoff: Duration,
    /// Key of the tags of offers to the peer; zeros before the first connection. It stays when a session ends, because
    /// the offers stay, too.
    offer_key: [u8; 16],
    /// Addresses of this machine's senders for the peer's clients, as the newest HELLO to the peer has them.
    pub senders: SenderAddresses,
    /// Bound on the number of the peer's messages that are passed on to this machine's servers.
    pub hearing: Hearing,
    /// Frames for the peer, which are sent at the end of the turn.
    outbox: Vec<u8>,
    is_unsent: bool,
    /// Reason why there is no session, as last logged.
    told_why: Option<String>,
    /// The peer's heartbeat as last logged, if it differs from this agent's.
    told_heartbeat: Option<Duration>,
}

impl Peer {
    fn new(settings: &PeerSettings, now: Instant) -> Self {
        Self {
            name: settings.name.clone(),
            address: settings.address,
            is_dialled: settings.is_dialled,
            link: Link::Down { next_attempt: now },
            backoff: BACKOFF.0,
            offer_key: [0; 16],
            senders: SenderAddresses::default(),
            hearing: Hearing::default(),
            outbox: Vec::new(),
            is_unsent: false,
            told_why: None,
            told_heartbeat: None,
        }
    }

    /// Returns the peer's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether there is a session with the peer.
    pub fn is_up(&self) -> bool {
        matches!(self.link, Link::Up(_))
    }

    fn session(&mut self) -> Option<&mut Session> {
        match &mut self.link {
            Link::Up(session) => Some(session),
            _ => None,
        }
    }

    /// Returns the peer's heartbeat from its HELLO, at least the shortest one that a configuration may have.
    fn heartbeat(hello: &Hello) -> Duration {
        Duration::from_millis(hello.heartbeat_ms.get().into()).max(HEARTBEAT_MIN)
    }
}

/// Step that is due for a peer by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Try to connect.
    Attempt,
    /// End an attempt that has taken too long.
    TooLong,
    /// End a session whose peer is silent.
    Silent,
}

/// A session that begins.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// Version that both sides speak.
    pub version: u16,
    /// Key of the tags of this machine's offers to the peer.
    pub our_key: [u8; 16],
    /// Key of the tags of the peer's offers to this machine.
    pub their_key: [u8; 16],
}

/// All peers.
pub struct Peers {
    all: Vec<Peer>,
    unsent: Vec<usize>,
}

impl Peers {
    /// Returns the peers of a configuration, none of them connected.
    pub fn new(settings: &Settings, now: Instant) -> Self {
        Self { all: settings.peers.iter().map(|peer| Peer::new(peer, now)).collect(), unsent: Vec::new() }
    }

    /// Adds a peer, which is not connected.
    pub fn add(&mut self, settings: &PeerSettings, now: Instant) {
        self.all.push(Peer::new(settings, now));
    }

    /// Number of peers.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether there are no peers.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Looks up a peer by a number that a server may have made up.
    pub fn find(&self, peer: usize) -> Option<&Peer> {
        self.all.get(peer)
    }

    /// Returns the peer with a number that comes from a session or the configuration.
    ///
    /// # Panics
    /// Panics if there is no such peer.
    pub fn peer(&mut self, peer: usize) -> &mut Peer {
        &mut self.all[peer]
    }

    /// Returns whether there is a session with a peer.
    pub fn is_up(&self, peer: usize) -> bool {
        self.find(peer).is_some_and(Peer::is_up)
    }

    /// Returns whether there is a session with a peer, or HELLO has been sent for one.
    pub fn is_greeted(&self, peer: usize) -> bool {
        self.find(peer).is_some_and(|of| !matches!(of.link, Link::Down { .. }))
    }

    /// Returns the buffer to which frames for a peer are appended, or `None` if there is no session.
    pub fn outbox(&mut self, peer: usize) -> Option<&mut Vec<u8>> {
        if !self.is_up(peer) {
            return None;
        }
        Some(self.open_outbox(peer))
    }

    fn open_outbox(&mut self, peer: usize) -> &mut Vec<u8> {
        let of = &mut self.all[peer];
        if !std::mem::replace(&mut of.is_unsent, true) {
            self.unsent.push(peer);
        }
        &mut of.outbox
    }

    /// Returns the next peer that may have waiting frames, and the peer's buffer. The daemon sends and clears the
    /// frames at the end of a turn. The buffer stays, and is reused.
    pub fn next_unsent(&mut self, now: Instant) -> Option<(usize, &mut Vec<u8>)> {
        let peer = self.unsent.pop()?;
        let of = &mut self.all[peer];
        of.is_unsent = false;
        if !of.outbox.is_empty()
            && let Some(session) = of.session()
        {
            session.told = now;
        }
        Some((peer, &mut of.outbox))
    }

    /// Returns the step that is due for a peer, if any. Sends PING if this agent has been silent in the session for too
    /// long.
    pub fn tend(&mut self, peer: usize, heartbeat: Duration, now: Instant) -> Option<Due> {
        match self.all[peer].link {
            Link::Down { next_attempt } if self.all[peer].is_dialled => (next_attempt <= now).then_some(Due::Attempt),
            Link::Down { next_attempt } => {
                if next_attempt + PATIENCE <= now {
                    self.say_no_session(peer, "it has not connected; its agent dials this one");
                }
                None
            }
            Link::Opening { deadline } => (deadline <= now).then_some(Due::TooLong),
            Link::Up(_) if self.is_silent(peer, heartbeat, now) => Some(Due::Silent),
            Link::Up(session) => {
                if now.duration_since(session.told) >= session.beat
                    && let Some(outbox) = self.outbox(peer)
                {
                    Ping {}.emit(outbox);
                }
                None
            }
        }
    }

    /// Returns whether a peer has been silent for too long. Before the session ends for that reason, the daemon reads
    /// the peer's connection once more: this agent may have had no time to read.
    pub fn is_silent(&self, peer: usize, heartbeat: Duration, now: Instant) -> bool {
        matches!(self.all[peer].link, Link::Up(session) if now.duration_since(session.heard) > heartbeat * SILENT_HEARTBEATS)
    }

    /// Notes that a turn came late. If it came late by more than a heartbeat, the delay does not count as silence of
    /// peers. They may have stood still together with this agent, as virtual machines of one host do, or processes on
    /// one core.
    pub fn excuse(&mut self, late: Duration, heartbeat: Duration, now: Instant) {
        if late > heartbeat {
            for session in self.all.iter_mut().filter_map(Peer::session) {
                session.heard = now.min(session.heard + late);
            }
        }
    }

    /// Notes that a frame of a peer has arrived.
    pub fn note_heard(&mut self, peer: usize, now: Instant) {
        if let Some(session) = self.all[peer].session() {
            session.heard = now;
        }
    }

    /// Notes SPEAKS_FOR of a peer. Returns whether it is the first one of the session. A second one is not allowed.
    /// Each changes the epoch (number) of the peer's entry in the table that servers read. Handoffs that are just
    /// beginning are then refused.
    pub fn speaks_first(&mut self, peer: usize) -> bool {
        self.all[peer].session().is_some_and(|session| !std::mem::replace(&mut session.has_spoken, true))
    }

    /// Prepares a session on a connection with a peer: writes HELLO to the peer's outbox, and SPEAKS_FOR if this
    /// machine is a backend. Returns the outbox.
    pub fn open(&mut self, peer: usize, settings: &Settings, opened: &Opened, now: Instant) -> &mut Vec<u8> {
        let of = &mut self.all[peer];
        of.link = Link::Opening { deadline: now + PATIENCE };
        if of.offer_key == [0; 16] {
            of.offer_key = opened.key;
        }
        let mut port = 0;
        if settings.backend.is_some() {
            of.senders = opened.senders;
            if of.senders.is_empty() {
                tracing::error!(
                    peer = of.name,
                    "this machine has no address to send payloads from: name one in [backend] addresses"
                );
            } else {
                port = settings.peers[peer].port;
            }
        }
        let [sender_ipv4, sender_ipv6] = of.senders.on_the_wire();
        let hello = Hello {
            protocol: Protocol::OURS,
            features: FEATURES.into(),
            sender_port: port.into(),
            zero: 0.into(),
            heartbeat_ms: (settings.heartbeat.as_millis() as u32).into(),
            sender_ipv4,
            sender_ipv6,
            name: padded_name(&settings.name),
            offer_key: of.offer_key,
        };
        of.outbox.fill(0);
        of.outbox.clear();
        let outbox = self.open_outbox(peer);
        hello.emit(outbox);
        if settings.backend.is_some() {
            Prefixes::new(&settings.peers[peer].speaks_for).unwrap_or_default().emit(outbox);
        }
        outbox
    }

    /// Begins a session, because the peer has sent HELLO on a connection that has been opened.
    ///
    /// # Errors
    /// Returns [`Reason::Malformed`] if HELLO has another agent's name, comes twice, or comes before the connection was
    /// opened. Returns [`Reason::Version`] if there is no version that both agents speak.
    pub fn begin(&mut self, peer: usize, hello: &Hello, heartbeat: Duration, now: Instant) -> Result<Begun, Reason> {
        let of = &mut self.all[peer];
        if hello.name() != Some(of.name.as_str()) || !matches!(of.link, Link::Opening { .. }) {
            return Err(Reason::Malformed);
        }
        let version = hello.protocol.version()?;
        of.backoff = BACKOFF.0;
        of.told_why = None;
        let beat = heartbeat.min(Peer::heartbeat(hello));
        of.link = Link::Up(Session { has_spoken: false, heard: now, told: now, beat });
        self.say_heartbeat(peer, hello, heartbeat);
        Ok(Begun { version, our_key: self.all[peer].offer_key, their_key: hello.offer_key })
    }

    /// Logs that a peer has another heartbeat than this agent, if so: the two sides would notice a loss at different
    /// times. Each such heartbeat of a peer is logged once, until it changes.
    fn say_heartbeat(&mut self, peer: usize, hello: &Hello, ours: Duration) {
        let of = &mut self.all[peer];
        let theirs = Some(Peer::heartbeat(hello)).filter(|theirs| *theirs != ours);
        if std::mem::replace(&mut of.told_heartbeat, theirs) == theirs {
            return;
        }
        if let Some(theirs) = theirs {
            let peer = &of.name;
            tracing::warn!(
                peer,
                heartbeat = ?ours,
                ?theirs,
                "two machines have different heartbeats, and one of them notices a loss later: configure the same \
                 `heartbeat`"
            );
        }
    }

    /// Notes that the connection with a peer has ended or could not be made. Returns whether there was a session.
    pub fn lose(&mut self, peer: usize, why: &str, now: Instant) -> bool {
        let of = &mut self.all[peer];
        let was_up = of.is_up();
        if was_up {
            tracing::warn!(peer = of.name, why, "session lost");
        } else {
            self.say_no_session(peer, why);
        }
        let of = &mut self.all[peer];
        of.link = Link::Down { next_attempt: now + of.backoff };
        of.backoff = (of.backoff * 2).min(BACKOFF.1);
        of.outbox.fill(0); // it may hold keys
        of.outbox.clear();
        of.hearing.forget_questions();
        was_up
    }

    /// Notes the address that a peer's agent listens at from now on.
    pub fn set_address(&mut self, peer: usize, address: SocketAddr) {
        self.all[peer].address = address;
    }

    /// Forgets the key of offers to a peer that is not trusted any more.
    pub fn distrust(&mut self, peer: usize) {
        self.all[peer].offer_key = [0; 16];
    }

    /// Logs why there is no session with a peer: once, and again when the reason changes.
    fn say_no_session(&mut self, peer: usize, why: &str) {
        let of = &mut self.all[peer];
        if of.told_why.as_deref() != Some(why) {
            of.told_why = Some(why.to_owned());
            tracing::info!(peer = of.name, address = %of.address, why, "no session with a peer; trying again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use shunt_wire::peer::Frame;

    const HEARTBEAT: Duration = Duration::from_millis(250);

    fn settings(name: &str, peer: &str) -> Settings {
        let peer = PeerSettings {
            name: peer.into(),
            address: ([10, 77, 1, 1], 7440).into(),
            is_dialled: name < peer,
            port: 61000,
            speaks_for: Vec::new(),
            may_read_store: false,
            is_gone: false,
        };
        Settings {
            name: name.into(),
            heartbeat: HEARTBEAT,
            limits: Limits::default(),
            is_frontend: true,
            backend: None,
            has_store: false,
            peers: vec![peer],
        }
    }

    fn hello_of(name: &str, heartbeat: Duration) -> Hello {
        let settings = Settings { heartbeat, ..settings(name, "other") };
        let mut peers = Peers::new(&settings, Instant::now());
        let outbox =
            peers.open(0, &settings, &Opened { senders: SenderAddresses::default(), key: [7; 16] }, Instant::now());
        match Frame::parse(outbox).unwrap() {
            Some((Frame::Hello(hello), _)) => hello,
            other => panic!("{other:?}"),
        }
    }

    fn up(now: Instant) -> Peers {
        let settings = settings("a", "b");
        let mut peers = Peers::new(&settings, now);
        assert_eq!(peers.tend(0, HEARTBEAT, now), Some(Due::Attempt));
        peers.open(0, &settings, &Opened { senders: SenderAddresses::default(), key: [1; 16] }, now);
        let begun = peers.begin(0, &hello_of("b", HEARTBEAT), HEARTBEAT, now).unwrap();
        assert_eq!((begun.our_key, begun.their_key), ([1; 16], [7; 16]));
        while let Some((_, outbox)) = peers.next_unsent(now) {
            outbox.clear();
        }
        peers
    }

    #[test]
    fn attempts_come_later_and_later() {
        let (settings, mut now) = (settings("a", "b"), Instant::now());
        let mut peers = Peers::new(&settings, now);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(peers.tend(0, HEARTBEAT, now), Some(Due::Attempt));
            assert!(!peers.lose(0, "refused", now));
            let begun = now;
            while peers.tend(0, HEARTBEAT, now).is_none() {
                now += Duration::from_millis(100);
            }
            pauses.push(now.duration_since(begun));
        }
        assert!(pauses.is_sorted() && pauses[0] == BACKOFF.0 && pauses[7] == BACKOFF.1, "{pauses:?}");
    }

    #[test]
    fn attempts_are_quick_again_after_a_session() {
        let (settings, mut now) = (settings("a", "b"), Instant::now());
        let mut peers = Peers::new(&settings, now);
        (0..8).for_each(|_| assert!(!peers.lose(0, "refused", now)));
        peers.open(0, &settings, &Opened { senders: SenderAddresses::default(), key: [1; 16] }, now);
        peers.begin(0, &hello_of("b", HEARTBEAT), HEARTBEAT, now).unwrap();
        assert!(peers.lose(0, "reset", now));
        now += BACKOFF.0;
        assert_eq!(peers.tend(0, HEARTBEAT, now), Some(Due::Attempt));
    }

    #[test]
    fn an_attempt_that_takes_too_long_ends() {
        let (settings, now) = (settings("a", "b"), Instant::now());
        let mut peers = Peers::new(&settings, now);
        peers.open(0, &settings, &Opened { senders: SenderAddresses::default(), key: [1; 16] }, now);
        assert_eq!(peers.tend(0, HEARTBEAT, now + PATIENCE - Duration::from_millis(1)), None);
        assert_eq!(peers.tend(0, HEARTBEAT, now + PATIENCE), Some(Due::TooLong));
    }

    #[test]
    fn the_side_that_is_dialled_never_dials() {
        let (settings, now) = (settings("b", "a"), Instant::now());
        let mut peers = Peers::new(&settings, now);
        assert_eq!(peers.tend(0, HEARTBEAT, now + Duration::from_secs(60)), None);
    }

    #[test]
    fn a_session_is_with_the_agent_of_that_name_and_begins_once() {
        let (settings, now) = (settings("a", "b"), Instant::now());
        let mut peers = Peers::new(&settings, now);
        let hello = hello_of("b", HEARTBEAT);
        let begin = |peers: &mut Peers, hello: &Hello| peers.begin(0, hello, HEARTBEAT, now).map(drop);
        assert_eq!(begin(&mut peers, &hello), Err(Reason::Malformed), "nothing was opened");
        peers.open(0, &settings, &Opened { senders: SenderAddresses::default(), key: [1; 16] }, now);
        assert_eq!(begin(&mut peers, &hello_of("c", HEARTBEAT)), Err(Reason::Malformed));
        assert_eq!(begin(&mut peers, &hello), Ok(()));
        assert_eq!(begin(&mut peers, &hello), Err(Reason::Malformed), "twice");
    }

    #[test]
    fn each_side_says_that_it_is_there_and_a_silent_one_is_lost() {
        let mut now = Instant::now();
        let mut peers = up(now);
        let mut pings = 0;
        for _ in 0..20 {
            now += Duration::from_millis(100);
            peers.note_heard(0, now);
            assert_eq!(peers.tend(0, HEARTBEAT, now), None);
            while let Some((_, outbox)) = peers.next_unsent(now) {
                pings += usize::from(matches!(Frame::parse(outbox), Ok(Some((Frame::Ping(_), _)))));
                outbox.clear();
            }
        }
        assert_eq!(pings, 6, "one in three tenths of a second");
        now += HEARTBEAT * SILENT_HEARTBEATS;
        assert_eq!(peers.tend(0, HEARTBEAT, now), None);
        assert_eq!(peers.tend(0, HEARTBEAT, now + Duration::from_millis(1)), Some(Due::Silent));
    }

    #[test]
    fn the_silence_of_peers_does_not_count_while_this_agent_stood_still() {
        let now = Instant::now();
        let mut peers = up(now);
        let late = Duration::from_secs(3);
        peers.excuse(late, HEARTBEAT, now + late);
        assert!(!peers.is_silent(0, HEARTBEAT, now + late));
        let mut peers = up(now);
        let busy = Duration::from_millis(200);
        peers.excuse(busy, HEARTBEAT, now + Duration::from_millis(1001));
        assert!(peers.is_silent(0, HEARTBEAT, now + Duration::from_millis(1001)), "a turn that is late by less");
    }

    #[test]
    fn frames_of_a_session_that_is_lost_are_forgotten() {
        let now = Instant::now();
        let mut peers = up(now);
        peers.outbox(0).unwrap().extend_from_slice(b"frame");
        assert!(peers.lose(0, "reset", now) && peers.outbox(0).is_none());
        let left = peers.next_unsent(now).map(|(_, outbox)| outbox.len());
        assert_eq!(left, Some(0));
        assert!(!peers.lose(0, "reset", now), "it is lost once");
    }
}
