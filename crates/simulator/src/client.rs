//! A client: a TCP receiver that knows which byte must arrive at each place of its stream. A *payload* is the body of a
//! response. A *handoff* lets a backend send it on the client's own connection. An *offer* is a payload that a
//! backend's server holds ready for that. A *region* is a range of sequence numbers of a client's connection, which one
//! payload takes. On a TLS connection, a region has the payload's TLS records.

use std::collections::BTreeMap;

use shunt_wire::Endpoint;

use crate::content::{Run, Source, Stream};

/// Receive window of a client, in bytes.
pub const WINDOW: u32 = 1 << 20;
/// Shift of the window fields of client and server (RFC 7323).
pub const WSCALE: u8 = 8;

/// The kind of program that serves a response at the frontend, and the place of the response's payload at the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// A server hands off a file of the backend, for which the backend has made an offer.
    #[default]
    File,
    /// Like [`Kind::File`], but on a TLS connection.
    Sealed,
    /// A program under `shunt run` hands off bytes of the backend's store.
    Stored,
}

/// One response that a client has asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Response {
    /// Number of the response in this history (simulated run).
    pub number: u64,
    /// Length of the header, in bytes.
    pub header: u64,
    /// Length of the payload, in bytes.
    pub length: u64,
    /// Number of the file that the payload is read from.
    pub file: u64,
    /// The kind of program that serves the response.
    pub kind: Kind,
    /// Number of bytes that the server writes after the payload.
    pub trailer: u64,
}

/// Number of content bytes in each TLS record of a payload except the last, and number of bytes that encryption adds to
/// each record.
pub const RECORD: u64 = 16384;
const OVERHEAD: u64 = shunt_wire::tls::OVERHEAD_BYTES;

impl Response {
    /// Returns the length of the payload as the client gets it: with TLS, the length of its records.
    pub fn region(&self) -> u64 {
        if self.kind == Kind::Sealed { self.length + self.length.div_ceil(RECORD) * OVERHEAD } else { self.length }
    }

    /// Returns the number of the record that has byte `from` of the region, and the number of bytes of that record
    /// before byte `from`.
    pub fn record_at(&self, from: u64) -> (u64, u64) {
        (from / (RECORD + OVERHEAD), from % (RECORD + OVERHEAD))
    }

    /// Returns the place in the region at which a record begins.
    pub fn record_begin(record: u64) -> u64 {
        record * (RECORD + OVERHEAD)
    }
}

/// A client and its connection.
pub struct Client {
    /// The client's end of the connection.
    pub at: Endpoint,
    /// Number of the machine that is the client's frontend.
    pub frontend: usize,
    /// Sequence number of the first byte of the stream that the client receives.
    pub first: u32,
    /// Contents that the stream must have, up to the end of the last response that the client has asked for.
    expected: Stream,
    /// Number of bytes that the client has from the stream's beginning on, without a hole.
    taken: u64,
    /// Runs of bytes that have arrived after a hole: the place of each run, and its length.
    beyond: BTreeMap<u64, u64>,
    /// The response that the client waits for, and the place in the stream where it ends.
    pub waits_for: Option<(Response, u64)>,
    /// Number of responses that the client has received.
    pub done: u64,
    /// Number of the client's present connection. Packets of earlier connections are dropped.
    pub connection: u32,
    /// The client's packets take a hundred times as long as those of other clients.
    pub is_slow: bool,
}

impl Client {
    /// Returns a client that has asked for nothing.
    pub fn new(at: Endpoint, frontend: usize, first: u32) -> Self {
        let (expected, beyond) = (Stream::default(), BTreeMap::new());
        let (connection, is_slow) = (0, false);
        Self { at, frontend, first, expected, taken: 0, beyond, waits_for: None, done: 0, connection, is_slow }
    }

    /// Begins a new connection from the same port, because the last one was reset. The client then waits for nothing.
    pub fn reconnect(&mut self, first: u32) {
        let Self { at, frontend, done, connection, is_slow, .. } = *self;
        *self = Self { done, connection: connection + 1, is_slow, ..Self::new(at, frontend, first) };
    }

