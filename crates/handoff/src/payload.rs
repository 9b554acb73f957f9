//! The bytes of a handoff. An *offer* is a range of a file that a server holds ready as a payload. The offer tells the
//! size and modification time that the file had when the response's header was made. The payload of a handoff without
//! an offer is ranges of *kept* bytes, which stay in place until they are sent. Each range has its [`Source`]. A *flow*
//! is the client connection that the bytes are sent on. The *claimant* is the frontend that asked for the payload. The
//! claimant may rely on the *digest* (SHA-256) of an offer's file, by which it has checked that another backend's file
//! is the same.

mod ahead;
mod offered;
mod source;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use shunt_wire::local::{Offer, Reason};

use crate::flow_sender::FlowSender;
use crate::identity::FileIdentity;
use crate::reading::{Done, Owner, READ_BYTES, Reads};
use ahead::Ahead;
use offered::Offered;
use source::Range;

pub use offered::is_unchanged;
pub use source::{Kept, Source};

/// Largest number of bytes that are copied at once, for a flow that is no kernel socket.
const COPIED_AT_ONCE: usize = 64 << 10;

/// The part of a payload that is left to send.
#[derive(Debug)]
pub struct Payload {
    ranges: Vec<Range>,
    /// Index of the next range.
    next: usize,
    /// Reads file bytes that are not in memory, for this owner. `None`: the calling thread reads them, and waits.
    reader: Option<(Reads, Owner)>,
    /// Threads of these reads close files whose closing may wait. `None`: the thread that drops the payload closes
    /// them.
    closer: Option<Reads>,
    ahead: Ahead,
}

impl Payload {
    /// Builds a payload from an offer and the descriptor that came with it.
    pub fn new(file: File, offer: &Offer) -> Self {
        Self::proven(file, offer, None)
    }

    /// Builds a payload as [`Payload::new`] does. `proven` is the identity that the file had when the claimant was told
    /// its digest, if the claimant relies on the digest.
    pub fn proven(file: File, offer: &Offer, proven: Option<FileIdentity>) -> Self {
        let source = Box::new(Offered::new(file, offer, proven));
        Self::of(vec![Range { source, offset: offer.offset, end: offer.offset + offer.length }])
    }

    /// Builds a payload from `(source, offset, length)` ranges.
    ///
    /// # Panics
    /// If a range ends past 2^64.
    pub fn of_sources(sources: impl IntoIterator<Item = (Box<dyn Source>, u64, u64)>) -> Self {
        let range = |(source, offset, length): (_, u64, u64)| {
            let end = offset.checked_add(length).expect("a range of a descriptor");
            Range { source, offset, end }
        };
        Self::of(sources.into_iter().map(range).collect())
    }

    fn of(ranges: Vec<Range>) -> Self {
        Self { ranges, next: 0, reader: None, closer: None, ahead: Ahead::Nothing }
    }

    /// Has threads of `reads` close the payload's files, unless their closing is known not to wait.
    #[must_use]
    pub fn closed_by(mut self, reads: &Reads) -> Self {
        self.closer = Some(reads.clone());
        self
    }

    /// From here on no call waits for a disk: `reads` reads what is not in memory. The caller gives the results for
    /// `owner` to [`Payload::take_read`].
    pub fn read_by(&mut self, reads: &Reads, owner: Owner) {
        self.reader = Some((reads.clone(), owner));
        self.closer = Some(reads.clone());
    }

    /// Whether sending waits for a read to end.
    pub fn is_reading(&self) -> bool {
        matches!(self.ahead, Ahead::Asked(..))
    }

    /// Takes the result of a read. Returns whether the read was this payload's, so that sending can continue.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] as in [`Payload::send_to`], [`Reason::Socket`] if the file cannot be read.
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

