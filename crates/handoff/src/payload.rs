//! The bytes of a handoff: a range of an offered file, and what the file was when its header was made; or ranges of what
//! somebody keeps for as long as they are sent.

mod ahead;
mod source;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::{Errno, preadv};
use rustix::net::SendFlags;
use shunt_sys::shared::SharedMemory;
use shunt_wire::local::{Offer, Reason};
use zerocopy::FromZeros;

use crate::identity::FileIdentity;
use crate::in_memory;
use crate::reading::{Done, Owner, READ_BYTES, Reads};
use ahead::Ahead;
use source::{Range, Source};

/// Bytes under a descriptor that stay there while the value lives, unless others change them.
pub trait Kept: AsFd + Debug + Send {
    /// Gives a socket some of them, from an offset on: how many it took; 0: there are no more.
    ///
    /// A copy, where their place is used for others: pages that `sendfile` gives away are still in a client's receive buffer, where
    /// that is on the same machine (veth, loopback), when all has been acknowledged and their keeper uses them again.
    ///
    /// # Errors
    /// The kernel's: `WouldBlock` where the socket takes nothing.
    fn send(&self, offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize>;

    /// Whether they are still what they were: asked before any count, and after they were read or sent.
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

/// What is left to send of a payload.
#[derive(Debug)]
pub struct Payload {
    ranges: Vec<Range>,
    /// Which of them is next.
    next: usize,
    /// Who reads what is not in memory; `None`: whoever calls, and waits.
    reader: Option<(Reads, Owner)>,
    ahead: Ahead,
}

impl Payload {
    /// Of an offer and the descriptor that came with it.
    pub fn new(file: File, offer: &Offer) -> Self {
        Self::proven(file, offer, None)
    }

    /// The same. `proven`: what the file was when its digest was told, where whoever claims it relies on that.
    pub fn proven(file: File, offer: &Offer, proven: Option<FileIdentity>) -> Self {
        let (first, has_changed) = (Cell::new(None), Cell::new(false));
        let (mtime_ns, size) = ((offer.flags & Offer::BODY == 0).then_some(offer.mtime_ns), offer.size);
        let file = Arc::new(OwnedFd::from(file));
        let (is_told, may_wait) = (Cell::new(false), Cell::new(false));
        let source = Source::Offered { file, mtime_ns, size, first, has_changed, proven, is_told, may_wait };
        Self::of(vec![Range { source, offset: offer.offset, end: offer.offset + offer.length }])
    }

    /// Of bytes that are kept, each from an offset on, so many.
    ///
    /// # Panics
    /// Where one ends past 2^64.
    pub fn of_kept(kept: impl IntoIterator<Item = (Box<dyn Kept>, u64, u64)>) -> Self {
        let range = |(kept, offset, length): (_, u64, u64)| {
            let end = offset.checked_add(length).expect("a range of a descriptor");
            Range { source: Source::Kept(kept), offset, end }
        };
        Self::of(kept.into_iter().map(range).collect())
    }

    fn of(ranges: Vec<Range>) -> Self {
        Self { ranges, next: 0, reader: None, ahead: Ahead::Nothing }
    }

    /// From here on nothing waits for a disk: what is not in memory is read by `reads`, and what ends there for `owner`
    /// belongs to [`Payload::take_read`].
    pub fn read_by(&mut self, reads: &Reads, owner: Owner) {
        self.reader = Some((reads.clone(), owner));
    }

    /// Whether it comes no further until a read has ended.
    pub fn is_reading(&self) -> bool {
        matches!(self.ahead, Ahead::Asked(..))
    }

    /// A read has ended: whether it was this payload's, and can be gone on with.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] as [`Payload::send_to`], [`Reason::Socket`] where the file cannot be read.
    pub fn take_read(&mut self, done: Done) -> Result<bool, Reason> {
        let &Ahead::Asked(ref ticket, range, at) = &self.ahead else { return Ok(false) };
        if !ticket.is_of(&done) {
            return Ok(false);
        }
        self.ahead = Ahead::Nothing;
        let (bytes, now) = done.read.map_err(reason_of)?;
        if bytes.is_empty() || !self.ranges[range].source.is_as_told(now) {
            return Err(Reason::FileChanged);
        }
        self.ahead = Ahead::Here(range, at, bytes);
        Ok(true)
    }

    /// Has another thread read, of a range from `at` on.
    fn ask(&mut self, range: usize, at: u64) -> Result<(), Reason> {
        let (Some((reads, owner)), Range { source, end, .. }) = (&self.reader, &self.ranges[range]) else {
            return Ok(());
        };
        let bytes = usize::try_from(end - at).unwrap_or(usize::MAX).min(READ_BYTES);
        self.ahead = Ahead::Asked(reads.ask(*owner, source.wanted(at, bytes)?)?, range, at);
        Ok(())
    }

    /// Bytes that the kernel does not have yet.
    pub fn remaining(&self) -> u64 {
        self.ranges.iter().map(Range::remaining).sum()
    }

    /// Whether an offer's file still has the size and modification time that its header told the client, and what is kept
    /// the bytes that it had.
    ///
    /// A file that was replaced by another (rename) is the same file under this descriptor, and its bytes are right. So are
    /// those of a body behind a header that is rewritten ([`Offer::BODY`]): then the size alone is compared. A file that has
    /// grown is one that something was appended to.
    pub fn is_unchanged(&self) -> bool {
        self.ranges.iter().all(|range| range.source.is_unchanged())
    }

    /// The file that all of it is of, as it was at the first look; `None` where there is none, or it has changed since.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, FileIdentity)> {
        match &self.ranges[..] {
            [Range { source: Source::Offered { file, first, has_changed, .. }, .. }] if !has_changed.get() => {
                Some((file.as_fd(), first.get()?))
            }
            _ => None,
        }
    }

    /// Notes whether others have been told the digest of [`Payload::file`], and may seal the same records.
    pub fn set_told(&self, told: bool) {
        for range in &self.ranges {
            if let Source::Offered { is_told, .. } = &range.source {
                is_told.set(told);
            }
        }
    }

    /// Whether the last look found another file than the one whose digest others have been told: none of it may be sealed
    /// until they know.
    pub fn is_withheld(&self) -> bool {
        self.ranges.iter().any(|range| range.source.is_withheld())
    }

    /// The offer that all of it is of, as it was made, and its file, whatever has been sent: but for its number, tag, peer and
    /// trace, which are the claim's. `None` where it is of none.
    pub fn into_offer(mut self, length: u64) -> Option<(Offer, File, Option<FileIdentity>)> {
        let [Range { source: Source::Offered { file, mtime_ns, size, proven, .. }, end, .. }] =
            <[Range; 1]>::try_from(std::mem::take(&mut self.ranges)).ok()?
        else {
            return None;
        };
        let mut offer = Offer::new_zeroed();
        (offer.offset, offer.length, offer.size) = (end.checked_sub(length)?, length, size);
        match mtime_ns {
            Some(mtime_ns) => offer.mtime_ns = mtime_ns,
            None => offer.flags = Offer::BODY,
        }
        offer.header = Offer::HEADER;
        // A read that was asked for has it, too.
        let file = Arc::try_unwrap(file).or_else(|shared| shared.try_clone()).ok()?;
        Some((offer, file.into(), proven))
    }

    /// Where it ends in its last file, in bytes.
    pub fn end(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// The range that is next, if anything is left.
    fn next(&mut self) -> Option<usize> {
        while self.ranges.get(self.next)?.remaining() == 0 {
            self.next += 1;
        }
        Some(self.next)
    }

    /// Gives the socket what it takes: `true` when it has everything; `false` also where a read has to end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file is shorter or newer than its header said, else what the socket says.
    pub fn send_to(&mut self, socket: impl AsFd) -> Result<bool, Reason> {
        while let Some(range) = self.next() {
            match self.send_some(range, socket.as_fd()) {
                Ok(Some(0)) => return Err(Reason::FileChanged),
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.ask(range, self.ranges[range].offset)?;
                    return self.still_good(false);
                }
                Err(Errno::AGAIN) => return self.still_good(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(reason_of(errno)),
            }
        }
        self.still_good(true)
    }

    /// How many bytes of the range the socket took; `None`: none are in memory.
    fn send_some(&mut self, index: usize, socket: BorrowedFd<'_>) -> Result<Option<usize>, Errno> {
        let Self { ranges, reader, ahead, .. } = self;
        let range = &mut ranges[index];
        if let Some(bytes) = ahead.bytes(index, range.offset, range.most()) {
            let sent = rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
            range.offset += sent as u64;
            return Ok(Some(sent));
        }
        ahead.go_on(index, range.offset);
        let most = range.most();
        let most = reader.as_ref().map_or(most, |(reads, _)| range.source.in_memory(range.offset, most, reads));
        if most == 0 {
            return Ok(None);
        }
        range.send_to(socket, most).map(Some)
    }

    /// Reads the next bytes into `buffer`, for a way that the kernel cannot send on by itself: how many, 0 at the end.
    /// `None`: a read has to end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] as [`Payload::send_to`].
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Reason> {
        let Some(index) = self.next() else {
            return self.still_good(true).map(|_| Some(0));
        };
        let range = &self.ranges[index];
        let most = buffer.len().min(range.most());
        self.ahead.go_on(index, range.offset);
        let bytes = self.read_some(index, range.offset, &mut [IoSliceMut::new(&mut buffer[..most])])?;
        match bytes {
            Some(bytes) => self.ranges[index].offset += bytes as u64,
            None => self.ask(index, self.ranges[index].offset)?,
        }
        self.still_good(true).map(|_| bytes)
    }

    /// Reads bytes of what is left to send, from its byte `at` on, into one slice after the other. `false`: a read has to
    /// end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file ends before, [`Reason::Socket`] where it cannot be read.
    pub fn read_exactly(&mut self, at: u64, slices: Vec<&mut [u8]>) -> Result<bool, Reason> {
        if let [range] = &self.ranges[..] {
            let from = range.offset + at;
            self.ahead.go_on(0, from);
            let is_read = self.read_all(from, slices)?;
            return if is_read { Ok(true) } else { self.ask(0, from).map(|()| false) };
        }
        let mut at = at;
        for mut slice in slices {
            while !slice.is_empty() {
                let (index, offset, left) = self.find(at).ok_or(Reason::FileChanged)?;
                self.ahead.go_on(index, offset);
                let most = slice.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let Some(bytes) = self.read_some(index, offset, &mut [IoSliceMut::new(&mut slice[..most])])? else {
                    return self.ask(index, offset).map(|()| false);
                };
                (slice, at) = (&mut slice[bytes..], at + bytes as u64);
            }
        }
        Ok(true)
    }

    /// Where the byte `at` of what is left is: in which range, where in its file, and how many follow it there.
    fn find(&self, mut at: u64) -> Option<(usize, u64, u64)> {
        for (index, range) in self.ranges.iter().enumerate() {
            let here = range.remaining();
            if at < here {
                return Some((index, range.offset + at, here - at));
            }
            at -= here;
        }
        None
    }

    /// One slice after the other, of the first range, by as few calls as may be; `false`: not all are in memory.
    fn read_all(&self, mut at: u64, slices: Vec<&mut [u8]>) -> Result<bool, Reason> {
        let mut slices: Vec<IoSliceMut<'_>> = slices.into_iter().map(IoSliceMut::new).collect();
        let mut slices = slices.as_mut_slice();
        while !slices.is_empty() {
            let Some(bytes) = self.read_some(0, at, slices)? else { return Ok(false) };
            IoSliceMut::advance_slices(&mut slices, bytes);
            at += bytes as u64;
        }
        Ok(true)
    }

    /// Of a range, at least one byte; `None`: it is not in memory.
    fn read_some(&self, index: usize, at: u64, slices: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Reason> {
        let source = &self.ranges[index].source;
        if let Some(bytes) = self.ahead.bytes(index, at, usize::MAX) {
            return Ok(Some(copy(bytes, slices)));
        }
        let read = match &self.reader {
            None => read_waiting(source, at, slices),
            Some((reads, _)) => match in_memory::read(source, slices, at) {
                Err(Errno::OPNOTSUPP) if source.is_memory(reads) => read_waiting(source, at, slices),
                other => other,
            },
        };
        match read {
            Ok(0) => Err(Reason::FileChanged),
            Ok(bytes) => Ok(Some(bytes)),
            Err(Errno::AGAIN | Errno::OPNOTSUPP) if self.reader.is_some() => Ok(None),
            Err(errno) => Err(reason_of(errno)),
        }
    }

    /// Bytes that were queued from a file that has changed since may be neither the old nor the new ones: then the
    /// client's connection must not end well.
    fn still_good(&self, done: bool) -> Result<bool, Reason> {
        if self.is_unchanged() { Ok(done) } else { Err(Reason::FileChanged) }
    }
}

impl Drop for Payload {
    /// Files are closed where others may wait, too.
    fn drop(&mut self) {
        let Some((reads, _)) = &self.reader else { return };
        for range in self.ranges.drain(..) {
            if let Source::Offered { file, may_wait, .. } = range.source
                && may_wait.get()
            {
                reads.close(file);
            }
        }
    }
}

/// Fills one slice after the other: how many bytes.
fn copy(mut from: &[u8], slices: &mut [IoSliceMut<'_>]) -> usize {
    let all = from.len();
    for slice in slices {
        let bytes = slice.len().min(from.len());
        slice[..bytes].copy_from_slice(&from[..bytes]);
        from = &from[bytes..];
    }
    all - from.len()
}

fn read_waiting(source: &Source, at: u64, slices: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
    loop {
        match preadv(source, slices, at) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// What the kernel's answer to a send means for a handoff.
pub(crate) fn reason_of(errno: Errno) -> Reason {
    match errno {
        Errno::PIPE | Errno::CONNRESET => Reason::ClientGone,
        Errno::TIMEDOUT => Reason::NoProgress,
        // A disk that cannot be read (EIO) is among these: what was read is right, and another backend may have the rest.
        _ => Reason::Socket,
    }
}
