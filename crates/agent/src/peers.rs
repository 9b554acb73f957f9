//! Sessions with other agents: one connection per pair, made by the agent whose name sorts first, kept for good.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use shunt_handoff::sender::Claimant;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Ended, Frame, Hello, Ping, Protocol, padded_name};
use shunt_wire::prefixes::{Prefix, Prefixes};

use crate::addresses::SenderAddresses;
use crate::agent::Agent;
use crate::config::{HEARTBEAT_MIN, PeerConfig, SILENT_HEARTBEATS};
use crate::hearing::Hearing;
use crate::incoming::Incoming;
use crate::poll::{Interest, Source};
use crate::speaks_for::SpeaksFor;
use crate::transport::{Transport, TransportError};

const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long a new connection may take until its session begins.
const PATIENCE: Duration = Duration::from_secs(5);
/// Label of the key that proves handshakes between the two machines' programs (RFC 8446, 7.5; ends.rs).
const HANDSHAKES: &[u8] = b"EXPORTER-shunt-handshakes";
/// What this agent can do with a peer that can do it, too ([`Hello::features`]).
const FEATURES: u64 = 0;

/// One configured peer.
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) link: Link,
    dials: bool,
    backoff: Duration,
    /// For the tags of our offers to it; zeros before the first session. Offers outlive sessions, and so does this.
    offer_key: [u8; 16],
    /// Where our senders for its clients are, as our newest HELLO says.
    pub(crate) senders: SenderAddresses,
    /// The messages of it that servers still take.
    pub(crate) hearing: Hearing,
    /// Why it cannot be reached, as the log has it.
    said: Option<String>,
    /// Its heartbeat, as the log has it where that differs from ours.
    said_heartbeat: Option<Duration>,
}

/// Where the session stands.
pub(crate) enum Link {
    /// None; the time of the next attempt, for the side that dials.
    Down(Instant),
    /// Connecting, or connected and waiting for HELLO, until then.
    Opening(Transport, Instant),
    /// Both have said HELLO.
    Up(Session),
}

/// A session.
pub(crate) struct Session {
    pub(crate) transport: Transport,
    /// The peer did not take all of the last turn's frames.
    blocked: bool,
    /// It has said as which servers it sends.
    has_spoken: bool,
    /// When it last said anything, and we did.
    heard: Instant,
    told: Instant,
    /// How often we have to say something: as we or the peer want it, whichever is more often.
    beat: Duration,
}

impl Peer {
    pub(crate) fn new(config: &PeerConfig, dials: bool, now: Instant) -> Self {
        Self {
            name: config.name.clone(),
            address: config.address,
            link: Link::Down(now),
            dials,
            backoff: BACKOFF.0,
            offer_key: [0; 16],
            senders: SenderAddresses::default(),
            hearing: Hearing::default(),
            said: None,
            said_heartbeat: None,
        }
    }

    /// How often it wants to hear something: not more often than any configuration may say.
    fn heartbeat(&self, hello: &Hello) -> Duration {
        Duration::from_millis(hello.heartbeat_ms.get().into()).max(HEARTBEAT_MIN)
    }

    pub(crate) fn session(&mut self) -> Option<&mut Session> {
        match &mut self.link {
            Link::Up(session) => Some(session),
            _ => None,
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.link, Link::Up(_))
    }
}

impl Session {
    /// `true` the first time. Each change of the board has the handoffs refused that are just beginning.
    fn speaks_first(&mut self) -> bool {
        !std::mem::replace(&mut self.has_spoken, true)
    }
}