    /// Asks another thread to read bytes of a range, from `at` on. Does nothing if there are no such threads, or if the
    /// source has nothing to read yet.
    fn ask(&mut self, range: usize, at: u64) -> Result<(), Reason> {
        let (Some((reads, owner)), Range { source, end, .. }) = (&self.reader, &self.ranges[range]) else {
            return Ok(());
        };
        let bytes = usize::try_from(end - at).unwrap_or(usize::MAX).min(READ_BYTES);
        if let Some(wanted) = source.wanted(at, bytes)? {
            self.ahead = Ahead::Asked(reads.ask(*owner, wanted)?, range, at);
        }
        Ok(())
    }

    /// Number of bytes that are left to send or read.
    pub fn remaining(&self) -> u64 {
        self.ranges.iter().map(Range::remaining).sum()
    }

    /// Whether an offer's file still has the size and modification time that the response's header told the client, and
    /// whether kept bytes are unchanged.
    ///
    /// If another file has taken the name of the offer's file (rename), the descriptor still leads to the offer's file,
    /// and its bytes are right. If a header in front of the body, in the same file, may be rewritten ([`Offer::BODY`]),
    /// only the size is compared. A file that has grown counts as unchanged, because something was usually appended to
    /// it. But if the claimant relies on the file's digest, a file that has grown counts as changed.
    pub fn is_unchanged(&self) -> bool {
        self.ranges.iter().all(|range| range.source.is_unchanged())
    }