    /// Asks for a response, which follows the last one in the stream.
    pub fn ask(&mut self, response: Response) {
        let Response { number, header, file, trailer, .. } = response;
        self.expected.forget(self.taken);
        self.expected.push(Run { source: Source::Header(number), from: 0, length: header });
        self.expected.push(Run { source: Source::File(file), from: 0, length: response.region() });
        self.expected.push(Run { source: Source::Header(number), from: header, length: trailer });
        self.waits_for = Some((response, self.expected.end()));
    }

    /// Returns the number of bytes that the client has from the stream's beginning on, without a hole.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Returns the sequence number that the client acknowledges.
    pub fn ack(&self) -> u32 {
        self.first.wrapping_add(self.taken as u32)
    }

    /// Returns the place in the stream of a sequence number, which must be less than 2^31 from the acknowledged one.
    /// `None`: it is before the stream's first byte.
    pub fn place(&self, seq: u32) -> Option<u64> {
        let ahead = seq.wrapping_sub(self.ack()).cast_signed();
        self.taken.checked_add_signed(ahead.into())
    }

    /// Receives a segment.
    ///
    /// # Errors
    /// Returns a description if a byte is not the one that must be at its place.
    pub fn take(&mut self, seq: u32, run: Run) -> Result<(), String> {
        let Some(place) = self.place(seq) else { return Ok(()) }; // the segment is from before the stream's first byte
        // Bytes that the client already has are not compared again.
        let skip = self.taken.saturating_sub(place).min(run.length);
        let (mut at, mut rest) = (place + skip, run.part(skip, run.length - skip));
        while rest.length > 0 {
            let Some(expected) = self.expected.at(at) else {
                return Err(format!("bytes of {:?} at {at}, which nobody has asked for", rest.source));
            };
            let length = rest.length.min(expected.length);
            if (rest.source, rest.from) != (expected.source, expected.from) {
                return Err(format!("at {at} byte {} of {:?} in place of {expected:?}", rest.from, rest.source));
            }
            self.note(at, length);
            at += length;
            rest = rest.part(length, rest.length - length);
        }
        Ok(())
    }

    fn note(&mut self, at: u64, length: u64) {
        let known = self.beyond.entry(at).or_default();
        *known = (*known).max(length);
        while let Some((&at, &length)) = self.beyond.first_key_value() {
            if at > self.taken {
                return;
            }
            self.taken = self.taken.max(at + length);
            self.beyond.pop_first();
        }
    }

    /// Returns whether the client has received the whole response that it waits for. It then waits no longer.
    pub fn is_served(&mut self) -> bool {
        let is_whole = self.waits_for.is_some_and(|(_, end)| self.taken >= end);
        if is_whole {
            self.waits_for = None;
            self.done += 1;
        }
        is_whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asking() -> Client {
        let at = "198.51.100.1:4000".parse::<std::net::SocketAddr>().unwrap().into();
        let mut client = Client::new(at, 0, u32::MAX - 3);
        client.ask(Response { number: 1, header: 10, length: 100, file: 9, ..Response::default() });
        client
    }

    fn file(from: u64, length: u64) -> Run {
        Run { source: Source::File(9), from, length }
    }

    #[test]
    fn segments_may_come_in_any_order_and_twice() {
        let mut client = asking();
        client.take(60u32.wrapping_add(u32::MAX - 3), file(50, 50)).unwrap();
        assert_eq!(client.taken(), 0);
        client.take(u32::MAX - 3, Run { source: Source::Header(1), from: 0, length: 10 }).unwrap();
        client.take(6, file(0, 50)).unwrap();
        assert!(client.taken() == 110 && client.is_served() && !client.is_served());
        client.take(6, file(0, 50)).unwrap();
        assert_eq!((client.taken(), client.ack()), (110, 106));
    }

    #[test]
    fn a_wrong_byte_is_noticed() {
        assert!(asking().take(6, file(1, 50)).is_err());
        assert!(asking().take(6, Run { source: Source::File(8), from: 0, length: 5 }).is_err());
        assert!(asking().take(106, file(100, 1)).is_err(), "behind the end");
    }
}
