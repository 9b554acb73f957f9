//! Links: connections with other agents, one for each peer. The logic keeps the sessions on these links. A *session* is
//! the use of a link from the second HELLO until the link is lost. A *turn* is one pass of the event loop.

use std::io;

use shunt_logic::logic::Call;
use shunt_logic::peers::Opened;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Frame, Hello};

use super::Daemon;
use crate::os::poll::{Interest, Source};
use crate::os::random;
use crate::os::sender_addresses;
use crate::peers::arrived::Arrived;
use crate::peers::link::Link;
use shunt_transport::{Transport, TransportError};

/// Exporter label (RFC 8446, 7.5) of a key that both agents derive. By this key, the TCP handshakes between the two
/// machines' programs prove which machine they come from.
const HANDSHAKES: &[u8] = b"EXPORTER-shunt-handshakes";

impl Daemon {
    /// Connects to a peer.
    pub(crate) fn dial(&mut self, peer: usize) {
        if let Err(error) = self.connect(peer) {
            self.lose_peer(peer, &error.to_string());
        }
    }

    fn connect(&mut self, peer: usize) -> io::Result<()> {
        let config = &self.config.peers[peer];
        let tls = self.credentials.dial(&config.name).map_err(io::Error::other)?;
        let transport = Transport::connect(config.address, tls)?;
        self.poll.set(transport.descriptor(), Source::Peer(peer), Interest::Both)?;
        self.open(peer, transport)
    }

    /// Takes a connection as the peer's link, and has the logic send HELLO on this link.
    fn open(&mut self, peer: usize, transport: Transport) -> io::Result<()> {
        let mut opened = Opened { senders: Default::default(), key: random::key()? };
        if let Some(backend) = &self.config.backend {
            opened.senders = sender_addresses::find(backend, transport.local()?)?;
            if let Some(paths) = &mut self.kernel.paths {
                paths.note_addresses()?;
            }
        }
        self.links.insert(peer, Link::new(transport));
        self.event(|logic, call| logic.opened(peer, &opened, call));
        Ok(())
    }

    pub(crate) fn lose_peer(&mut self, peer: usize, why: &str) {
        self.event(|logic, call| logic.lose_peer(peer, why, call));
    }

    /// Reads a peer's link that is ready.
    pub(crate) fn on_peer(&mut self, peer: usize) {
        if let Err(error) = self.read_peer(peer) {
            self.logic.shared.counts.strangers += u64::from(matches!(error, TransportError::Tls(_)));
            self.lose_peer(peer, &error.to_string());
        }
    }

    fn read_peer(&mut self, peer: usize) -> Result<(), TransportError> {
        let Some(link) = self.links.get_mut(peer) else { return Ok(()) };
        if link.is_up {
            link.transport.fill()?;
        } else {
            link.transport.connected()?;
            link.transport.fill()?;
            let interest = if link.transport.flush()? { Interest::Readable } else { Interest::Both };
            self.poll.set(link.transport.descriptor(), Source::Peer(peer), interest)?;
        }
        // A frame may end the session, and the link with it.
        while let Some(link) = self.links.get_mut(peer) {
            let Some(frame) = link.transport.next_frame()? else { return self.flush_rest(peer) };
            self.on_frame(peer, &frame)?;
        }
        Ok(())
    }

    /// Sends the bytes that the peer's socket did not take before, and TLS's own messages.
    fn flush_rest(&mut self, peer: usize) -> Result<(), TransportError> {
        let Some(link) = self.links.get_mut(peer).filter(|link| link.is_up) else { return Ok(()) };
        let all = link.transport.flush()?;
        Ok(link.note_sent(peer, all, &self.poll)?)
    }

