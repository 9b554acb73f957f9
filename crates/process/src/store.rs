//! The segment where this process leaves the bytes that it writes: memory of the machine's store, which is a thread of
//! the agent (Shunt's daemon). This process leases the segment from the store when it first needs one. A *reference*
//! goes into a connection in place of the bytes. A *payload* is the bytes that one write has left in the store.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use shunt_odb::learnt::{Note, Report};
use shunt_odb::place::Version;
use shunt_odb::reference::{Holder, Reference};
use shunt_odb::segment::{Writer, now_ms};
use shunt_odb::store::client::{Connection, QUICK};

use crate::system::inside::{Held, Lock};
use crate::system::ranks::Rank;

/// Time in milliseconds after which the store is asked for a segment again, if it gave none.
const RETRY_MS: u64 = 1000;

/// Most bytes that one reference to a copy in the segment stands for.
pub const COPIED_MAX: usize = 1 << 20;
/// Most bytes that one reference to a file stands for.
const REFERRED_MAX: usize = 1 << 30;

pub struct Store {
    path: PathBuf,
    leased: Lock<Leased>,
}

#[derive(Default)]
struct Leased {
    /// Connection to the store. While it is open, the store knows that the segment's program lives.
    connection: Option<Connection>,
    writer: Option<Writer>,
    /// Time when the store was last asked for a segment, by the clock of [`now_ms`]; 0 if it was not.
    asked_ms: u64,
}

impl Store {
    pub fn new(path: PathBuf) -> Self {
        Self { path, leased: Lock::new(Rank::Segment, Leased::default()) }
    }

    /// Path of the store's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name of the store, if this process has a segment of it, or gets one now. `None`: there is no store, or it has no
    /// room for one more segment. Then bytes are sent inline, not by reference.
    pub fn holder(&self) -> Option<Holder> {
        self.leased.lock().writer(&self.path).map(|writer| writer.holder())
    }

    /// Copies bytes into the segment. `stream`: cookie of the connection that they go over. Returns `None` if there is
    /// no room now: then the bytes are sent inline.
    pub fn put(&self, bytes: &[IoSlice<'_>], stream: u64) -> Option<Reference> {
        let mut leased = self.leased.lock();
        let writer = leased.writer(&self.path)?;
        let reference = writer.put(bytes)?;
        writer.is_part(&reference, stream);
        Some(reference)
    }

    /// Keeps a file's bytes from offset `from` on, at most `bytes` of them: by reference to the file, or as a copy of
    /// the first of them. Returns `None` if there is no room now, or the file has no bytes there.
    pub fn put_file(&self, file: BorrowedFd<'_>, from: u64, bytes: usize, stream: u64) -> Option<Reference> {
        let version = Version::of(file).ok().flatten();
        let mut leased = self.leased.lock();
        leased.writer(&self.path)?;
        let reference = version
            .and_then(|version| leased.refer_to_file(file, &version, from, bytes.min(REFERRED_MAX)))
            .or_else(|| leased.writer.as_mut()?.put_file(file, from, bytes.min(COPIED_MAX)))?;
        leased.writer.as_ref()?.is_part(&reference, stream);
        Some(reference)
    }

    /// Attaches a note to a payload. The note is returned in a later report on what has become of the payload.
    pub fn note(&self, reference: &Reference, note: Note) {
        let mut leased = self.leased.lock();
        if let Some(writer) = &mut leased.writer {
            writer.note(reference, note);
        }
    }

    /// Calls `tell` with each report that has come about a payload with a note.
    pub fn reports(&self, tell: impl FnMut(Report)) {
        let mut leased = self.leased.lock();
        leased.writer.iter_mut().flat_map(Writer::reports).for_each(tell);
    }

    /// Withdraws a payload that was not sent.
    pub fn withdraw(&self, reference: &Reference) {
        let mut leased = self.leased.lock();
        if let Some(writer) = &mut leased.writer {
            writer.withdraw(reference);
        }
    }

    /// Locks the store for a fork, until the value is dropped. The child then calls [`Still::forget`].
    pub fn hold_still(&self) -> Still<'_> {
        Still(self.leased.lock())
    }
}

pub struct Still<'a>(Held<'a, Leased>);

impl Still<'_> {
    /// Forgets the segment in the child: it is the parent's.
    pub fn forget(&mut self) {
        *self.0 = Leased::default();
    }
}

impl Leased {
    /// Whether the store may be asked for a segment: not within [`RETRY_MS`] after it was asked last.
    fn may_ask(&self) -> bool {
        self.asked_ms == 0 || now_ms() >= self.asked_ms + RETRY_MS
    }

    fn writer(&mut self, path: &Path) -> Option<&mut Writer> {
        if self.writer.as_ref().is_some_and(|writer| !writer.is_served()) {
            // The store has ended, takes no more payloads, or has not been alive for a while. So the segment is given
            // up, and perhaps another one is leased. If the store still lives, it keeps the payloads.
            *self = Self::default();
        }
        if self.writer.is_none() {
            if !self.may_ask() {
                return None;
            }
            let leased = self.lease(path);
            self.asked_ms = now_ms();
            match leased {
                Ok(writer) => self.writer = writer,
                Err(_) => self.connection = None,
            }
        }
        self.writer.as_mut()
    }

    fn open(&mut self, path: &Path) -> io::Result<()> {
        let connection = Connection::open_within(path, QUICK)?;
        crate::system::counts::begin(&connection);
        self.connection = Some(connection);
        Ok(())
    }

    /// Leases a segment. Takes a second at most, if the agent is stopped.
    fn lease(&mut self, path: &Path) -> io::Result<Option<Writer>> {
        if self.connection.is_none() {
            self.open(path)?;
        }
        self.connection.as_ref().map_or(Ok(None), Connection::lease)
    }

    fn refer_to_file(&mut self, file: BorrowedFd<'_>, version: &Version, from: u64, most: usize) -> Option<Reference> {
        let (connection, writer) = (self.connection.as_ref()?, self.writer.as_mut()?);
        match connection.refer_to_file(writer, file, version, from, most as u64) {
            Ok(reference) => reference,
            Err(_) => {
                // The connection is in an unknown state: the next answer on it could be the one to this question.
                *self = Self { asked_ms: now_ms(), ..Self::default() };
                None
            }
        }
    }
}
