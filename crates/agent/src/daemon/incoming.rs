//! Connections that other agents make, for sessions, fetches, reads from the store and questions of `shunt doctor`
//! (EXAMINE). Each connection has a place in the logic's table until its first frame says its purpose. A *session* is
//! the two agents' lasting exchange of messages. A *fetch* brings one payload through both agents. The *store* has the
//! payloads of programs under `shunt run`.

use std::net::{IpAddr, SocketAddr, TcpStream};

use shunt_wire::local::Reason;
use shunt_wire::peer::Frame;

use super::Daemon;
use crate::os::poll::{Interest, Source};
use crate::peers::arrived::Arrived;
use shunt_transport::{Transport, TransportError};

impl Daemon {
    pub(crate) fn add_incoming(&mut self, stream: TcpStream, from: SocketAddr) {
        let from = from.ip().to_canonical();
        let is_stranger = !self.config.is_peers_address(from);
        let Some(place) = self.logic.incoming.add(from, is_stranger, self.now) else {
            self.logic.shared.counts.incoming_limit += 1;
            self.say_refused(from, "too many connections that have not said what they are");
            return;
        };
        let tls = self.credentials.accept().map_err(std::io::Error::other);
        let watched = tls.and_then(|tls| {
            let transport = Transport::accepted(stream, tls)?;
            self.poll.set(transport.descriptor(), Source::Incoming(place), Interest::Readable)?;
            Ok(transport)
        });
        match watched {
            Ok(transport) => self.arrived.insert(place, Arrived { transport, from }),
            Err(_) => self.logic.incoming.remove(place),
        }
    }

    /// Reads an accepted connection that is ready.
    pub(crate) fn on_incoming(&mut self, place: usize) {
        let read = self.read_incoming(place);
        if matches!(read, Ok(None)) {
            return;
        }
        self.logic.incoming.remove(place);
        let Some(arrived) = self.arrived.remove(place) else { return };
        match read {
            Ok(None) => {}
            Ok(Some(frame)) => self.on_first_frame(arrived, &frame),
            Err(TransportError::Refused(reason)) => self.refuse(arrived, reason),
            Err(error @ TransportError::Tls(_)) => {
                self.logic.shared.counts.strangers += 1;
                self.say_refused(arrived.from, &error.to_string());
            }
            Err(_) => {}
        }
    }

    fn on_first_frame(&mut self, arrived: Arrived, frame: &Frame) {
        self.read_missing_offer(frame);
        match frame {
            Frame::Hello(hello) => self.admit(arrived, hello),
            Frame::Fetch(fetch) => self.serve_fetch(arrived, fetch),
            Frame::Store(_) => self.serve_reader(arrived),
            Frame::Examine(examine) => self.examine(arrived, examine),
            _ => self.refuse(arrived, Reason::Malformed),
        }
    }

    fn read_incoming(&mut self, place: usize) -> Result<Option<Frame>, TransportError> {
        let Some(Arrived { transport, .. }) = self.arrived.get_mut(place) else { return Ok(None) };
        transport.fill()?;
        let frame = transport.next_frame()?;
        // This agent's part of the handshake fits into any socket's buffer. There is more to write only if the other
        // side takes nothing.
        let interest = if transport.flush()? { Interest::Readable } else { Interest::Both };
        self.poll.set(transport.descriptor(), Source::Incoming(place), interest)?;
        Ok(frame)
    }

    /// Refuses an agent that has a good certificate, and tells it the reason.
    pub(crate) fn refuse(&mut self, arrived: Arrived, reason: Reason) {
        self.refuse_because(arrived, reason, &reason.to_string());
    }

    /// Refuses an agent, for a reason whose full text `why` goes only into this agent's log.
    pub(crate) fn refuse_because(&mut self, arrived: Arrived, reason: Reason, why: &str) {
        self.logic.shared.counts.malformed_peer += 1;
        self.say_refused(arrived.from, why);
        arrived.refuse(reason);
    }

    fn say_refused(&mut self, from: IpAddr, why: &str) {
        self.logic.incoming.log_refusal(from, why, self.now);
    }

    /// Closes connections whose first frame has not arrived in time.
    pub(crate) fn tend_incoming(&mut self) {
        while let Some(place) = self.logic.incoming.remove_silent(self.now) {
            self.arrived.remove(place);
        }
    }
}
