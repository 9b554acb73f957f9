//! The bytes of a handoff: a range of an offered file, and what the file was when its header was made; or ranges of what
//! somebody keeps for as long as they are sent.

use std::cell::Cell;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::{Errno, pread, preadv};
use shunt_sys::shared::SharedMemory;
use shunt_wire::local::{Offer, Reason};

use crate::identity::FileIdentity;

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

#[derive(Debug)]
enum Source {
    /// An offer's, with the modification time and the size that its header told the client. `None`: what is in front of the
    /// range may be written to.
    Offered {
        file: File,
        mtime_ns: Option<i64>,
        size: u64,
        /// As the first look found it.
        first: Cell<Option<FileIdentity>>,
        /// A later look found it otherwise: replaced by another, as a rule.
        has_changed: Cell<bool>,
        /// What it must be, where others rely on its bytes.
        proven: Option<FileIdentity>,
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
    fn is_unchanged(&self) -> bool {
        let (file, mtime_ns, size, first, has_changed, proven) = match self {
            Self::Offered { file, mtime_ns, size, first, has_changed, proven } => {
                (file, mtime_ns, size, first, has_changed, proven)
            }
            Self::Kept(kept) => return kept.is_unchanged(),
        };
        let Ok(meta) = file.metadata() else {
            return false;
        };
        let now = FileIdentity::of(&meta);
        has_changed.set(has_changed.get() || first.get().is_some_and(|first| first != now));
        first.set(first.get().or(Some(now)));
        let as_told = now.size == *size && mtime_ns.is_none_or(|then| then == now.mtime_ns);
        as_told && proven.is_none_or(|proven| proven == now)
    }
}

/// What is left to send of one range.
#[derive(Debug)]
struct Range {
    source: Source,
    offset: u64,
    end: u64,
}

impl Range {
    fn remaining(&self) -> u64 {
        self.end - self.offset
    }