    /// File that the whole payload is part of, with its identity when it was first examined. `None` if there is no such
    /// file, or if it has changed since.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, FileIdentity)> {
        let [range] = &self.ranges[..] else { return None };
        range.source.file()
    }

    /// Notes whether the frontend has been told the digest of [`Payload::file`], so that another backend may seal the
    /// same records.
    pub fn set_told(&self, told: bool) {
        self.ranges.iter().for_each(|range| range.source.set_told(told));
    }

    /// Whether the file, when last examined, was no longer in the state whose digest the frontend has been told. None
    /// of it may be sealed until the frontend knows that.
    pub fn is_withheld(&self) -> bool {
        self.ranges.iter().any(|range| range.source.is_withheld())
    }

    /// Builds again the offer that the whole payload is part of, however much of it has been sent. `length` is the
    /// payload's length in bytes. Also returns the offer's file and the identity that [`Payload::proven`] was given.
    /// The offer's number, tag, peer and trace are not known here: the caller sets them. `None` if the payload is part
    /// of no offer.
    pub fn into_offer(mut self, length: u64) -> Option<(Offer, File, Option<FileIdentity>)> {
        let [Range { source, end, .. }] = <[Range; 1]>::try_from(std::mem::take(&mut self.ranges)).ok()?;
        source.into_offer(end, length)
    }

    /// End of the payload in its last file, as an offset in bytes.
    pub fn end(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Index of the next range that has bytes left, if there is one.
    fn next(&mut self) -> Option<usize> {
        while self.ranges.get(self.next)?.remaining() == 0 {
            self.next += 1;
        }
        Some(self.next)
    }

    /// Gives a flow as many bytes as it takes. Returns `true` if it has all of them. Returns `false` if it takes no
    /// more now, or a read has to end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] if the file has changed ([`Payload::is_unchanged`]), else the reason that the socket's
    /// error stands for.
    pub fn send_to(&mut self, flow: &dyn FlowSender) -> Result<bool, Reason> {
        while let Some(range) = self.next() {
            match self.send_some(range, flow) {
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

    /// Sends some bytes of a range. Returns how many the flow took. `None`: the next bytes are not at hand.
    fn send_some(&mut self, index: usize, flow: &dyn FlowSender) -> Result<Option<usize>, Errno> {
        let Self { ranges, reader, ahead, .. } = self;
        let range = &mut ranges[index];
        let sent = if let Some(bytes) = ahead.bytes(index, range.offset, range.most()) {
            flow.send(bytes, false)?
        } else {
            ahead.go_on(index, range.offset);
            let most = range.most();
            let most = reader.as_ref().map_or(most, |(reads, _)| range.source.at_hand(range.offset, most, reads));
            if most == 0 {
                return Ok(None);
            }
            match flow.socket() {
                Some(socket) => range.source.send(range.offset, most, socket)?,
                None => send_copy(range, most, reader.as_ref().map(|(reads, _)| reads), flow)?,
            }
        };
        range.offset += sent as u64;
        Ok(Some(sent))
    }

    /// Reads the next bytes into `buffer`, for a connection on which the kernel cannot send them by itself. Returns
    /// their number, 0 at the end. `None`: a read has to end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] as in [`Payload::send_to`], [`Reason::Socket`] if the file cannot be read.
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

    /// Fills the slices, one after the other, with bytes that are left to send. The first `at` of these bytes are
    /// skipped. Sends nothing. Returns `false` if a read has to end first.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] if the file ends too early, [`Reason::Socket`] if it cannot be read.
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

    /// Finds the byte with index `at` among those that are left to send. Returns the index of its range, its offset in
    /// the range's file, and how many bytes the range has from there on.
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

    /// Fills the slices, one after the other, from the offset `at` of the first range's file, with as few calls as
    /// possible. `false`: not all bytes are in memory.
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

    /// Reads at least one byte of a range. `None`: the first byte is not in memory.
    fn read_some(&self, index: usize, at: u64, slices: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Reason> {
        let source = &self.ranges[index].source;
        if let Some(bytes) = self.ahead.bytes(index, at, usize::MAX) {
            return Ok(Some(copy(bytes, slices)));
        }
        let reads = self.reader.as_ref().map(|(reads, _)| reads);
        match source.read(at, slices, reads) {
            Ok(0) => Err(Reason::FileChanged),
            Ok(bytes) => Ok(Some(bytes)),
            Err(Errno::AGAIN) if reads.is_some() => Ok(None),
            Err(errno) => Err(reason_of(errno)),
        }
    }

    /// Returns `done` if the file is unchanged. Bytes that were queued from a file that has changed since may be
    /// neither the old nor the new ones. Then the client's connection must not end as if the body were complete.
    fn still_good(&self, done: bool) -> Result<bool, Reason> {
        if self.is_unchanged() { Ok(done) } else { Err(Reason::FileChanged) }
    }
}

impl Drop for Payload {
    /// Closes the sources. A source whose closing may wait passes that to another thread.
    fn drop(&mut self) {
        let Some(reads) = &self.closer else { return };
        self.ranges.drain(..).for_each(|range| range.source.close(reads));
    }
}

/// Sends up to `most` bytes by a copy.
fn send_copy(range: &Range, most: usize, reads: Option<&Reads>, flow: &dyn FlowSender) -> Result<usize, Errno> {
    let mut buffer = vec![0; most.min(COPIED_AT_ONCE)];
    let read = range.source.read(range.offset, &mut [IoSliceMut::new(&mut buffer)], reads)?;
    if read == 0 { Ok(0) } else { flow.send(&buffer[..read], (read as u64) < range.remaining()) }
}

/// Copies bytes into the slices, one after the other. Returns how many.
fn copy(mut from: &[u8], slices: &mut [IoSliceMut<'_>]) -> usize {
    let all = from.len();
    for slice in slices {
        let bytes = slice.len().min(from.len());
        slice[..bytes].copy_from_slice(&from[..bytes]);
        from = &from[bytes..];
    }
    all - from.len()
}

/// Reason for a handoff's end that corresponds to the kernel's error of a send or read.
pub(crate) fn reason_of(errno: Errno) -> Reason {
    match errno {
        Errno::PIPE | Errno::CONNRESET => Reason::ClientGone,
        Errno::TIMEDOUT => Reason::NoProgress,
        // This includes a disk that cannot be read (EIO): the bytes read so far are right, and another backend may send
        // the rest.
        _ => Reason::Socket,
    }
}
