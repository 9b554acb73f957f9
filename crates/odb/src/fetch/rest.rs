//! The rest of an answer that a store is sending, and the caller for which it is kept. The answer brings bytes of one
//! payload. A *reference* names bytes of a payload. A *caller* is a program's call that needs payload bytes. A caller
//! that is *sent away* ends without bytes, and the program tries again later.

use std::io;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use crate::reference::{PayloadId, Reference};
use crate::store::messages::Answer;

/// Time for which a partly received answer is kept for the caller that asked for it. The time counts from the caller's
/// last call for some of the answer. Meanwhile other callers are sent away. Otherwise each of them would wait for a
/// while, and throw away the bytes that come. A program with many clients would then do nothing else, and no client
/// would get anything.
const KEPT: Duration = Duration::from_millis(400);

/// Head of an answer, which precedes its bytes.
#[derive(Debug, Default)]
struct Head {
    bytes: [u8; size_of::<Answer>()],
    come: usize,
}

/// Part of an answer that is still to come.
#[derive(Debug)]
pub(super) struct Rest {
    /// Head of the answer, while it is not complete.
    head: Option<Head>,
    /// Number of payload bytes that are still to come behind the head, if the payload still exists.
    bytes: usize,
    /// Payload of the answer, and the offset of the next byte in it. `None`: no caller wants the answer.
    of: Option<(PayloadId, u64)>,
    /// Time at which a caller last came for some of the answer.
    since: Instant,
}

impl Rest {
    /// State while no answer is under way.
    pub(super) fn none() -> Self {
        Self { head: None, bytes: 0, of: None, since: Instant::now() }
    }

    /// State after this reference has been asked for.
    pub(super) fn of(asked: &Reference) -> Self {
        let of = Some((asked.payload, asked.offset));
        Self { head: Some(Head::default()), bytes: asked.length as usize, of, since: Instant::now() }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.head.is_some() || self.bytes > 0
    }

    /// Whether the next byte to come is the first byte of `wanted`.
    pub(super) fn is_of(&self, wanted: &Reference) -> bool {
        self.of == Some((wanted.payload, wanted.offset))
    }

    /// Whether `wanted` begins at most a page before the next byte to come. The caller may have memory that is no block
    /// of the library's allocator. Then the caller can use only whole pages, and asks for the bytes of an incomplete
    /// page again.
    pub(super) fn is_of_before(&self, wanted: &Reference) -> bool {
        const PAGE: u64 = 4096;
        self.of.is_some_and(|(payload, at)| {
            payload == wanted.payload && (at.saturating_sub(PAGE)..at).contains(&wanted.offset)
        })
    }

    /// Whether the answer is still kept for the caller that asked for it.
    pub(super) fn is_kept(&self) -> bool {
        self.of.is_some() && self.since.elapsed() < KEPT
    }

    /// Notes that no caller wants the answer any more.
    pub(super) fn is_nobodys(&mut self) {
        self.of = None;
    }

    /// Buffer for the missing bytes of the head; `None` if the head is complete.
    pub(super) fn head(&mut self) -> Option<&mut [u8]> {
        self.head.as_mut().map(|head| &mut head.bytes[head.come..])
    }

    /// Notes that `bytes` of the head have come. Returns whether the payload exists; `None`: that is not known yet.
    ///
    /// # Errors
    /// The head belongs to another answer.
    pub(super) fn head_came(&mut self, bytes: usize) -> io::Result<Option<bool>> {
        self.since = Instant::now();
        let Some(head) = &mut self.head else { return Ok(Some(true)) };
        head.come += bytes;
        if head.come < head.bytes.len() {
            return Ok(None);
        }
        let is_there = is_there(&head.bytes, self.bytes as u64)?;
        self.head = None;
        if !is_there {
            self.bytes = 0;
        }
        Ok(Some(is_there))
    }

    /// Number of payload bytes that are still to come.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Notes that `bytes` payload bytes have come for the caller.
    pub(super) fn came(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.since = Instant::now();
        self.of = self.of.map(|(payload, at)| (payload, at + bytes as u64));
    }
}

/// Whether payload bytes follow this head, as many as were asked for. False: the payload is gone.
///
/// # Errors
/// The head belongs to an answer to another question.
fn is_there(head: &[u8], asked: u64) -> io::Result<bool> {
    let answer = Answer::read_from_bytes(head).map_err(|_| io::ErrorKind::InvalidData)?;
    match (answer.found.get(), answer.length.get()) {
        (0, 0) => Ok(false),
        (1, length) if length == asked => Ok(true),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer does not match the request")),
    }
}
