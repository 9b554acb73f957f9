//! Fetches that other agents ask for: the payload of an offer of this machine, encrypted, on the connection that asked.

use std::time::Instant;

use shunt_handoff::payload::Payload;
use shunt_handoff::reading::{Done, Owner};
use shunt_wire::TraceId;
use shunt_wire::local::Reason;
use shunt_wire::peer;

use crate::agent::Agent;
use crate::fetches::{PATIENCE, PROGRESS};
use crate::incoming::Incoming;
use crate::poll::{Interest, Source};
use crate::transport::{Transport, TransportError};

/// Read from the file and encrypted at once.
const CHUNK_BYTES: usize = 32 << 10;
/// In one turn, so that a fast reader leaves time for everybody else.
const CHUNKS: usize = 8;

/// One of them.
pub(crate) struct FetchIn {
    transport: Transport,
    peer: usize,
    payload: Payload,
    trace: TraceId,
    deadline: Instant,
}

impl FetchIn {
    pub(crate) fn peer(&self) -> usize {
        self.peer
    }
}

/// How far a turn came.
enum Turn {
    Done,
    /// The reader takes no more now, or others are to have their turn.
    Later,
    /// The next bytes are not in memory, and are being read.
    Reading,
}

impl Agent {
    pub(crate) fn serve_fetch(&mut self, mut incoming: Incoming, fetch: &peer::Fetch) {
        self.counts.fetches_in += 1;
        match self.claim_for_fetch(&incoming, fetch) {
            Ok((peer, mut payload)) => {
                let transport = &mut incoming.transport;
                peer::Fetched { length: payload.remaining().into() }.emit(transport.output());
                let (transport, deadline) = (incoming.transport, self.now + PATIENCE);
                let entry = self.fetches_in.vacant_entry();
                let index = entry.key();
                payload.read_by(&self.reads, Owner::Fetch(index));
                entry.insert(FetchIn { transport, peer, payload, trace: fetch.trace, deadline });
                self.note_fetch(peer);
                self.on_fetch_in(index);
            }
            Err(reason) => {
                self.log_failed_fetch(reason, fetch.trace);
                self.count_refusal(reason);
                self.refuse_fetch(incoming, reason);
            }
        }
    }

    fn claim_for_fetch(&mut self, incoming: &Incoming, fetch: &peer::Fetch) -> Result<(usize, Payload), Reason> {
        let number = fetch.offer.get();
        let is_its = |peer: &crate::config::PeerConfig| incoming.transport.is_of(&peer.name);
        let peer = self.config.peers.iter().position(is_its).ok_or(Reason::UnknownOffer)?;
        self.allow_fetch()?;
        if !self.offers.contains(number) {
            self.drain_offers(number);
        }
        let payload = self.offers.claim(peer as u32, number, fetch.length.get(), fetch.tag)?;
        if payload.is_unchanged() { Ok((peer, payload)) } else { Err(Reason::FileChanged) }
    }

    pub(crate) fn on_fetch_in(&mut self, index: usize) {
        let Some(serving) = self.fetches_in.get_mut(index) else {
            return;
        };
        match serving.turn() {
            Ok(Turn::Done) => drop(self.fetches_in.remove(index)),
            // Its deadline is the disk's as well.
            Ok(Turn::Reading) => {}
            Ok(Turn::Later) => {
                serving.deadline = self.now + PROGRESS;
                let socket = serving.transport.descriptor();
                let _ = self.poll.set(socket, Source::FetchIn(index), Interest::WritableOnce);
            }
            Err(reason) => self.reset_fetch(index, reason),
        }
    }

    pub(crate) fn on_fetch_read(&mut self, index: usize, done: Done) {
        let Some(serving) = self.fetches_in.get_mut(index) else {
            return;
        };
        match serving.payload.take_read(done) {
            Ok(true) => self.on_fetch_in(index),
            Ok(false) => {}
            Err(reason) => self.reset_fetch(index, reason),
        }
    }

    /// Not an end: the reader must not take what it has for the whole.
    fn reset_fetch(&mut self, index: usize, reason: Reason) {
        let serving = self.fetches_in.remove(index);
        self.log_failed_fetch(reason, serving.trace);
        self.count_refusal(reason);
        serving.transport.reset();
    }

    pub(crate) fn tend_served(&mut self) {
        let now = self.now;
        let late = self.fetches_in.iter().filter(|(_, serving)| serving.deadline <= now).map(|(index, _)| index);
        for index in late.collect::<Vec<_>>() {
            self.reset_fetch(index, Reason::NoProgress);
        }
    }
}

impl FetchIn {
    fn turn(&mut self) -> Result<Turn, Reason> {
        for _ in 0..CHUNKS {
            if !self.transport.flush().map_err(reason_of)? {
                return Ok(Turn::Later);
            }
            if self.payload.remaining() == 0 {
                return self.finish();
            }
            let output = self.transport.output();
            let start = output.len();
            output.resize(start + CHUNK_BYTES, 0);
            let bytes = self.payload.read(&mut output[start..])?;
            output.truncate(start + bytes.unwrap_or(0));
            if bytes.is_none() {
                return Ok(Turn::Reading);
            }
        }
        Ok(Turn::Later)
    }

    fn finish(&mut self) -> Result<Turn, Reason> {
        Ok(if self.transport.finish().map_err(reason_of)? { Turn::Done } else { Turn::Later })
    }
}

fn reason_of(error: TransportError) -> Reason {
    match error {
        TransportError::Refused(reason) => reason,
        _ => Reason::ClientGone,
    }
}