impl Agent {
    /// Dials whoever is due, and gives up on who says nothing.
    pub(crate) fn tend_peers(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &self.peers[index];
            match &peer.link {
                Link::Down(when) if peer.dials && *when <= self.now => self.dial(index),
                Link::Down(when) if !peer.dials && *when + PATIENCE <= self.now => {
                    self.say_no_session(index, "it has not connected; it is the one that dials");
                }
                Link::Opening(_, deadline) if *deadline <= self.now => self.lose_peer(index, "no answer"),
                Link::Up(_) => self.keep_session(index),
                _ => {}
            }
        }
    }

    /// This turn comes so late. Where it was due a heartbeat ago, peers may have stood still with us, as machines of one
    /// host do, or processes of one core: that they said nothing meanwhile tells nothing.
    pub(crate) fn excuse_peers(&mut self, late: Duration) {
        if late > self.config.heartbeat {
            for session in self.peers.iter_mut().filter_map(Peer::session) {
                session.heard = self.now.min(session.heard + late);
            }
        }
    }

    /// A machine that is cut off closes no connection: each side says now and then that it is there.
    fn keep_session(&mut self, index: usize) {
        let (heartbeat, now) = (self.config.heartbeat, self.now);
        let silence = heartbeat * SILENT_HEARTBEATS;
        // It may be us who had no time to listen: what waits in the socket counts.
        if self.peers[index].session().is_some_and(|session| now.duration_since(session.heard) > silence) {
            self.on_peer(index);
        }
        let Some(session) = self.peers[index].session() else {
            return;
        };
        if now.duration_since(session.heard) > silence {
            self.lose_peer(index, &format!("it said nothing for {silence:?}"));
        } else if now.duration_since(session.told) >= session.beat {
            Ping {}.emit(session.transport.output());
            self.mark_unsent(index);
        }
    }

    fn dial(&mut self, index: usize) {
        let deadline = self.now + PATIENCE;
        let tls = self.credentials.dial(&self.peers[index].name).map_err(io::Error::other);
        let dialled = tls.and_then(|tls| Transport::connect(self.peers[index].address, tls));
        let dialled = dialled.and_then(|mut transport| {
            let local = transport.local()?;
            self.greet(index, local, transport.output())?;
            self.poll.set(transport.descriptor(), Source::Peer(index), Interest::Both)?;
            Ok(transport)
        });
        match dialled {
            Ok(transport) => self.peers[index].link = Link::Opening(transport, deadline),
            Err(error) => self.lose_peer(index, &error.to_string()),
        }
    }

    /// What a session begins with: HELLO, as which servers this machine sends for the peer, and the addresses of its programs.
    fn greet(&mut self, index: usize, local: IpAddr, output: &mut Vec<u8>) -> io::Result<()> {
        self.hello(index, local)?.emit(output);
        if self.config.backend.is_some() {
            let spoken_for: Vec<Prefix> = self.config.peers[index].spoken_for().iter().map(SpeaksFor::prefix).collect();
            Prefixes::new(&spoken_for).unwrap_or_default().emit(output);
        }
        self.name_addresses(index, output);
        Ok(())
    }

    /// For a session that has the address `local` here.
    fn hello(&mut self, index: usize, local: IpAddr) -> io::Result<Hello> {
        let mut port = 0;
        if let Some(backend) = &self.config.backend {
            self.peers[index].senders = SenderAddresses::find(backend, local)?;
            if let Some(paths) = &mut self.paths {
                paths.note_addresses()?;
            }
            port = *backend.ports.0.start() + index as u16;
            if self.peers[index].senders.is_empty() {
                port = 0;
                tracing::error!(%local, "no address to send payloads from: name some in [backend] addresses");
            }
        }
        if self.peers[index].offer_key == [0; 16] {
            self.peers[index].offer_key = random_key()?;
        }
        let [sender_ipv4, sender_ipv6] = self.peers[index].senders.on_the_wire();
        Ok(Hello {
            protocol: Protocol::OURS,
            features: FEATURES.into(),
            sender_port: port.into(),
            zero: 0.into(),
            heartbeat_ms: (self.config.heartbeat.as_millis() as u32).into(),
            sender_ipv4,
            sender_ipv6,
            name: padded_name(&self.config.name),
            offer_key: self.peers[index].offer_key,
        })
    }

    pub(crate) fn on_peer(&mut self, index: usize) {
        if let Err(error) = self.read_peer(index) {
            self.counts.strangers += u64::from(matches!(error, TransportError::Tls(_)));
            self.lose_peer(index, &error.to_string());
        }
    }

    fn read_peer(&mut self, index: usize) -> Result<(), TransportError> {
        match &mut self.peers[index].link {
            Link::Down(_) => return Ok(()),
            Link::Opening(transport, _) => {
                transport.connected()?;
                transport.fill()?;
                let interest = if transport.flush()? { Interest::Readable } else { Interest::Both };
                self.poll.set(transport.descriptor(), Source::Peer(index), interest)?;
            }
            Link::Up(session) => session.transport.fill()?,
        }
        self.mark_unsent(index);
        let now = self.now;
        while let Some(frame) = self.next_frame(index)? {
            if let Some(session) = self.peers[index].session() {
                session.heard = now;
            }
            self.on_frame(index, frame)?;
        }
        Ok(())
    }

    fn next_frame(&mut self, index: usize) -> Result<Option<Frame>, TransportError> {
        match &mut self.peers[index].link {
            Link::Down(_) => Ok(None),
            Link::Opening(transport, _) => transport.next_frame(),
            Link::Up(session) => session.transport.next_frame(),
        }
    }

    fn on_frame(&mut self, index: usize, frame: Frame) -> Result<(), TransportError> {
        match (frame, self.peers[index].is_up()) {
            (Frame::Hello(hello), false) => self.begin_session(index, &hello),
            (Frame::Refused(refused), false) => {
                let reason = Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed);
                Err(TransportError::RefusedBy(reason))
            }
            (Frame::Claim(claim), true) => {
                self.on_claim(index, &claim, None);
                Ok(())
            }
            (Frame::ClaimParts(claim, parts), true) => {
                self.on_claim(index, &claim, Some(&parts));
                Ok(())
            }
            (Frame::Ask(ask), true) => {
                self.on_ask(index, &ask);
                Ok(())
            }
            (Frame::Answer(answer), true) => {
                self.on_answer(index, &answer);
                Ok(())
            }
            (Frame::Prove(prove), true) => {
                self.on_prove(index, &prove);
                Ok(())
            }
            (Frame::Digest(digest), true) => {
                self.on_digest(index, &digest);
                Ok(())
            }
            (Frame::Withdrawn(withdrawn), true) => {
                self.on_withdrawn(index, &withdrawn);
                Ok(())
            }
            (Frame::Abort(abort), true) => {
                self.on_abort(index, abort.worker.get(), abort.handoff.get());
                Ok(())
            }
            (Frame::Ended(ended), true) => {
                self.on_ended(index, &ended);
                Ok(())
            }
            (Frame::Ping(_), true) => Ok(()),
            (Frame::Closed(closed), true) => {
                self.pressure.set_full(index, closed.offers.get() == 1);
                self.say_full(index);
                Ok(())
            }
            (Frame::SpeaksFor(prefixes), true) if self.peers[index].session().is_some_and(Session::speaks_first) => {
                Ok(self.board.set_prefixes(index, &prefixes)?)
            }
            (Frame::Addresses(addresses), true) => {
                self.on_addresses(index, &addresses);
                Ok(())
            }
            (Frame::Sources(sources), true) => {
                self.on_sources(index, &sources);
                Ok(())
            }
            (Frame::Delivered(word), true) => {
                self.on_delivered(index, &word);
                Ok(())
            }
            (Frame::Spacing(spacing), true) => {
                self.on_spacing(index, &spacing);
                Ok(())
            }
            _ => Err(TransportError::Refused(Reason::Malformed)),
        }
    }

    fn begin_session(&mut self, index: usize, hello: &Hello) -> Result<(), TransportError> {
        if hello.name() != Some(self.peers[index].name.as_str()) {
            return Err(TransportError::Refused(Reason::Malformed));
        }
        let version = hello.protocol.version().map_err(TransportError::Refused)?;
        let now = self.now;
        let Link::Opening(transport, _) = std::mem::replace(&mut self.peers[index].link, Link::Down(now)) else {
            return Err(TransportError::Refused(Reason::Malformed));
        };
        self.poll.set(transport.descriptor(), Source::Peer(index), Interest::Readable)?;
        let key = transport.export_key(HANDSHAKES)?;
        self.begin_ends(index, key);
        let peer = &mut self.peers[index];
        peer.backoff = BACKOFF.0;
        peer.said = None;
        let beat = self.config.heartbeat.min(peer.heartbeat(hello));
        peer.link = Link::Up(Session { transport, blocked: false, has_spoken: false, heard: now, told: now, beat });
        let our_key = peer.offer_key;
        if let (Some(frontend), 1..) = (&mut self.frontend, hello.sender_port.get()) {
            if let Err(error) = frontend.set_peer(index as u32, hello) {
                tracing::error!(%error, peer = self.peers[index].name, "cannot steer to a peer");
            }
            if let Some(uplinks) = &mut self.uplinks {
                uplinks.watch(index as u32, [hello.ipv4(), hello.ipv6()]);
            }
            self.board.set_families(|index| frontend.families(index as u32))?;
        }
        self.board.up(index, our_key, hello.offer_key)?;
        self.renew_limits(index);
        self.counts.sessions += 1;
        tracing::info!(peer = self.peers[index].name, version, "session begins");
        self.say_heartbeat(index, hello);
        Ok(())
    }

    /// Once, and again where it is another: each side may be slower to notice a loss than its operator thinks.
    fn say_heartbeat(&mut self, index: usize, hello: &Hello) {
        let (ours, peer) = (self.config.heartbeat, &mut self.peers[index]);
        let theirs = Some(peer.heartbeat(hello)).filter(|theirs| *theirs != ours);
        if std::mem::replace(&mut peer.said_heartbeat, theirs) == theirs {
            return;
        }
        if let Some(theirs) = theirs {
            let peer = &peer.name;
            tracing::warn!(
                peer,
                heartbeat = ?ours,
                ?theirs,
                "two machines have different heartbeats: a loss is noticed later on one of them; configure the same"
            );
        }
    }

    /// The session is over, or did not begin. Flows without a handoff in progress go on.
    pub(crate) fn lose_peer(&mut self, index: usize, why: &str) {
        let peer = &mut self.peers[index];
        let was_up = peer.is_up();
        if let (Some(frontend), true) = (&mut self.frontend, was_up) {
            frontend.drop_peer(index as u32);
            let _ = self.board.set_families(|index| frontend.families(index as u32));
        }
        if was_up {
            self.counts.sessions_lost += 1;
            tracing::warn!(peer = peer.name, why, "session lost");
        } else {
            self.say_no_session(index, why);
        }
        let peer = &mut self.peers[index];
        peer.link = Link::Down(self.now + peer.backoff);
        peer.backoff = (peer.backoff * 2).min(BACKOFF.1);
        if !was_up {
            return;
        }
        let _ = self.board.lost(index);
        self.end_ends(index);
        self.end_sources(index);
        self.watch_regions(Some(index as u32));
        self.peers[index].hearing.forget_questions();
        self.forget_waiting(|of| of.peer == index as u32);
        if let Some(senders) = &mut self.senders {
            senders.forget_peer(index as u32);
        }
    }

    /// Once, and again for another reason.
    fn say_no_session(&mut self, index: usize, why: &str) {
        let peer = &mut self.peers[index];
        if peer.said.as_deref() == Some(why) {
            return;
        }
        peer.said = Some(why.to_owned());
        tracing::info!(peer = peer.name, address = %peer.address, why, "no session with a peer; trying again");
    }

    /// After a change of what we trust: ends the sessions that could not begin now.
    pub(crate) fn recheck_sessions(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &self.peers[index];
            let Link::Up(session) = &peer.link else {
                continue;
            };
            if let Err(error) = session.transport.is_good_for(&self.credentials, &peer.name) {
                self.counts.strangers += 1;
                self.lose_peer(index, &format!("its certificate is no longer good: {error}"));
                self.peers[index].offer_key = [0; 16];
                let _ = self.board.down(index);
            }
        }
    }

    /// Where the peer's session comes from, if that is another address than this one. A machine that has changed its
    /// address says nothing by the old one any more: its session is lost soon.
    fn other_address_of(&mut self, index: usize, from: IpAddr) -> Option<IpAddr> {
        let remote = self.peers[index].session()?.transport.remote().ok()?;
        (remote != from).then_some(remote)
    }

    /// A session that the other side began. It replaces one that we believe is there: the other side knows better.
    pub(crate) fn admit(&mut self, incoming: Incoming, hello: &Hello) {
        let index = match self.peer_of(&incoming, hello) {
            Ok(index) if !self.peers[index].dials => index,
            Ok(_) => {
                let name = &self.config.name;
                let why = format!("it should not dial but be dialled: does it call this agent \"{name}\"?");
                return self.refuse_because(incoming, Reason::NotAllowed, &why);
            }
            Err(why) => return self.refuse_because(incoming, Reason::NotAllowed, &why),
        };
        if let Some(other) = self.other_address_of(index, incoming.from) {
            let (name, from) = (&self.peers[index].name, incoming.from);
            let why = format!(
                "two machines use the certificate of \"{name}\": {other}, which has its session, and {from}; is one a clone \
                 of the other? give each a name and a certificate of its own"
            );
            return self.refuse_because(incoming, Reason::NotAllowed, &why);
        }
        if self.peers[index].is_up() {
            self.lose_peer(index, "the peer began a new session");
        }
        let mut transport = incoming.transport;
        let greeted = transport.local().and_then(|local| self.greet(index, local, transport.output()));
        if let Err(error) = greeted {
            return self.lose_peer(index, &error.to_string());
        }
        self.peers[index].link = Link::Opening(transport, self.now + PATIENCE);
        self.mark_unsent(index);
        match self.begin_session(index, hello) {
            // What came with the HELLO wakes nobody again.
            Ok(()) => self.on_peer(index),
            Err(error) => self.lose_peer(index, &error.to_string()),
        }
    }

    /// Sends what this turn collected, one write per peer.
    pub(crate) fn flush_peers(&mut self) {
        for index in std::mem::take(&mut self.unsent) {
            let now = self.now;
            let Some(session) = self.peers[index].session() else {
                continue;
            };
            // A peer is marked also where it was only listened to.
            if !session.transport.output().is_empty() {
                session.told = now;
            }
            match session.transport.flush() {
                Ok(all) if all == session.blocked => {
                    session.blocked = !all;
                    let interest = if all { Interest::Readable } else { Interest::Both };
                    let _ = self.poll.set(session.transport.descriptor(), Source::Peer(index), interest);
                }
                Ok(_) => {}
                Err(error) => self.lose_peer(index, &error.to_string()),
            }
        }
    }

    /// How a handoff ended, to whoever claimed it.
    pub(crate) fn tell_peer(&mut self, claimant: &Claimant, reason: Reason) {
        self.count_refusal(reason);
        let index = claimant.peer as usize;
        if let Some(session) = self.peers[index].session() {
            let &Claimant { worker, handoff, trace, .. } = claimant;
            let ended = Ended { worker: worker.into(), reason: (reason as u32).into(), handoff: handoff.into(), trace };
            ended.emit(session.transport.output());
            self.mark_unsent(index);
        }
    }
}

/// From the kernel's generator.
pub(crate) fn random_key() -> io::Result<[u8; 16]> {
    let mut key = [0; 16];
    let got = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    if got == key.len() { Ok(key) } else { Err(io::Error::other("getrandom gave too little")) }
}
