//! An answer that is under way while nobody waits for it, and whose it is.

use std::io;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use crate::reference::{PayloadId, Reference};
use crate::store::messages::Answer;

/// It is so long for who has asked for it, since that one came for some of it last. Others are sent away meanwhile: if each waited for a
/// while, and threw away what comes, a program with many clients would do nothing else, and none get anything.
const KEPT: Duration = Duration::from_millis(400);

/// The head of an answer, which goes before its bytes.
#[derive(Debug, Default)]
struct Head {
    bytes: [u8; size_of::<Answer>()],
    come: usize,
}

/// The part of an answer that is to come.
#[derive(Debug)]
pub(super) struct Rest {
    /// As long as not all of it is there.
    head: Option<Head>,
    /// How many follow, if the payload is not gone.
    bytes: usize,
    /// The payload that it is of, and the place of its first byte there. `None`: nobody has a use for it.
    of: Option<(PayloadId, u64)>,
    /// When somebody came for it last.
    since: Instant,
}

impl Rest {
    /// Nothing is under way.
    pub(super) fn none() -> Self {
        Self { head: None, bytes: 0, of: None, since: Instant::now() }
    }

    /// This has just been asked for.
    pub(super) fn of(asked: &Reference) -> Self {
        let of = Some((asked.payload, asked.offset));
        Self { head: Some(Head::default()), bytes: asked.length as usize, of, since: Instant::now() }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.head.is_some() || self.bytes > 0
    }

    /// Whether what comes next is the first byte of that.
    pub(super) fn is_of(&self, wanted: &Reference) -> bool {
        self.of == Some((wanted.payload, wanted.offset))
    }

    /// Whether that begins a little before: of memory that is no block, whole pages alone can be used.
    pub(super) fn is_of_before(&self, wanted: &Reference) -> bool {
        const PAGE: u64 = 4096;
        self.of.is_some_and(|(payload, at)| {
            payload == wanted.payload && (at.saturating_sub(PAGE)..at).contains(&wanted.offset)
        })
    }

    /// Whether somebody may come for it yet.
    pub(super) fn is_kept(&self) -> bool {
        self.of.is_some() && self.since.elapsed() < KEPT
    }

    /// Nobody has a use for it any more.
    pub(super) fn is_nobodys(&mut self) {
        self.of = None;
    }

    /// Where what is to come of its head goes.
    pub(super) fn head(&mut self) -> Option<&mut [u8]> {
        self.head.as_mut().map(|head| &mut head.bytes[head.come..])
    }

    /// So much of it came: whether the payload is there; `None`: that is not known yet.
    ///
    /// # Errors
    /// It is another answer.
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

    /// How many bytes follow.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many have come, for whom it is.
    pub(super) fn came(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.since = Instant::now();
        self.of = self.of.map(|(payload, at)| (payload, at + bytes as u64));
    }
}

/// Whether bytes follow, as many as were asked for. False: the payload is gone.
///
/// # Errors
/// It is the answer to something else.
fn is_there(head: &[u8], asked: u64) -> io::Result<bool> {
    let answer = Answer::read_from_bytes(head).map_err(|_| io::ErrorKind::InvalidData)?;
    match (answer.found.get(), answer.length.get()) {
        (0, 0) => Ok(false),
        (1, length) if length == asked => Ok(true),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store answered what was not asked")),
    }
}
