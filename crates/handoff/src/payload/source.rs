//! The place of a payload's bytes, and how many of them are in memory.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shunt_wire::local::Reason;

use super::Kept;
use crate::identity::FileIdentity;
use crate::in_memory::{self, Untold};
use crate::reading::{Reads, Wanted};

#[derive(Debug)]
pub(super) enum Source {
    /// File of an offer, with the modification time and size that its header told the client. Without `mtime_ns`, bytes
    /// before the range may be written to.
    Offered {
        file: Arc<OwnedFd>,
        mtime_ns: Option<i64>,
        size: u64,
        /// The file's identity when it was first examined.
        first: Cell<Option<FileIdentity>>,
        /// Whether a later look found another identity: the file was replaced by another, as a rule.
        has_changed: Cell<bool>,
        /// Identity that the file must have, where others rely on its bytes.
        proven: Option<FileIdentity>,
        /// Whether the digest of the first identity has been told, and has not been withdrawn.
        is_told: Cell<bool>,
        /// Whether calls to its file system may wait for something else than a disk.
        may_wait: Cell<bool>,
    },
    Kept(Box<dyn Kept>),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Offered { file, .. } => file.as_fd(),
            Self::Kept(kept) => kept.as_fd(),
        }
    }
}

impl Source {
    pub(super) fn is_unchanged(&self) -> bool {
        match self {
            Self::Offered { file, .. } => FileIdentity::at_hand(file).is_ok_and(|now| self.is_as_told(now)),
            Self::Kept(kept) => kept.is_unchanged(),
        }
    }

    /// Notes the file's present identity `now`, and returns whether it fits what the header told.
    pub(super) fn is_as_told(&self, now: FileIdentity) -> bool {
        let Self::Offered { mtime_ns, size, first, has_changed, proven, .. } = self else { return true };
        has_changed.set(has_changed.get() || first.get().is_some_and(|first| first != now));
        first.set(first.get().or(Some(now)));
        // Logs, recordings and uploads grow while they are read. The client gets as much as its header told.
        let is_longer = now.size > *size && mtime_ns.is_some();
        let as_told = is_longer || now.size == *size && mtime_ns.is_none_or(|then| then == now.mtime_ns);
        as_told && proven.is_none_or(|proven| proven == now)
    }

    /// Whether others have been told a digest of the file, and the file has changed since.
    pub(super) fn is_withheld(&self) -> bool {
        matches!(self, Self::Offered { is_told, has_changed, .. } if is_told.get() && has_changed.get())
    }

    fn identity(&self) -> Option<FileIdentity> {
        match self {
            Self::Offered { first, .. } => first.get(),
            Self::Kept(kept) => FileIdentity::at_hand(kept).ok(),
        }
    }

    /// Whether the bytes are in memory, for a file system that does not tell. Kept bytes count as in memory: where they
    /// are in a file, its file system does tell.
    pub(super) fn is_memory(&self, reads: &Reads) -> bool {
        let Self::Offered { first, may_wait, .. } = self else { return true };
        let is_memory = first.get().is_some_and(|first| reads.is_memory(first.device));
        may_wait.set(!is_memory);
        is_memory
    }

    /// Number of bytes from `at` on that can be had without waiting, at most `most`.
    pub(super) fn in_memory(&self, at: u64, most: usize, reads: &Reads) -> usize {
        let file = if let Self::Offered { first, .. } = self { first.get() } else { None };
        let found = file.map_or(0, |file| reads.found(&file, at));
        if found >= most.min(in_memory::STRIDE_BYTES) {
            return most.min(found);
        }
        match in_memory::bytes_from(self, at, most) {
            Ok(here) => {
                if let Some(file) = file.filter(|_| here > 0) {
                    reads.note_found(file, at, here);
                }
                here
            }
            Err(Untold) if self.is_memory(reads) => most,
            Err(Untold) => 0,
        }
    }

    /// Describes a read for another thread.
    pub(super) fn wanted(&self, at: u64, bytes: usize) -> Result<Wanted, Reason> {
        let identity = self.identity().ok_or(Reason::Socket)?;
        let file = match self {
            Self::Offered { file, .. } => file.clone(),
            Self::Kept(kept) => Arc::new(kept.as_fd().try_clone_to_owned().map_err(|_| Reason::Socket)?),
        };
        Ok(Wanted { file, identity, at, bytes })
    }
}

/// The part of one range that is left to send.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) source: Source,
    pub(super) offset: u64,
    pub(super) end: u64,
}

impl Range {
    pub(super) fn remaining(&self) -> u64 {
        self.end - self.offset
    }

    /// Most bytes that one call sends.
    pub(super) fn most(&self) -> usize {
        usize::try_from(self.remaining()).unwrap_or(usize::MAX).min(1 << 30)
    }

    /// Sends some bytes of the range. Returns how many the socket took.
    pub(super) fn send_to(&mut self, socket: BorrowedFd<'_>, most: usize) -> Result<usize, Errno> {
        match &self.source {
            Source::Offered { file, .. } => rustix::fs::sendfile(socket, file, Some(&mut self.offset), most),
            Source::Kept(kept) => {
                let sent = kept.send(self.offset, most, socket);
                let sent = sent.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
                self.offset += sent as u64;
                Ok(sent)
            }
        }
    }
}
