//! Payloads that are relayed after all: the frontend's agent connects to the backend's, and gives its server the
//! connection. A fetch has a connection of its own, so that a slow reader holds up nobody.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shunt_handoff::payload::Payload;
use shunt_wire::TraceId;
use shunt_wire::local::{Fetch, Fetched, Reason};
use shunt_wire::peer::{self, Frame, MAGIC, Refused, VERSION};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U16;

use crate::agent::Agent;
use crate::packets;
use crate::peers::Incoming;
use crate::poll::{Interest, Source};
use crate::transport::{Transport, TransportError};

/// How long a backend may take to answer a fetch.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a reader of a fetch may take nothing.
const FETCH_PROGRESS: Duration = Duration::from_secs(60);
const FETCHED_BYTES: usize = peer::HEADER_BYTES + size_of::<peer::Fetched>();
const MAX_FETCHES: usize = 4096;

/// A fetch that a server of this machine waits for.
pub(crate) struct FetchOut {
    transport: Transport,
    server: usize,
    fetch: u64,
    length: u64,
    trace: TraceId,
    deadline: Instant,
}

/// A fetch that this machine serves.
pub(crate) struct FetchIn {
    socket: OwnedFd,
    payload: Payload,
    trace: TraceId,
    deadline: Instant,
}

impl Agent {
    pub(crate) fn fetch(&mut self, server: usize, fetch: &Fetch) {
        self.counts.fetches_out += 1;
        if let Err(reason) = self.begin_fetch(server, fetch) {
            log_failure(reason, fetch.trace);
            self.tell_server(server, fetch.fetch, reason);
        }
    }

    fn begin_fetch(&mut self, server: usize, fetch: &Fetch) -> Result<(), Reason> {
        let peer = fetch.peer as usize;
        if self.board.epoch(peer) != Some(fetch.epoch) {
            return Err(Reason::PeerLost);
        }
        if self.fetches_out.len() >= MAX_FETCHES {
            return Err(Reason::Limit);
        }
        let mut transport = Transport::connect(self.peers[peer].address).map_err(|_| Reason::PeerLost)?;
        let request = peer::Fetch {
            magic: MAGIC,
            version: VERSION.into(),
            zero: U16::ZERO,
            offer: fetch.offer.into(),
            length: fetch.length.into(),
            tag: fetch.tag,
            trace: fetch.trace,
        };
        request.emit(transport.output());
        let entry = self.fetches_out.vacant_entry();
        self.poll
            .set(transport.descriptor(), Source::FetchOut(entry.key()), Interest::Both)
            .map_err(|_| Reason::Limit)?;
        let deadline = self.now + PATIENCE;
        let Fetch { fetch, length, trace, .. } = *fetch;
        entry.insert(FetchOut { transport, server, fetch, length, trace, deadline });
        Ok(())
    }

    pub(crate) fn on_fetch_out(&mut self, index: usize) {
        match self.read_fetch(index) {
            Ok(false) => {}
            Ok(true) => self.deliver_fetch(index),
            Err(reason) => self.fail_fetch(index, reason),
        }
    }

