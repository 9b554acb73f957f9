//! Fetches of this machine's servers: connections to backends, and socket pairs with the servers. A *fetch* brings a
//! payload through both agents to the frontend's server.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use shunt_wire::local::{Fetched, Reason};
use shunt_wire::peer::Fetch;
use zerocopy::IntoBytes;

use super::Daemon;
use crate::frontend::fetching::{Fetching, Wait, reason_of};
use crate::os::poll::{Interest, Source};
use shunt_host::packets;
use shunt_transport::{Transport, TransportError};

impl Daemon {
    /// Connects to a backend for a fetch.
    pub(crate) fn begin_fetch(&mut self, fetch: usize, peer: usize, request: &Fetch) {
        if let Err(reason) = self.connect_fetch(fetch, peer, request) {
            self.event(|logic, call| logic.fetch_failed(fetch, reason, call));
        }
    }

    fn connect_fetch(&mut self, fetch: usize, peer: usize, request: &Fetch) -> Result<(), Reason> {
        let peer = &self.config.peers[peer];
        let tls = self.credentials.dial(&peer.name).map_err(|_| Reason::PeerLost)?;
        let mut transport = Transport::connect(peer.address, tls).map_err(|_| Reason::PeerLost)?;
        request.emit(transport.output());
        let watched = self.poll.set(transport.descriptor(), Source::FetchOut(fetch), Interest::Both);
        watched.map_err(|_| Reason::Limit)?;
        self.fetches_out.insert(fetch, Fetching { transport, reader: None });
        Ok(())
    }

    /// Handles a backend's connection that is ready.
    pub(crate) fn on_fetch_out(&mut self, fetch: usize) {
        let Some(fetching) = self.fetches_out.get_mut(fetch) else { return };
        if fetching.reader.is_none() {
            return self.read_answer(fetch);
        }
        let passed_on = match fetching.transport.fill() {
            Ok(()) => self.relay(fetch).map(drop),
            // The bytes that the backend sent before it closed are still to be passed on.
            Err(TransportError::Closed) => match self.relay(fetch) {
                Ok(true) => Err(Reason::PeerLost),
                other => other.map(drop),
            },
            Err(error) => Err(reason_of(&error)),
        };
        self.fail_fetch(fetch, passed_on);
    }

    /// Goes on with a fetch whose server takes bytes again.
    pub(crate) fn on_fetch_reader(&mut self, fetch: usize) {
        if self.fetches_out.get(fetch).is_some() {
            let passed_on = self.relay(fetch).map(drop);
            self.fail_fetch(fetch, passed_on);
        }
    }

    fn fail_fetch(&mut self, fetch: usize, outcome: Result<(), Reason>) {
        if let Err(reason) = outcome {
            self.event(|logic, call| logic.fetch_failed(fetch, reason, call));
        }
    }

    fn read_answer(&mut self, fetch: usize) {
        let Some(Fetching { transport, .. }) = self.fetches_out.get_mut(fetch) else { return };
        let mut read = || -> Result<_, TransportError> {
            transport.connected()?;
            transport.fill()?;
            let interest = if transport.flush()? { Interest::Readable } else { Interest::Both };
            self.poll.set(transport.descriptor(), Source::FetchOut(fetch), interest)?;
            transport.next_frame()
        };
        match read() {
            Ok(None) => {}
            Ok(Some(frame)) => self.event(|logic, call| logic.fetch_answered(fetch, &frame, call)),
            Err(error) => self.fail_fetch(fetch, Err(reason_of(&error))),
        }
    }

    /// Gives the server its end of a socket pair, and begins to write the payload into this agent's end.
    pub(crate) fn deliver_fetch(&mut self, fetch: usize, server: usize, message: &Fetched) {
        if let Err(reason) = self.hand_over(fetch, server, message) {
            self.event(|logic, call| logic.fetch_undelivered(fetch, server, message.fetch, reason, call));
            return;
        }
        let passed_on = self.relay(fetch).map(drop);
        self.fail_fetch(fetch, passed_on);
    }

    fn hand_over(&mut self, fetch: usize, server: usize, message: &Fetched) -> Result<(), Reason> {
        let fetching = self.fetches_out.get_mut(fetch).ok_or(Reason::PeerLost)?;
        let (reader, theirs) = UnixStream::pair().map_err(|_| Reason::Limit)?;
        reader.set_nonblocking(true).map_err(|_| Reason::Limit)?;
        let server = self.connections.get(server).ok_or(Reason::PeerLost)?;
        if !matches!(packets::send(&server.socket, message.as_bytes(), &[theirs.as_fd()]), Ok(true)) {
            return Err(Reason::Limit);
        }
        fetching.reader = Some((reader, message.length));
        Ok(())
    }

    /// Passes on the bytes that have arrived, until there are no more for now or the server takes no more. Returns true
    /// if the payload is not complete, and more bytes have to come from the backend.
    fn relay(&mut self, fetch: usize) -> Result<bool, Reason> {
        let Some(fetching) = self.fetches_out.get_mut(fetch) else { return Ok(false) };
        let (wait, has_moved) = fetching.relay()?;
        let (backend, source) = (fetching.transport.descriptor(), Source::FetchOut(fetch));
        let Some((reader, _)) = &fetching.reader else { return Ok(false) };
        let watched = match wait {
            Wait::Backend => self.poll.set(backend, source, Interest::Readable),
            Wait::Reader => {
                self.poll.remove(backend);
                self.poll.set(reader, Source::FetchReader(fetch), Interest::WritableOnce)
            }
            Wait::Nothing => {
                self.fetches_out.remove(fetch);
                Ok(())
            }
        };
        let is_done = matches!(wait, Wait::Nothing);
        if has_moved || is_done {
            self.event(|logic, call| logic.fetch_moved(fetch, is_done, call));
        }
        watched.map(|()| matches!(wait, Wait::Backend)).map_err(|_| Reason::Limit)
    }
}
