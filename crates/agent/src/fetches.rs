//! Payloads that are relayed after all: the frontend's agent connects to the backend's and passes what comes on to its
//! server. A fetch has a connection of its own, so that a slow reader holds up nobody.
//!
//! The server reads one end of a pair of sockets; the agent decrypts into the other. While the server takes nothing,
//! nothing is read from the backend: what waits here is what one read decrypts to.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use shunt_wire::TraceId;
use shunt_wire::local::{Fetch, Fetched, Reason};
use shunt_wire::peer::{self, Frame, Protocol};
use zerocopy::IntoBytes;

use crate::agent::Agent;
use crate::packets;
use crate::poll::{Interest, Source};
use crate::transport::{Transport, TransportError};

/// How long a backend may take to answer a fetch.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How long either end of a fetch may bring or take nothing.
pub(crate) const PROGRESS: Duration = Duration::from_secs(60);

/// A fetch of a server of this machine.
pub(crate) struct FetchOut {
    transport: Transport,
    peer: usize,
    stage: Stage,
    length: u64,
    trace: TraceId,
    deadline: Instant,
}

enum Stage {
    /// The server waits for FETCHED.
    Asked { server: usize, fetch: u64 },
    /// The server reads the other end of `reader`.
    Answered { reader: UnixStream, left: u64 },
}

impl FetchOut {
    pub(crate) fn peer(&self) -> usize {
        self.peer
    }
}

/// What a fetch waits for.
enum Wait {
    Backend,
    Reader,
    Nothing,
}

impl Agent {
    pub(crate) fn fetch(&mut self, server: usize, fetch: &Fetch) {
        self.counts.fetches_out += 1;
        if let Err(reason) = self.begin_fetch(server, fetch) {
            self.log_failed_fetch(reason, fetch.trace);
            self.tell_server(server, fetch.fetch, reason);
        }
    }

    fn begin_fetch(&mut self, server: usize, fetch: &Fetch) -> Result<(), Reason> {
        let peer = fetch.peer as usize;
        // Offers outlive sessions, and a fetch needs none.
        if !self.board.knows(peer) {
            return Err(Reason::PeerLost);
        }
        self.allow_fetch()?;
        let tls = self.credentials.dial(&self.peers[peer].name).map_err(|_| Reason::PeerLost)?;
        let mut transport = Transport::connect(self.peers[peer].address, tls).map_err(|_| Reason::PeerLost)?;
        let request = peer::Fetch {
            protocol: Protocol::OURS,
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
        let stage = Stage::Asked { server, fetch: fetch.fetch };
        let deadline = self.now + PATIENCE;
        entry.insert(FetchOut { transport, peer, stage, length: fetch.length, trace: fetch.trace, deadline });
        self.note_fetch(peer);
        Ok(())
    }

    /// The backend's connection is ready.
    pub(crate) fn on_fetch_out(&mut self, index: usize) {
        let Some(out) = self.fetches_out.get_mut(index) else {
            return;
        };
        let done = match out.stage {
            Stage::Asked { .. } => match self.read_answer(index) {
                Ok(true) => self.deliver_fetch(index),
                Ok(false) => Ok(()),
                Err(reason) => Err(reason),
            },
            Stage::Answered { .. } => match out.transport.fill() {
                Ok(()) => self.relay(index).map(drop),
                // What it sent before it closed is still to be passed on.
                Err(TransportError::Closed) => match self.relay(index) {
                    Ok(true) => Err(Reason::PeerLost),
                    other => other.map(drop),
                },
                Err(error) => Err(reason_of(&error)),
            },
        };
        if let Err(reason) = done {
            self.fail_fetch(index, reason);
        }
    }

    /// The server takes bytes again.
    pub(crate) fn on_fetch_reader(&mut self, index: usize) {
        if self.fetches_out.contains(index)
            && let Err(reason) = self.relay(index)
        {
            self.fail_fetch(index, reason);
        }
    }

    /// Whether the payload follows now.
    fn read_answer(&mut self, index: usize) -> Result<bool, Reason> {
        let FetchOut { transport, length, .. } = &mut self.fetches_out[index];
        transport.connected().map_err(|_| Reason::PeerLost)?;
        transport.fill().map_err(|error| reason_of(&error))?;
        let interest =
            if transport.flush().map_err(|error| reason_of(&error))? { Interest::Readable } else { Interest::Both };
        self.poll.set(transport.descriptor(), Source::FetchOut(index), interest).map_err(|_| Reason::Limit)?;
        match transport.next_frame().map_err(|error| reason_of(&error))? {
            None => Ok(false),
            Some(Frame::Fetched(fetched)) if fetched.length.get() == *length => Ok(true),
            Some(Frame::Refused(refused)) => {
                Err(Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed))
            }
            Some(_) => Err(Reason::Malformed),
        }
    }