    /// Some of it.
    fn send_to(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let most = usize::try_from(self.remaining()).unwrap_or(usize::MAX).min(1 << 30);
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

/// What is left to send of a payload.
#[derive(Debug)]
pub struct Payload {
    ranges: Vec<Range>,
    /// Which of them is next.
    next: usize,
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
        let source = Source::Offered { file, mtime_ns, size, first, has_changed, proven };
        Self { ranges: vec![Range { source, offset: offer.offset, end: offer.offset + offer.length }], next: 0 }
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
        Self { ranges: kept.into_iter().map(range).collect(), next: 0 }
    }

    /// Bytes that the kernel does not have yet.
    pub fn remaining(&self) -> u64 {
        self.ranges.iter().map(Range::remaining).sum()
    }

    /// Whether an offer's file still has the size and modification time that its header told the client, and what is kept
    /// the bytes that it had.
    ///
    /// A file that was replaced by another (rename) is the same file under this descriptor, and its bytes are right. So are
    /// those of a body behind a header that is rewritten ([`Offer::BODY`]): then the size alone is compared.
    pub fn is_unchanged(&self) -> bool {
        self.ranges.iter().all(|range| range.source.is_unchanged())
    }

    /// The file that all of it is of, as it was at the first look; `None` where there is none, or it has changed since.
    pub fn file(&self) -> Option<(&File, FileIdentity)> {
        match &self.ranges[..] {
            [Range { source: Source::Offered { file, first, has_changed, .. }, .. }] if !has_changed.get() => {
                Some((file, first.get()?))
            }
            _ => None,
        }
    }

    /// Where it ends in its last file, in bytes.
    pub fn end(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// The range that is next, if anything is left.
    fn next(&mut self) -> Option<&mut Range> {
        while self.ranges.get(self.next)?.remaining() == 0 {
            self.next += 1;
        }
        self.ranges.get_mut(self.next)
    }

    /// Gives the socket what it takes: `true` when it has everything.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file is shorter or newer than its header said, else what the socket says.
    pub fn send_to(&mut self, socket: impl AsFd) -> Result<bool, Reason> {
        while let Some(range) = self.next() {
            match range.send_to(socket.as_fd()) {
                Ok(0) => return Err(Reason::FileChanged),
                Ok(_) => {}
                Err(Errno::AGAIN) => return self.still_good(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(reason_of(errno)),
            }
        }
        self.still_good(true)
    }

    /// Reads the next bytes into `buffer`, for a way that the kernel cannot send on by itself: how many, 0 at the end.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] as [`Payload::send_to`].
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Reason> {
        let bytes = match self.next() {
            None => 0,
            Some(range) => {
                let most = buffer.len().min(usize::try_from(range.remaining()).unwrap_or(usize::MAX));
                let bytes = read_at(&range.source, range.offset, &mut buffer[..most])?;
                range.offset += bytes as u64;
                bytes
            }
        };
        self.still_good(true).map(|_| bytes)
    }

    /// Reads bytes of what is left to send, from its byte `at` on, into one slice after the other.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file ends before, [`Reason::Socket`] where it cannot be read.
    pub fn read_exactly(&self, at: u64, slices: Vec<&mut [u8]>) -> Result<(), Reason> {
        if let [range] = &self.ranges[..] {
            return read_all(&range.source, range.offset + at, slices);
        }
        let mut at = at;
        for mut slice in slices {
            while !slice.is_empty() {
                let (source, offset, left) = self.find(at).ok_or(Reason::FileChanged)?;
                let most = slice.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let bytes = read_at(source, offset, &mut slice[..most])?;
                (slice, at) = (&mut slice[bytes..], at + bytes as u64);
            }
        }
        Ok(())
    }

    /// Where the byte `at` of what is left is, and how many follow it there.
    fn find(&self, mut at: u64) -> Option<(&Source, u64, u64)> {
        for range in &self.ranges {
            let here = range.remaining();
            if at < here {
                return Some((&range.source, range.offset + at, here - at));
            }
            at -= here;
        }
        None
    }

    /// Bytes that were queued from a file that has changed since may be neither the old nor the new ones: then the
    /// client's connection must not end well.
    fn still_good(&self, done: bool) -> Result<bool, Reason> {
        if self.is_unchanged() { Ok(done) } else { Err(Reason::FileChanged) }
    }
}

/// At least one byte, if `into` has room for it.
fn read_at(source: &Source, at: u64, into: &mut [u8]) -> Result<usize, Reason> {
    loop {
        match pread(source, &mut *into, at) {
            Ok(0) if !into.is_empty() => return Err(Reason::FileChanged),
            Ok(bytes) => return Ok(bytes),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(reason_of(errno)),
        }
    }
}

/// One slice after the other, by as few calls as may be.
fn read_all(source: &Source, mut at: u64, slices: Vec<&mut [u8]>) -> Result<(), Reason> {
    let mut slices: Vec<IoSliceMut<'_>> = slices.into_iter().map(IoSliceMut::new).collect();
    let mut slices = slices.as_mut_slice();
    while !slices.is_empty() {
        match preadv(source, slices, at) {
            Ok(0) => return Err(Reason::FileChanged),
            Ok(bytes) => {
                IoSliceMut::advance_slices(&mut slices, bytes);
                at += bytes as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(reason_of(errno)),
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;
    use zerocopy::FromZeros;

    fn payload(file: &File, offset: u64, length: u64) -> Payload {
        let meta = file.metadata().unwrap();
        let mut offer = Offer::new_zeroed();
        (offer.offset, offer.length, offer.size) = (offset, length, meta.len());
        offer.mtime_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
        Payload::new(file.try_clone().unwrap(), &offer)
    }

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn memory_of(bytes: &[u8]) -> SharedMemory {
        let memory = SharedMemory::create("kept", bytes.len()).unwrap();
        memory.write(0, bytes);
        memory
    }

    #[test]
    fn sends_just_its_range() {
        let file = file_of(b"0123456789");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(payload(&file, 2, 5).send_to(&ours), Ok(true));
        drop(ours);
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"23456");
    }

    #[test]
    fn ranges_come_one_after_the_other() {
        let whole = || {
            let kept = |bytes: &[u8]| -> Box<dyn Kept> { Box::new(memory_of(bytes)) };
            Payload::of_kept([(kept(b"0123456789"), 2, 5), (kept(b"abc"), 0, 3), (kept(b"xyz"), 1, 1)])
        };
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut payload = whole();
        assert_eq!((payload.remaining(), payload.send_to(&ours), payload.remaining()), (9, Ok(true), 0));
        drop(ours);
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"23456abcy");
        for at in 0..=9 {
            let (mut first, mut second) = ([0; 2], vec![0; 9usize.saturating_sub(at + 2)]);
            let read = whole().read_exactly(at as u64, vec![&mut first, &mut second]);
            assert_eq!(read.is_ok(), at <= 7, "from {at}");
            assert!(read.is_err() || [&first[..], &second].concat() == got[at..]);
        }
    }

    #[test]
    fn what_was_sent_stays_as_it_was_when_its_place_is_used_again() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sends = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut reads, _) = listener.accept().unwrap();
        let memory = memory_of(&[b'a'; 40_000]);
        let file = File::from(memory.as_fd().try_clone_to_owned().unwrap());
        let mut payload = Payload::of_kept([(Box::new(memory) as Box<dyn Kept>, 0, 40_000)]);
        sends.set_nonblocking(true).unwrap();
        assert_eq!(payload.send_to(&sends), Ok(true));
        std::os::unix::fs::FileExt::write_all_at(&file, &[b'b'; 40_000], 0).unwrap();
        let mut got = vec![0; 40_000];
        std::io::Read::read_exact(&mut reads, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == b'a'));
    }

    /// Kept in a file of so many bytes, as long as it has them.
    #[derive(Debug)]
    struct InFile(File, u64);

    impl AsFd for InFile {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl Kept for InFile {
        fn send(&self, mut offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
            Ok(rustix::fs::sendfile(socket, &self.0, Some(&mut offset), bytes)?)
        }

        fn is_unchanged(&self) -> bool {
            self.0.metadata().is_ok_and(|now| now.len() == self.1)
        }
    }

    #[test]
    fn what_is_kept_in_a_file_is_looked_at_after_it_was_sent_or_read() {
        let mut file = file_of(b"0123456789");
        let kept = |file: &File| {
            let kept: Box<dyn Kept> = Box::new(InFile(file.try_clone().unwrap(), 10));
            Payload::of_kept([(kept, 2, 5)])
        };
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(kept(&file).send_to(&ours), Ok(true));
        let mut got = [0; 5];
        theirs.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"23456");
        file.write_all(b"x").unwrap();
        assert_eq!(kept(&file).send_to(&ours), Err(Reason::FileChanged));
        assert_eq!(kept(&file).read(&mut got), Err(Reason::FileChanged));
        assert!(!kept(&file).is_unchanged());
    }

    #[test]
    fn reads_just_its_range_and_notices_a_change() {
        let file = file_of(b"0123456789");
        let (mut whole, mut buffer) = (payload(&file, 2, 5), [0; 3]);
        let mut got = Vec::new();
        while let bytes @ 1.. = whole.read(&mut buffer).unwrap() {
            got.extend_from_slice(&buffer[..bytes]);
        }
        assert_eq!(got, b"23456");
        let mut cut = payload(&file, 2, 5);
        file.set_len(4).unwrap();
        assert_eq!(cut.read(&mut buffer), Err(Reason::FileChanged));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told_from_one_that_has_changed() {
        // Nothing is mapped at 0: EIO.
        let mut unreadable = payload(&File::open("/proc/self/mem").unwrap(), 0, 5);
        assert_eq!(unreadable.read(&mut [0; 5]), Err(Reason::Socket));
        assert_eq!(unreadable.read_exactly(0, vec![&mut [0; 5]]), Err(Reason::Socket));
    }

    #[test]
    fn a_truncated_file_is_noticed() {
        let file = file_of(&[7; 1 << 20]);
        let mut payload = payload(&file, 0, 1 << 20);
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        assert_eq!(payload.send_to(&ours), Ok(false));
        file.set_len(10).unwrap();
        assert!(!payload.is_unchanged());
        assert_eq!(payload.send_to(&ours), Err(Reason::FileChanged));
    }

    #[test]
    fn a_file_written_in_place_is_noticed() {
        let mut file = file_of(b"0123456789");
        let mut payload = payload(&file, 0, 10);
        std::thread::sleep(std::time::Duration::from_millis(20));
        file.write_all(b"x").unwrap();
        file.set_len(10).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(payload.send_to(&ours), Err(Reason::FileChanged));
    }

    /// As nginx does with the files of its cache when it revalidates.
    #[test]
    fn a_body_behind_a_header_that_is_rewritten_is_whole() {
        let file = file_of(b"header, body");
        let body = || {
            let mut offer = Offer::new_zeroed();
            (offer.offset, offer.length, offer.size, offer.flags) = (8, 4, 12, Offer::BODY);
            Payload::new(file.try_clone().unwrap(), &offer)
        };
        let (mut begun, mut buffer) = (body(), [0; 4]);
        assert!(begun.is_unchanged());
        std::os::unix::fs::FileExt::write_all_at(&file, b"HEADER", 0).unwrap();
        assert_eq!((begun.is_unchanged(), begun.read(&mut buffer), &buffer), (true, Ok(4), b"body"));
        file.set_len(13).unwrap();
        assert_eq!(body().read(&mut buffer), Err(Reason::FileChanged));
    }

    #[test]
    fn a_peer_that_is_gone_is_told_from_a_bad_file() {
        let file = file_of(b"0123456789");
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(payload(&file, 0, 10).send_to(&ours), Err(Reason::ClientGone));
    }
}
