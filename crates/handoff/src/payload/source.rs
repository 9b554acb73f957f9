//! Sources of a payload's bytes. A source is the file of an *offer*, which a server holds ready as a payload, or other
//! bytes that stay in place until they are sent (*kept* bytes). The *digest* of a file is its SHA-256.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::{Errno, preadv};
use shunt_sys::shared::SharedMemory;
use shunt_wire::local::{Offer, Reason};

use crate::identity::FileIdentity;
use crate::in_memory;
use crate::reading::{Reads, Wanted};

/// Bytes that a payload, or a part of it, is made of. A call with [`Reads`] does not wait for a disk.
///
/// If some bytes are still being made, the source does not have them at hand, and wants no read for them
/// ([`Source::wanted`]). Whoever makes the bytes wakes the payload's owner.
pub trait Source: Debug + Send {
    /// Number of bytes from `at` on that can be had without waiting, at most `most`.
    fn at_hand(&self, at: u64, most: usize, reads: &Reads) -> usize;

    /// Has the kernel move up to `most` bytes from `at` on into a socket. Returns how many. 0: there are no more bytes.
    ///
    /// # Errors
    /// Returns the kernel's error of sendfile(2) or send(2): `EAGAIN` if the socket takes nothing.
    fn send(&self, at: u64, most: usize, socket: BorrowedFd<'_>) -> Result<usize, Errno>;

    /// Copies bytes, from `at` on, into the slices, one after the other. Returns how many: at least one, or 0 if there
    /// are no more bytes. With `reads`, copies only what is at hand.
    ///
    /// # Errors
    /// `EAGAIN` if the first byte is not at hand, else the kernel's error of preadv2(2).
    fn read(&self, at: u64, slices: &mut [IoSliceMut<'_>], reads: Option<&Reads>) -> Result<usize, Errno>;

    /// Describes the read by which another thread gets bytes that are not at hand. `None`: there is nothing to read
    /// yet.
    ///
    /// # Errors
    /// [`Reason::Socket`] if the bytes cannot be read.
    fn wanted(&self, at: u64, bytes: usize) -> Result<Option<Wanted>, Reason>;

    /// Whether the bytes are those that the payload was made of. Asked before any of them is relied on, and after they
    /// were read or sent.
    fn is_unchanged(&self) -> bool;

    /// Notes the identity that a file had after another thread's read, and returns whether its bytes can be used.
    fn is_as_told(&self, _: FileIdentity) -> bool {
        true
    }

    /// The file that the bytes are part of, with its identity when it was first examined. `None` if there is no such
    /// file, or if it has changed since.
    fn file(&self) -> Option<(BorrowedFd<'_>, FileIdentity)> {
        None
    }

    /// Notes whether the frontend has been told the digest of the file that [`Source::file`] returned.
    fn set_told(&self, _: bool) {}

    /// Whether the frontend has been told the digest of the file, and the file has changed since.
    fn is_withheld(&self) -> bool {
        false
    }

    /// Returns an offer of the `length` bytes up to `end`, with its file and the identity that the file must have.
    /// `None` if the source is not the file of an offer.
    fn into_offer(self: Box<Self>, _end: u64, _length: u64) -> Option<(Offer, File, Option<FileIdentity>)> {
        None
    }

    /// Called when the payload is dropped. A source whose closing may wait passes that to another thread.
    fn close(self: Box<Self>, _: &Reads) {}
}

/// Bytes under a descriptor that stay there while the value lives, unless others change them.
pub trait Kept: AsFd + Debug + Send {
    /// Gives a socket up to `bytes` bytes from `offset` on. Returns how many it took. 0: there are no more bytes.
    ///
    /// Must send a copy if the memory of the bytes may be used again. If the client is on the same machine (veth,
    /// loopback), pages that `sendfile` gives away may still be in its receive buffer when all bytes have been
    /// acknowledged. The next use of the memory would change the bytes that the client reads.
    ///
    /// # Errors
    /// Returns the kernel's error of the send: `WouldBlock` if the socket takes nothing.
    fn send(&self, offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize>;

    /// Whether the bytes are unchanged. Asked before any of them is relied on, and after they were read or sent.
    fn is_unchanged(&self) -> bool;
}

impl Kept for SharedMemory {
    fn send(&self, offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        Self::send(self, offset, bytes, socket)
    }

    fn is_unchanged(&self) -> bool {
        true
    }
}

/// If kept bytes are in a file, its file system tells which of them are in memory. If it does not tell, they count as
/// memory, and all of them are at hand.
impl<K: Kept> Source for K {
    fn at_hand(&self, at: u64, most: usize, _: &Reads) -> usize {
        in_memory::bytes_from(self, at, most).unwrap_or(most)
    }

    fn send(&self, at: u64, most: usize, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        Kept::send(self, at, most, socket).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn read(&self, at: u64, slices: &mut [IoSliceMut<'_>], reads: Option<&Reads>) -> Result<usize, Errno> {
        match reads.map(|_| in_memory::read(self, slices, at)) {
            None | Some(Err(Errno::OPNOTSUPP)) => read_waiting(self, at, slices),
            Some(other) => other,
        }
    }

    fn wanted(&self, at: u64, bytes: usize) -> Result<Option<Wanted>, Reason> {
        let identity = FileIdentity::at_hand(self).map_err(|_| Reason::Socket)?;
        let file = Arc::new(self.as_fd().try_clone_to_owned().map_err(|_| Reason::Socket)?);
        Ok(Some(Wanted { file, identity, at, bytes }))
    }

    fn is_unchanged(&self) -> bool {
        Kept::is_unchanged(self)
    }
}

/// Reads at least one byte, or none at the end of the file. Waits for the disk.
pub(super) fn read_waiting(file: impl AsFd, at: u64, slices: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
    loop {
        match preadv(&file, slices, at) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// The part of one range that is left to send.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) source: Box<dyn Source>,
    pub(super) offset: u64,
    pub(super) end: u64,
}

impl Range {
    pub(super) fn remaining(&self) -> u64 {
        self.end - self.offset
    }

    /// Largest number of bytes that one call sends or reads.
    pub(super) fn most(&self) -> usize {
        usize::try_from(self.remaining()).unwrap_or(usize::MAX).min(1 << 30)
    }
}
