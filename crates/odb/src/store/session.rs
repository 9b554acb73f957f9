//! A reader's connection at the store: its [`Request`]s, and for each FETCH, in order, an [`Answer`] and the bytes. The
//! bytes are copied from the segment, the memory that has them, directly to the place where they are *sealed*:
//! encrypted in TLS records. A *reader* is a program that has references to bytes of the store's payloads. Each
//! reference has a *share*, a part of the right to fetch the payload.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zerocopy::{FromZeros, IntoBytes};

use super::Store;
use super::messages::{Answer, FETCH, RETURN, Request};
use super::pinned::{Pinned, Shelf};
use crate::channel::{Bench, CONTENT_AT_ONCE, Channel};
use crate::place::Changed;
use crate::reference::Reference;
use crate::touched::Touched;

/// Most answers that wait for a slow reader. While there are as many, the reader's further requests wait in the socket.
pub(crate) const ANSWERS_MAX: usize = 32;
/// Bytes sent to one reader in a row, after which others have their turn.
const TURN_BYTES: usize = 512 << 10;
const REQUEST_BYTES: usize = size_of::<Request>();
const ANSWER_BYTES: usize = size_of::<Answer>();

/// Counters over all sessions, read by other threads.
#[derive(Debug, Default)]
pub struct Counters {
    /// Number of fetches.
    pub fetches: AtomicU64,
    /// Payload bytes that answers to readers have promised.
    pub fetched_bytes: AtomicU64,
    /// Fetches of payloads that were gone, or never existed.
    pub gone: AtomicU64,
    /// Shares given back.
    pub returned: AtomicU64,
    /// Programs and readers that were refused: not allowed, or too many.
    pub refused: AtomicU64,
    /// Requests for segments while there was no room.
    pub full: AtomicU64,
    /// Gauges: bytes of all segments, and numbers of payloads, segments, files, programs' connections and readers.
    pub bytes: AtomicU64,
    pub payloads: AtomicU64,
    pub segments: AtomicU64,
    pub files: AtomicU64,
    pub programs: AtomicU64,
    pub readers: AtomicU64,
}

impl Counters {
    /// Approximate number of the store's open descriptors.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        // A program counts for two: the store may also keep descriptors of that program's connections to other stores,
        // to end them.
        let all = [(&self.segments, 1), (&self.files, 1), (&self.programs, 2), (&self.readers, 1)];
        all.iter().map(|(counter, each)| each * counter.load(Ordering::Relaxed) as usize).sum()
    }

    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn full(&self) {
        self.full.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn publish(&self, store: &Store, readers: usize, programs: usize) {
        let now = [(&self.bytes, store.bytes()), (&self.segments, store.segments()), (&self.files, store.files())];
        let peers = [(&self.readers, readers), (&self.programs, programs), (&self.payloads, store.payloads())];
        now.iter().chain(&peers).for_each(|(counter, value)| counter.store(*value as u64, Ordering::Relaxed));
    }
}

struct Outgoing {
    answer: [u8; ANSWER_BYTES],
    /// Number of bytes sealed so far, of answer and payload bytes together.
    done: u64,
    /// Length of answer and payload bytes together.
    total: u64,
    bytes: Option<Pinned>,
}

impl Outgoing {
    /// Copies answer and payload bytes into `into`. `at` is the offset of the first one in the sequence of the answer
    /// followed by the payload bytes.
    fn fill(&self, mut at: u64, mut into: &mut [u8]) -> Result<(), Changed> {
        if at < ANSWER_BYTES as u64 {
            let rest = &self.answer[at as usize..];
            let head = rest.len().min(into.len());
            into[..head].copy_from_slice(&rest[..head]);
            (into, at) = (&mut into[head..], at + head as u64);
        }
        match &self.bytes {
            Some(pinned) if !into.is_empty() => pinned.place().read(at - ANSWER_BYTES as u64, into),
            _ => Ok(()),
        }
    }
}

/// Connection of one reader.
pub(crate) struct Session {
    pub(crate) channel: Channel,
    incoming: [u8; REQUEST_BYTES],
    incoming_bytes: usize,
    outgoing: VecDeque<Outgoing>,
    /// Time of the last turn: the reader asked for something, or could receive more.
    pub(crate) moved: Instant,
}

/// Result of [`Session::turn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The reader has got everything that it asked for.
    Idle,
    /// The reader accepts no more bytes now, or other readers are to have their turn.
    Later,
}