    /// Whether the payload follows now.
    fn read_fetch(&mut self, index: usize) -> Result<bool, Reason> {
        let Some(out) = self.fetches_out.get_mut(index) else {
            return Ok(false);
        };
        out.transport.connected().map_err(|_| Reason::PeerLost)?;
        let reason = |error| match error {
            TransportError::Refused(reason) => reason,
            _ => Reason::PeerLost,
        };
        if out.transport.flush().map_err(reason)? {
            let _ = self.poll.set(out.transport.descriptor(), Source::FetchOut(index), Interest::Readable);
        }
        // Only the answer is read here: the rest of the stream belongs to the server.
        match out.transport.fill_at_most(FETCHED_BYTES).and_then(|()| out.transport.next_frame()).map_err(reason)? {
            None => Ok(false),
            Some(Frame::Fetched(fetched)) if fetched.length.get() == out.length => Ok(true),
            Some(Frame::Refused(refused)) => {
                Err(Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed))
            }
            Some(_) => Err(Reason::Malformed),
        }
    }

    fn deliver_fetch(&mut self, index: usize) {
        let out = self.fetches_out.remove(index);
        self.poll.remove(out.transport.descriptor());
        let socket = out.transport.into_socket();
        let fetched = Fetched { header: Fetched::HEADER, fetch: out.fetch, length: out.length };
        let Some(server) = self.servers.get(out.server) else {
            return;
        };
        if !matches!(packets::send(&server.socket, fetched.as_bytes(), &[socket.as_fd()]), Ok(true)) {
            tracing::warn!("a server does not read what its agent tells it");
        }
    }

    fn fail_fetch(&mut self, index: usize, reason: Reason) {
        let out = self.fetches_out.remove(index);
        log_failure(reason, out.trace);
        self.tell_server(out.server, out.fetch, reason);
    }

    pub(crate) fn drop_fetches_of(&mut self, server: usize) {
        self.fetches_out.retain(|_, out| out.server != server);
    }

    pub(crate) fn serve_fetch(&mut self, incoming: Incoming, fetch: &peer::Fetch) {
        self.counts.fetches_in += 1;
        let number = fetch.offer.get();
        if !self.offers.contains(number) {
            self.drain_offers(number);
        }
        let mut claimed = Err(Reason::UnknownOffer);
        for peer in self.config.peers_at(incoming.from) {
            claimed = self.offers.claim(peer as u32, number, fetch.length.get(), fetch.tag);
            if claimed.is_ok() {
                break;
            }
        }
        let claimed = claimed.and_then(|payload| match payload.is_unchanged() {
            true if self.fetches_in.len() < MAX_FETCHES => Ok(payload),
            true => Err(Reason::Limit),
            false => Err(Reason::FileChanged),
        });
        let mut transport = incoming.transport;
        if let Err(reason) = &claimed {
            log_failure(*reason, fetch.trace);
            self.count_refusal(*reason);
        }
        match &claimed {
            Ok(payload) => peer::Fetched { length: payload.remaining().into() }.emit(transport.output()),
            Err(reason) => Refused { reason: (*reason as u32).into() }.emit(transport.output()),
        }
        let flushed = matches!(transport.flush(), Ok(true));
        if let (Ok(payload), true) = (claimed, flushed) {
            let socket = transport.into_socket();
            let deadline = self.now + PATIENCE;
            let index = self.fetches_in.insert(FetchIn { socket, payload, trace: fetch.trace, deadline });
            self.on_fetch_in(index);
        }
    }

    pub(crate) fn on_fetch_in(&mut self, index: usize) {
        let Some(serving) = self.fetches_in.get_mut(index) else {
            return;
        };
        match serving.payload.send_to(&serving.socket) {
            Ok(true) => drop(self.fetches_in.remove(index)),
            Ok(false) => {
                serving.deadline = self.now + FETCH_PROGRESS;
                let _ = self.poll.set(&serving.socket, Source::FetchIn(index), Interest::WritableOnce);
            }
            Err(reason) => {
                // A reset, not an end: the reader must not take what it has for the whole.
                let serving = self.fetches_in.remove(index);
                log_failure(reason, serving.trace);
                self.count_refusal(reason);
                let _ = rustix::net::sockopt::set_socket_linger(&serving.socket, Some(Duration::ZERO));
            }
        }
    }

    pub(crate) fn tend_fetches(&mut self) {
        let now = self.now;
        let late = self.fetches_out.iter().filter(|(_, out)| out.deadline <= now).map(|(index, _)| index);
        for index in late.collect::<Vec<_>>() {
            self.fail_fetch(index, Reason::NoProgress);
        }
        self.fetches_in.retain(|_, serving| serving.deadline > now);
    }
}

fn log_failure(reason: Reason, trace: TraceId) {
    tracing::warn!(%reason, trace = trace.known().map(display), "a fetch failed");
}
