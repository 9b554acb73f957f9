//! A payload as a stream of sealed records, as much of it at a time as the socket takes.
//!
//! Some records are read from the file with one call, right to where they are sealed in place, and given to the socket
//! with another. What the socket leaves of them waits as ciphertext. Bytes of a file that has changed are never sealed, nor
//! those of one that has grown, while another backend may go on with the file that it was.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use shunt_wire::local::Reason;
use shunt_wire::tls::{MAX_CONTENT_BYTES, OVERHEAD_BYTES, Records, Suite};

use super::keys::{ContentType, HEADER_BYTES, Sealer};
use crate::payload::{Payload, reason_of};

/// Records that are sealed together. More of them leave the processor's nearest caches before the kernel copies them,
/// fewer cost more system calls.
const RECORDS_AT_ONCE: usize = 4;
/// After so many bytes the agent turns to others, though the socket takes more.
const TURN_BYTES: u64 = 512 << 10;

/// Where records are sealed: one for all streams of a thread. Nothing leaves it that is not sealed.
#[derive(Debug)]
pub struct Workbench(Box<[u8]>);

impl Default for Workbench {
    fn default() -> Self {
        let each = usize::from(MAX_CONTENT_BYTES) + OVERHEAD_BYTES as usize;
        Self(vec![0; RECORDS_AT_ONCE * each].into_boxed_slice())
    }
}

/// A generation's keys as they come with a claim.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Of the connection.
    pub suite: Suite,
    /// As long as the suite's.
    pub key: &'a [u8],
    /// See RFC 8446, 5.3.
    pub iv: &'a [u8; 12],
    /// Number of the first record.
    pub first_record: u64,
    /// Most content of a record in bytes: what the client has asked for (RFC 8449, RFC 6066), or
    /// [`MAX_CONTENT_BYTES`].
    pub content_bytes: u16,
    /// Bytes of the first record on the wire that are not to be sent.
    pub skip: u16,
}

/// What is left to send of a payload.
#[derive(Debug)]
pub struct SealedPayload {
    payload: Payload,
    records: Records,
    /// `None` once all is sealed: nobody needs the keys any more.
    sealer: Option<Sealer>,
    /// The next record to seal.
    next: u64,
    /// Bytes at the front of that record which are not to be sent: the client has them from another sender.
    skip: usize,
    /// Sealed, not taken by the socket.
    waiting: Vec<u8>,
    /// Bytes on the wire that the kernel does not have yet.
    remaining: u64,
}

impl SealedPayload {
    /// Encrypts `payload`, but for the first `skip` bytes on the wire: those of its first record that the client has
    /// from another sender.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for keys and sizes that cannot be.
    pub fn new(payload: Payload, generation: Generation<'_>) -> Result<Self, Reason> {
        let Generation { suite, key, iv, first_record, content_bytes, skip } = generation;
        let records = Records::of(payload.remaining(), content_bytes).ok_or(Reason::Malformed)?;
        let skip = usize::from(skip);
        if skip >= records.content_bytes(0) + OVERHEAD_BYTES as usize {
            return Err(Reason::Malformed);
        }
        let sealer = Sealer::new(suite, key, iv, first_record, records.count()).ok_or(Reason::Malformed)?;
        let (sealer, remaining) = (Some(sealer), records.wire_bytes() - skip as u64);
        Ok(Self { payload, records, sealer, next: 0, skip, waiting: Vec::new(), remaining })
    }

    /// Bytes on the wire that the kernel does not have yet.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// What is encrypted.
    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// The same, for what it reads.
    pub fn payload_mut(&mut self) -> &mut Payload {
        &mut self.payload
    }

    /// See [`Payload::is_unchanged`].
    pub fn is_unchanged(&self) -> bool {
        self.payload.is_unchanged()
    }

    /// Gives the socket what it takes: `true` when it has everything; `false` also where it would take more, after a
    /// fair share, or where its payload waits for a read or is withheld.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file is shorter or newer than its header said, else what the socket says.
    pub fn send_to(&mut self, socket: impl AsFd, workbench: &mut Workbench) -> Result<bool, Reason> {
        let enough = self.remaining.saturating_sub(TURN_BYTES);
        if !self.send_waiting(&socket)? {
            return Ok(false);
        }
        while self.next < self.records.count() {
            if self.remaining <= enough {
                return Ok(false);
            }
            let Some(sealed) = self.seal_some(&mut workbench.0)? else {
                return Ok(false); // a read has to end first, or a digest to be withdrawn
            };
            let skip = std::mem::take(&mut self.skip);
            let sealed = &workbench.0[skip..sealed];
            let taken = self.send_some(&socket, sealed)?;
            if taken < sealed.len() {
                self.waiting.extend_from_slice(&sealed[taken..]);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `true`: nothing waits any more.
    fn send_waiting(&mut self, socket: impl AsFd) -> Result<bool, Reason> {
        if self.waiting.is_empty() {
            return Ok(true);
        }
        let waiting = std::mem::take(&mut self.waiting);
        let taken = self.send_some(socket, &waiting)?;
        self.waiting = waiting;
        self.waiting.drain(..taken);
        if self.waiting.is_empty() {
            self.waiting = Vec::new(); // a stream may wait long for its next turn
        }
        Ok(self.waiting.is_empty())
    }

    /// How many bytes the socket took.
    fn send_some(&mut self, socket: impl AsFd, bytes: &[u8]) -> Result<usize, Reason> {
        let mut taken = 0;
        while taken < bytes.len() {
            // The kernel keeps a short segment back while more is about to come.
            let last = self.remaining == (bytes.len() - taken) as u64;
            let more = if last { SendFlags::empty() } else { SendFlags::MORE };
            match send(&socket, &bytes[taken..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT | more) {
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

    /// Seals the next records: how many bytes they have on the workbench. `None`: their contents are not in memory, or
    /// withheld ([`Payload::is_withheld`]).
    fn seal_some(&mut self, workbench: &mut [u8]) -> Result<Option<usize>, Reason> {
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
        if !self.payload.read_exactly(self.records.payload_offset(self.next), contents)? {
            return Ok(None);
        }
        // After the read, before anything is sealed: another backend may have sealed the file's old bytes under these
        // numbers, or will, and a sender may have waited long for its turn.
        if !self.is_unchanged() {
            return Err(Reason::FileChanged);
        }
        if self.payload.is_withheld() {
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

/// What of a record is its content.
fn content(record: &mut [u8]) -> &mut [u8] {
    let end = record.len() - (OVERHEAD_BYTES as usize - HEADER_BYTES);
    &mut record[HEADER_BYTES..end]
}
