//! A payload as a stream of sealed records, sealed only as fast as the flow takes them. A *flow* is the client
//! connection that the records are sent on, and the *sender* its socket on this machine. A *claim* is the frontend's
//! message that asks for the payload. A *generation* is the write keys between two KeyUpdates. A file's *digest* is its
//! SHA-256. A digest that the frontend has been told is *withdrawn* when the file changes.
//!
//! The contents of a few records are read from the file with one call, to the place where they are sealed. Another call
//! gives the records to the socket. The part that the socket does not take is kept as ciphertext.
//!
//! Bytes of a file that has changed are never sealed. Bytes of a file that has grown are not sealed either, while
//! another backend may continue with the file's earlier state.

use rustix::io::Errno;
use shunt_wire::local::Reason;
use shunt_wire::tls::{OVERHEAD_BYTES, Records, Suite};

use super::keys::{ContentType, HEADER_BYTES, Sealer};
use super::workbench::{RECORDS_AT_ONCE, Workbench};
use crate::flow_sender::FlowSender;
use crate::framing::Framing;
use crate::payload::{Payload, reason_of};

/// Number of bytes after which the agent turns to other work, even if the socket takes more.
const TURN_BYTES: u64 = 512 << 10;

/// Keys of one generation, as they come with a claim.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Cipher suite of the connection.
    pub suite: Suite,
    /// Key, of the length that the suite has.
    pub key: &'a [u8],
    /// IV of the generation (RFC 8446, 5.3).
    pub iv: &'a [u8; 12],
    /// Number of the first record.
    pub first_record: u64,
    /// Largest content of a record, in bytes: the limit that the client has asked for (RFC 8449, RFC 6066), or
    /// [`MAX_CONTENT_BYTES`](shunt_wire::tls::MAX_CONTENT_BYTES).
    pub content_bytes: u16,
    /// Number of bytes on the wire, at the front of the first record, that are not to be sent: the client has them from
    /// another sender.
    pub skip: u16,
}

/// The records of a payload that are left to send.
#[derive(Debug)]
pub struct Sealed {
    records: Records,
    /// `None` once all records are sealed, because the keys are no longer needed.
    sealer: Option<Sealer>,
    /// Index of the next record to seal.
    next: u64,
    /// Number of bytes at the front of that record that are not to be sent: the client has them from another sender.
    skip: usize,
    /// Bytes that are sealed, and that the flow has not taken.
    waiting: Vec<u8>,
    /// Number of bytes on the wire that the flow does not have yet.
    remaining: u64,
}

impl Sealed {
    /// Makes the records of a payload of `length` bytes. The first `skip` bytes on the wire are left out: the client
    /// has these bytes of the first record from another sender.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for keys, record numbers or sizes that TLS 1.3 does not allow.
    pub fn new(length: u64, generation: Generation<'_>) -> Result<Self, Reason> {
        let Generation { suite, key, iv, first_record, content_bytes, skip } = generation;
        let records = Records::of(length, content_bytes).ok_or(Reason::Malformed)?;
        let skip = usize::from(skip);
        if skip >= records.content_bytes(0) + OVERHEAD_BYTES as usize {
            return Err(Reason::Malformed);
        }
        let sealer = Sealer::new(suite, key, iv, first_record, records.count()).ok_or(Reason::Malformed)?;
        let (sealer, remaining) = (Some(sealer), records.wire_bytes() - skip as u64);
        Ok(Self { records, sealer, next: 0, skip, waiting: Vec::new(), remaining })
    }

    /// Sends sealed bytes that the flow did not take before. Returns whether none are left.
    fn send_waiting(&mut self, flow: &dyn FlowSender) -> Result<bool, Reason> {
        if self.waiting.is_empty() {
            return Ok(true);
        }
        let waiting = std::mem::take(&mut self.waiting);
        let taken = self.send_some(flow, &waiting)?;
        self.waiting = waiting;
        self.waiting.drain(..taken);
        if self.waiting.is_empty() {
            self.waiting = Vec::new(); // frees the memory: a stream may wait long for its next turn
        }
        Ok(self.waiting.is_empty())
    }

    /// Sends sealed bytes. Returns how many of them the flow took.
    fn send_some(&mut self, flow: &dyn FlowSender, bytes: &[u8]) -> Result<usize, Reason> {
        let mut taken = 0;
        while taken < bytes.len() {
            let is_last = self.remaining == (bytes.len() - taken) as u64;
            match flow.send(&bytes[taken..], !is_last) {
                Ok(some) => {
                    taken += some;
                    self.remaining -= some as u64;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(reason_of(errno)),
            }
        }
        Ok(taken)
    }

    /// Seals the next records. Returns how many bytes of the workbench they fill. `None`: their contents are not in
    /// memory, or are withheld ([`Payload::is_withheld`]).
    fn seal_some(&mut self, payload: &mut Payload, workbench: &mut [u8]) -> Result<Option<usize>, Reason> {
        let indices = self.next..(self.next + RECORDS_AT_ONCE as u64).min(self.records.count());
        let mut places = Vec::with_capacity(RECORDS_AT_ONCE);
        let (mut rest, mut sealed) = (workbench, 0);
        for index in indices.clone() {
            let (place, after) = rest.split_at_mut(self.records.content_bytes(index) + OVERHEAD_BYTES as usize);
            sealed += place.len();
            places.push(place);
            rest = after;
        }
        let contents = places.iter_mut().map(|place| content(place)).collect();
        if !payload.read_exactly(self.records.payload_offset(self.next), contents)? {
            return Ok(None);
        }
        // Checked after the read and before anything is sealed. Another backend may have sealed the file's old bytes
        // under these record numbers, or may do so later. And the file may have changed while this sender waited for
        // its turn.
        if !payload.is_unchanged() {
            return Err(Reason::FileChanged);
        }
        if payload.is_withheld() {
            return Ok(None);
        }
        let sealer = self.sealer.as_mut().expect("there are keys until all is sealed");
        places.into_iter().for_each(|place| sealer.seal(place, ContentType::ApplicationData));
        self.next = indices.end;
        if self.next == self.records.count() {
            self.sealer = None;
        }
        Ok(Some(sealed))
    }
}

impl Framing for Sealed {
    fn remaining(&self, _: &Payload) -> u64 {
        self.remaining
    }

    fn send_to(
        &mut self,
        payload: &mut Payload,
        flow: &dyn FlowSender,
        workbench: &mut Workbench,
    ) -> Result<bool, Reason> {
        let enough = self.remaining.saturating_sub(TURN_BYTES);
        if !self.send_waiting(flow)? {
            return Ok(false);
        }
        while self.next < self.records.count() {
            if self.remaining <= enough {
                return Ok(false);
            }
            let Some(sealed) = self.seal_some(payload, &mut workbench.0)? else {
                return Ok(false); // a read has to end first, or the frontend has to know that a digest is withdrawn
            };
            let skip = std::mem::take(&mut self.skip);
            let sealed = &workbench.0[skip..sealed];
            let taken = self.send_some(flow, sealed)?;
            if taken < sealed.len() {
                self.waiting.extend_from_slice(&sealed[taken..]);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn binds_content(&self) -> bool {
        true
    }
}

/// Returns the part of a record that is its content.
fn content(record: &mut [u8]) -> &mut [u8] {
    let end = record.len() - (OVERHEAD_BYTES as usize - HEADER_BYTES);
    &mut record[HEADER_BYTES..end]
}
