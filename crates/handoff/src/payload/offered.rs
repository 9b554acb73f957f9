//! The file of an offer, as a source of a payload's bytes. An *offer* is a range of a file that a server holds ready as
//! a payload. The *claimant* is the frontend that asked for the payload. The *digest* of a file is its SHA-256. Another
//! backend with a file of the same digest may send other parts of the payload.

use std::cell::Cell;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shunt_wire::local::{Offer, Reason};
use zerocopy::FromZeros;

use super::source::{Source, read_waiting};
use crate::identity::FileIdentity;
use crate::in_memory::{self, Untold};
use crate::reading::{Reads, Wanted};

/// File of an offer, with the modification time and size that the response's header told the client. If `mtime_ns` is
/// `None`, bytes before the offer's range may be written to, and only the size is compared.
#[derive(Debug)]
pub(super) struct Offered {
    file: Arc<OwnedFd>,
    mtime_ns: Option<i64>,
    size: u64,
    /// The file's identity when it was first examined.
    first: Cell<Option<FileIdentity>>,
    /// Whether the file had another identity when it was examined later. The usual reason: another file has taken its
    /// name (rename(2)), which changes the ctime.
    has_changed: Cell<bool>,
    /// Identity that the file must have, if the claimant relies on its digest.
    proven: Option<FileIdentity>,
    /// Whether the claimant has been told the digest of the first identity, and the digest is not withdrawn.
    is_told: Cell<bool>,
    /// Whether calls to the file's file system are known not to wait for a program or another machine, as they do on
    /// FUSE and NFS.
    is_prompt: Cell<bool>,
}

/// Modification time that an offer's file must have. `None`: any.
fn told_mtime(offer: &Offer) -> Option<i64> {
    (offer.flags & Offer::BODY == 0).then_some(offer.mtime_ns)
}

/// Whether a file with the identity `now` fits the modification time and the size that were told, and the identity
/// whose digest was told.
fn fits(now: FileIdentity, mtime_ns: Option<i64>, size: u64, proven: Option<FileIdentity>) -> bool {
    // A file that has grown still fits: logs, recordings and uploads grow while they are read. The client gets only as
    // many bytes as the response's header has told it.
    let is_longer = now.size > size && mtime_ns.is_some();
    let as_told = is_longer || now.size == size && mtime_ns.is_none_or(|then| then == now.mtime_ns);
    as_told && proven.is_none_or(|proven| proven == now)
}

/// Whether the file of an offer is still the one that the offer tells of, as [`super::Payload::is_unchanged`] says of a
/// payload. For callers without a payload: a payload needs a descriptor of its own, which has to be closed.
pub fn is_unchanged(file: impl AsFd, offer: &Offer, proven: Option<FileIdentity>) -> bool {
    FileIdentity::at_hand(file).is_ok_and(|now| fits(now, told_mtime(offer), offer.size, proven))
}

impl Offered {
    pub(super) fn new(file: File, offer: &Offer, proven: Option<FileIdentity>) -> Self {
        Self {
            file: Arc::new(OwnedFd::from(file)),
            mtime_ns: told_mtime(offer),
            size: offer.size,
            first: Cell::new(None),
            has_changed: Cell::new(false),
            proven,
            is_told: Cell::new(false),
            is_prompt: Cell::new(false),
        }
    }

    /// Called if the file system does not tell what is in memory. Returns whether it is memory itself.
    fn is_memory(&self, reads: &Reads) -> bool {
        let is_memory = self.first.get().is_some_and(|first| reads.is_memory(first.device));
        self.is_prompt.set(is_memory);
        is_memory
    }
}

impl Source for Offered {
    fn at_hand(&self, at: u64, most: usize, reads: &Reads) -> usize {
        let file = self.first.get();
        let found = file.map_or(0, |file| reads.found(&file, at));
        if found >= most.min(in_memory::STRIDE_BYTES) {
            self.is_prompt.set(true);
            return most.min(found);
        }
        match in_memory::bytes_from(&self.file, at, most) {
            Ok(here) => {
                self.is_prompt.set(true);
                if let Some(file) = file.filter(|_| here > 0) {
                    reads.note_found(file, at, here);
                }
                here
            }
            Err(Untold) if self.is_memory(reads) => most,
            Err(Untold) => 0,
        }
    }

    fn send(&self, at: u64, most: usize, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        rustix::fs::sendfile(socket, &self.file, Some(&mut { at }), most)
    }

    fn read(&self, at: u64, slices: &mut [IoSliceMut<'_>], reads: Option<&Reads>) -> Result<usize, Errno> {
        let Some(reads) = reads else { return read_waiting(&self.file, at, slices) };
        match in_memory::read(&self.file, slices, at) {
            Err(Errno::OPNOTSUPP) if self.is_memory(reads) => read_waiting(&self.file, at, slices),
            Err(Errno::OPNOTSUPP) => Err(Errno::AGAIN),
            other => {
                self.is_prompt.set(true);
                other
            }
        }
    }

    fn wanted(&self, at: u64, bytes: usize) -> Result<Option<Wanted>, Reason> {
        let identity = self.first.get().ok_or(Reason::Socket)?;
        Ok(Some(Wanted { file: Arc::clone(&self.file), identity, at, bytes }))
    }

    fn is_unchanged(&self) -> bool {
        FileIdentity::at_hand(&self.file).is_ok_and(|now| self.is_as_told(now))
    }

    /// Notes the file's present identity `now`, and returns whether it fits what the header told.
    fn is_as_told(&self, now: FileIdentity) -> bool {
        let Self { mtime_ns, size, first, has_changed, proven, .. } = self;
        has_changed.set(has_changed.get() || first.get().is_some_and(|first| first != now));
        first.set(first.get().or(Some(now)));
        fits(now, *mtime_ns, *size, *proven)
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, FileIdentity)> {
        let first = self.first.get().filter(|_| !self.has_changed.get())?;
        Some((self.file.as_fd(), first))
    }

    fn set_told(&self, told: bool) {
        self.is_told.set(told);
    }

    fn is_withheld(&self) -> bool {
        self.is_told.get() && self.has_changed.get()
    }

    fn into_offer(self: Box<Self>, end: u64, length: u64) -> Option<(Offer, File, Option<FileIdentity>)> {
        let mut offer = Offer::new_zeroed();
        (offer.offset, offer.length, offer.size) = (end.checked_sub(length)?, length, self.size);
        match self.mtime_ns {
            Some(mtime_ns) => offer.mtime_ns = mtime_ns,
            None => offer.flags = Offer::BODY,
        }
        offer.header = Offer::HEADER;
        // A read that is under way holds the file, too.
        let file = Arc::try_unwrap(self.file).or_else(|shared| shared.try_clone()).ok()?;
        Some((offer, file.into(), self.proven))
    }

    /// If the file's file system may be slow to answer, another thread closes the file.
    fn close(self: Box<Self>, reads: &Reads) {
        if !self.is_prompt.get() {
            reads.close(self.file);
        }
    }
}