    /// Gives the server its end, and begins to fill ours.
    fn deliver_fetch(&mut self, index: usize) -> Result<(), Reason> {
        let out = &mut self.fetches_out[index];
        let Stage::Asked { server, fetch } = out.stage else {
            return Ok(());
        };
        let (reader, theirs) = UnixStream::pair().map_err(|_| Reason::Limit)?;
        reader.set_nonblocking(true).map_err(|_| Reason::Limit)?;
        let fetched = Fetched { header: Fetched::HEADER, fetch, length: out.length };
        let server = self.servers.get(server).ok_or(Reason::PeerLost)?;
        if !matches!(packets::send(&server.socket, fetched.as_bytes(), &[theirs.as_fd()]), Ok(true)) {
            return Err(Reason::Limit);
        }
        out.stage = Stage::Answered { reader, left: out.length };
        self.relay(index).map(drop)
    }

    /// Passes on what is there, until the backend has no more now (`true`), or the server takes no more.
    fn relay(&mut self, index: usize) -> Result<bool, Reason> {
        let out = &mut self.fetches_out[index];
        let (wait, moved) = out.relay()?;
        if moved {
            out.deadline = self.now + PROGRESS;
        }
        let (backend, source) = (out.transport.descriptor(), Source::FetchOut(index));
        let Stage::Answered { reader, .. } = &out.stage else {
            return Ok(false);
        };
        let for_backend = matches!(wait, Wait::Backend);
        let watched = match wait {
            Wait::Backend => self.poll.set(backend, source, Interest::Readable),
            Wait::Reader => {
                self.poll.remove(backend);
                self.poll.set(reader, Source::FetchReader(index), Interest::WritableOnce)
            }
            Wait::Nothing => {
                self.fetches_out.remove(index);
                Ok(())
            }
        };
        watched.map(|()| for_backend).map_err(|_| Reason::Limit)
    }

    pub(crate) fn log_failed_fetch(&mut self, reason: Reason, trace: TraceId) {
        if self.failures.may_speak(self.now) {
            tracing::warn!(%reason, trace = trace.known().map(display), "a fetch failed");
        }
    }

    /// A server that has its end already sees that end early, which it does not take for the whole.
    fn fail_fetch(&mut self, index: usize, reason: Reason) {
        let out = self.fetches_out.remove(index);
        self.log_failed_fetch(reason, out.trace);
        match out.stage {
            Stage::Asked { server, fetch } => self.tell_server(server, fetch, reason),
            Stage::Answered { .. } => self.count_refusal(reason),
        }
    }

    pub(crate) fn drop_fetches_of(&mut self, gone: usize) {
        self.fetches_out.retain(|_, out| !matches!(out.stage, Stage::Asked { server, .. } if server == gone));
    }

    pub(crate) fn tend_fetches(&mut self) {
        let now = self.now;
        let late = self.fetches_out.iter().filter(|(_, out)| out.deadline <= now).map(|(index, _)| index);
        for index in late.collect::<Vec<_>>() {
            self.fail_fetch(index, Reason::NoProgress);
        }
    }

    /// A response waits for it, so that limits are no reason: they end consents and offers instead (limits.rs).
    pub(crate) fn allow_fetch(&mut self) -> Result<(), Reason> {
        let has = self.has_descriptors();
        self.counts.fetches_limited += u64::from(!has);
        if has { Ok(()) } else { Err(Reason::Limit) }
    }
}

impl FetchOut {
    /// What to wait for, and whether bytes were moved.
    fn relay(&mut self) -> Result<(Wait, bool), Reason> {
        let Stage::Answered { reader, left } = &mut self.stage else {
            return Ok((Wait::Backend, false));
        };
        let before = *left;
        while *left > 0 {
            let bytes = self.transport.payload().map_err(|error| reason_of(&error))?;
            let most = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
            if most == 0 {
                return Ok((Wait::Backend, *left < before));
            }
            match reader.write(&bytes[..most]) {
                Ok(written) => {
                    self.transport.consume(written);
                    *left -= written as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Ok((Wait::Reader, *left < before));
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Reason::ClientGone),
            }
        }
        Ok((Wait::Nothing, true))
    }
}

fn reason_of(error: &TransportError) -> Reason {
    match error {
        TransportError::Refused(reason) => *reason,
        _ => Reason::PeerLost,
    }
}
