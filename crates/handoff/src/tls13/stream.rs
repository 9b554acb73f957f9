//! A payload as a stream of sealed records, sealed only as fast as the socket takes them.
//!
//! A few records are read from the file with one call, to the place where they are sealed, and given to the socket with
//! another. The part that the socket does not take is kept as ciphertext.
//!
//! Bytes of a file that has changed are never sealed. Bytes of a file that has grown are not sealed either, while
//! another backend may continue with the file's earlier state.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use shunt_wire::local::Reason;
use shunt_wire::tls::{MAX_CONTENT_BYTES, OVERHEAD_BYTES, Records, Suite};

use super::keys::{ContentType, HEADER_BYTES, Sealer};
use crate::payload::{Payload, reason_of};

/// Number of records that are sealed together. With more, they leave the processor's nearest caches before the kernel
/// copies them. With fewer, there are more system calls.
const RECORDS_AT_ONCE: usize = 4;
/// Number of bytes after which the agent turns to other work, even if the socket takes more.
const TURN_BYTES: u64 = 512 << 10;

/// Buffer in which records are sealed, one for all streams of a thread. Nothing leaves it unsealed.
#[derive(Debug)]
pub struct Workbench(Box<[u8]>);

impl Default for Workbench {
    fn default() -> Self {
        let each = usize::from(MAX_CONTENT_BYTES) + OVERHEAD_BYTES as usize;
        Self(vec![0; RECORDS_AT_ONCE * each].into_boxed_slice())
    }
}

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
    /// Most content of a record, in bytes: the limit that the client has asked for (RFC 8449, RFC 6066), or
    /// [`MAX_CONTENT_BYTES`].
    pub content_bytes: u16,
    /// Number of bytes on the wire, at the front of the first record, that are not to be sent.
    pub skip: u16,
}

/// The part of an encrypted payload that is left to send.
#[derive(Debug)]
pub struct SealedPayload {
    payload: Payload,
    records: Records,
    /// `None` once all records are sealed, because the keys are no longer needed.
    sealer: Option<Sealer>,
    /// Index of the next record to seal.
    next: u64,
    /// Number of bytes at the front of that record that are not to be sent: the client has them from another sender.
    skip: usize,
    /// Bytes that are sealed, and that the socket has not taken.
    waiting: Vec<u8>,
    /// Number of bytes on the wire that the kernel does not have yet.
    remaining: u64,
}

impl SealedPayload {
    /// Encrypts `payload`. The first `skip` bytes on the wire are left out: the client has these bytes of the first
    /// record from another sender.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for impossible keys and sizes.
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

    /// Number of bytes on the wire that the kernel does not have yet.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// The payload that is encrypted.
    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// The payload that is encrypted, to set its reader or give it what was read.
    pub fn payload_mut(&mut self) -> &mut Payload {
        &mut self.payload
    }

    /// See [`Payload::is_unchanged`].
    pub fn is_unchanged(&self) -> bool {
        self.payload.is_unchanged()
    }

    /// Gives the socket as many bytes as it takes. Returns `true` if it has all of them. Returns `false` if the socket
    /// is full, and after a fair share. Also `false` if the payload waits for a read or is withheld.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] if the file is shorter or newer than its header said, else the reason that the socket's
    /// error stands for.
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
                return Ok(false); // a read has to end first, or a digest has to be withdrawn
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

    /// Sends sealed bytes that the socket did not take before. Returns whether none are left.
    fn send_waiting(&mut self, socket: impl AsFd) -> Result<bool, Reason> {
        if self.waiting.is_empty() {
            return Ok(true);
        }
        let waiting = std::mem::take(&mut self.waiting);
        let taken = self.send_some(socket, &waiting)?;
        self.waiting = waiting;
        self.waiting.drain(..taken);
        if self.waiting.is_empty() {
            self.waiting = Vec::new(); // frees the memory: a stream may wait long for its next turn
        }
        Ok(self.waiting.is_empty())
    }

    /// Sends sealed bytes. Returns how many of them the socket took.
    fn send_some(&mut self, socket: impl AsFd, bytes: &[u8]) -> Result<usize, Reason> {
        let mut taken = 0;
        while taken < bytes.len() {
            // With MSG_MORE the kernel keeps back a short segment, because more bytes are about to come.
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

    /// Seals the next records. Returns how many bytes of the workbench they fill. `None`: their contents are not in
    /// memory, or are withheld ([`Payload::is_withheld`]).
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
        // Checked after the read and before anything is sealed. Another backend may have sealed the file's old bytes
        // under these record numbers, or will. And a sender may have waited long for its turn.
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

/// Returns the part of a record that is its content.
fn content(record: &mut [u8]) -> &mut [u8] {
    let end = record.len() - (OVERHEAD_BYTES as usize - HEADER_BYTES);
    &mut record[HEADER_BYTES..end]
}