impl Session {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            channel,
            incoming: [0; REQUEST_BYTES],
            incoming_bytes: 0,
            outgoing: VecDeque::new(),
            moved: Instant::now(),
        }
    }

    /// Whether the reader has received nothing for longer than `patience`, or there was no traffic for longer than
    /// `idle`.
    pub(crate) fn is_silent(&self, patience: Duration, idle: Duration) -> bool {
        let waited = self.moved.elapsed();
        waited > idle || (!self.outgoing.is_empty() && waited > patience)
    }

    /// Does what the reader asks for, as far as the reader accepts the answers now. After [`TURN_BYTES`], other readers
    /// have their turn.
    ///
    /// # Errors
    /// The connection has ended, or the reader has sent something that is no request.
    pub(crate) fn turn(&mut self, shelf: &Shelf, counters: &Counters, bench: &mut Bench) -> io::Result<Turn> {
        self.moved = Instant::now();
        let mut sent = 0;
        loop {
            if !self.channel.flush()? {
                return Ok(Turn::Later);
            }
            self.ask(shelf, counters)?;
            if self.outgoing.is_empty() {
                return Ok(Turn::Idle);
            }
            if sent >= TURN_BYTES {
                return Ok(Turn::Later);
            }
            sent += self.answer(bench).inspect_err(|_| bench.clear())?;
        }
    }

    /// Receives requests, until none is there or [`ANSWERS_MAX`] answers wait.
    fn ask(&mut self, shelf: &Shelf, counters: &Counters) -> io::Result<()> {
        while self.outgoing.len() < ANSWERS_MAX {
            match self.channel.take(&mut self.incoming[self.incoming_bytes..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.incoming_bytes += got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.incoming_bytes == REQUEST_BYTES {
                self.incoming_bytes = 0;
                let request: Request = zerocopy::transmute!(self.incoming);
                self.obey(&request, shelf, counters)?;
            }
        }
        Ok(())
    }

    fn obey(&mut self, request: &Request, shelf: &Shelf, counters: &Counters) -> io::Result<()> {
        let reference = Reference::parse(&request.reference).ok_or(io::ErrorKind::InvalidData)?;
        match request.kind.get() {
            RETURN => {
                counters.returned.fetch_add(1, Ordering::Relaxed);
                shelf.lock().give_back(&reference.payload, reference.weight, request.touched.into());
            }
            FETCH => {
                let pinned = shelf.pin(&reference);
                let length = pinned.as_ref().map_or(0, |pinned| pinned.place().length());
                counters.fetches.fetch_add(1, Ordering::Relaxed);
                counters.fetched_bytes.fetch_add(length, Ordering::Relaxed);
                counters.gone.fetch_add(u64::from(pinned.is_none()), Ordering::Relaxed);
                let mut answer = Answer::new_zeroed();
                answer.found = u32::from(pinned.is_some()).into();
                answer.length = length.into();
                self.outgoing.push_back(Outgoing {
                    answer: zerocopy::transmute!(answer),
                    done: 0,
                    total: ANSWER_BYTES as u64 + length,
                    bytes: pinned,
                });
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }

    /// Puts as much of the answers as fits into `bench`, the buffer in which records are made, and seals and sends it.
    /// Returns the number of bytes before encryption.
    fn answer(&mut self, bench: &mut Bench) -> io::Result<usize> {
        // Each answer begins a new record, and at most ANSWERS_MAX answers wait. So room is left for the overhead of
        // that many records.
        let mut room = CONTENT_AT_ONCE - ANSWERS_MAX * shunt_wire::tls::OVERHEAD_BYTES as usize;
        let mut put = 0;
        while room > 0
            && let Some(outgoing) = self.outgoing.front_mut()
        {
            let now = (outgoing.total - outgoing.done).min(room as u64) as usize;
            let mut filled = Ok(());
            self.channel.put(bench, now, |at, into| {
                let more = outgoing.fill(outgoing.done + at as u64, into);
                filled = filled.and(more);
            })?;
            if filled.is_err() || !outgoing.bytes.as_ref().is_none_or(|pinned| pinned.place().is_unchanged()) {
                // The reader was promised bytes that no longer exist. The reader will ask again on a new connection,
                // and then be told that the payload is gone.
                return Err(io::Error::other(Changed));
            }
            (room, put) = (room - now, put + now);
            outgoing.done += now as u64;
            if outgoing.done == outgoing.total {
                self.outgoing.pop_front();
            }
        }
        self.channel.send(bench, !self.outgoing.is_empty())?;
        Ok(put)
    }
}

/// Builds a request of a reader.
pub(crate) fn request(kind: u32, reference: &Reference, touched: Touched) -> [u8; REQUEST_BYTES] {
    let request = Request { kind: kind.into(), zero: 0.into(), reference: reference.emit(), touched: touched.into() };
    let mut bytes = [0; REQUEST_BYTES];
    bytes.copy_from_slice(request.as_bytes());
    bytes
}