    fn on_frame(&mut self, peer: usize, frame: &Frame) -> Result<(), TransportError> {
        let is_up = self.links.get(peer).is_some_and(|link| link.is_up);
        match frame {
            Frame::Hello(hello) if !is_up => return self.begin_session(peer, hello),
            Frame::Refused(refused) if !is_up => {
                let reason = Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed);
                return Err(TransportError::RefusedBy(reason));
            }
            _ if !is_up => return Err(TransportError::Refused(Reason::Malformed)),
            _ => {}
        }
        self.read_missing_offer(frame);
        match frame {
            Frame::Claim(claim) => self.on_claim(peer, claim, None),
            Frame::ClaimParts(claim, parts) => self.on_claim(peer, claim, Some(parts)),
            frame => {
                self.event(|logic, call| logic.frame(peer, frame, call)).map_err(TransportError::Refused)?;
            }
        }
        Ok(())
    }

    fn begin_session(&mut self, peer: usize, hello: &Hello) -> Result<(), TransportError> {
        let link = self.links.get_mut(peer).ok_or(TransportError::Closed)?;
        self.poll.set(link.transport.descriptor(), Source::Peer(peer), Interest::Readable)?;
        let key = link.transport.export_key(HANDSHAKES)?;
        self.event(|logic, call| logic.hello(peer, hello, key, call)).map_err(TransportError::Refused)?;
        if let Some(link) = self.links.get_mut(peer) {
            link.is_up = true;
        }
        Ok(())
    }

    /// Begins a session with an agent that has connected and sent HELLO.
    pub(crate) fn admit(&mut self, arrived: Arrived, hello: &Hello) {
        let Self { logic, links, kernel, actions, now, .. } = self;
        let current = |peer| links.get(peer).and_then(|link: &Link| link.transport.remote().ok());
        let mut call = Call { now: *now, machine: kernel, actions };
        let admitted = logic.admit(hello, |name| arrived.transport.is_of(name), arrived.from, current, &mut call);
        self.act();
        let peer = match admitted {
            Ok(peer) => peer,
            Err(refused) => return self.refuse_because(arrived, refused.reason, &refused.why),
        };
        let transport = arrived.transport;
        let opened = self.poll.set(transport.descriptor(), Source::Peer(peer), Interest::Readable);
        let opened = opened.and_then(|()| self.open(peer, transport)).map_err(TransportError::from);
        match opened.and_then(|()| self.begin_session(peer, hello)) {
            // Frames that arrived together with HELLO are read already, and epoll does not report them any more.
            Ok(()) => self.on_peer(peer),
            Err(error) => self.lose_peer(peer, &error.to_string()),
        }
    }

    /// Ends each session that would be refused if it began now, with the present certificates. To be called when the
    /// certificates have changed.
    pub(crate) fn recheck_sessions(&mut self) {
        for peer in 0..self.config.peers.len() {
            let name = &self.config.peers[peer].name;
            let link = self.links.get(peer).filter(|link| link.is_up);
            let Some(Err(error)) = link.map(|link| link.transport.is_good_for(&self.credentials, name)) else {
                continue;
            };
            self.logic.shared.counts.strangers += 1;
            let why = format!("its certificate is no longer valid: {error}");
            self.event(|logic, call| logic.distrust(peer, &why, call));
        }
    }

    /// Ends the connections that have no session yet: accepted connections whose purpose is not known, and dialled
    /// ones. The other agents' certificates may have been checked by an old list of revoked certificates. The agents
    /// connect again for their sessions.
    pub(crate) fn drop_beginnings(&mut self) {
        let places: Vec<usize> = self.arrived.iter().map(|(place, _)| place).collect();
        for place in places {
            self.logic.incoming.remove(place);
            self.arrived.remove(place);
        }
        let dialled: Vec<usize> = self.links.iter().filter(|(_, link)| !link.is_up).map(|(peer, _)| peer).collect();
        for peer in dialled {
            self.lose_peer(peer, "the certificates were read again");
        }
    }

    /// Sends the frames that this turn has collected, with one write per peer.
    pub(crate) fn flush_peers(&mut self) {
        loop {
            let now = self.now;
            let Some((peer, frames)) = self.logic.shared.peers.next_unsent(now) else { return };
            let Some(link) = self.links.get_mut(peer) else {
                frames.fill(0); // they may hold keys
                frames.clear();
                continue;
            };
            let sent = link.transport.send(frames);
            let sent = sent.and_then(|all| Ok(link.note_sent(peer, all, &self.poll)?));
            if let Err(error) = sent {
                self.lose_peer(peer, &error.to_string());
            }
        }
    }

    /// Reads the links of silent peers once more, because this agent may have had no time to read their frames.
    pub(crate) fn listen_again(&mut self) {
        for peer in self.logic.silent_peers(self.now).collect::<Vec<_>>() {
            self.on_peer(peer);
        }
    }
}
