//! The bytes of an offer: a range of an open file, and what the file was when its header was made.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::io::{Errno, preadv};
use shunt_wire::local::{Offer, Reason};

/// What is left to send of a file's range.
#[derive(Debug)]
pub struct Payload {
    file: File,
    offset: u64,
    end: u64,
    mtime_ns: i64,
    size: u64,
}

impl Payload {
    /// Of an offer and the descriptor that came with it.
    pub fn new(file: File, offer: &Offer) -> Self {
        Self {
            file,
            offset: offer.offset,
            end: offer.offset + offer.length,
            mtime_ns: offer.mtime_ns,
            size: offer.size,
        }
    }

    /// Bytes that the kernel does not have yet.
    pub fn remaining(&self) -> u64 {
        self.end - self.offset
    }

    /// Whether the file still has the size and modification time that its header told the client.
    ///
    /// A file that was replaced by another (rename) is the same file under this descriptor, and its bytes are right.
    pub fn is_unchanged(&self) -> bool {
        let Ok(meta) = self.file.metadata() else {
            return false;
        };
        let mtime_ns = meta.mtime().wrapping_mul(1_000_000_000).wrapping_add(meta.mtime_nsec());
        meta.len() == self.size && mtime_ns == self.mtime_ns
    }

    /// Gives the socket what it takes: `true` when it has everything.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file is shorter or newer than its header said, else what the socket says.
    pub fn send_to(&mut self, socket: impl AsFd) -> Result<bool, Reason> {
        while self.offset < self.end {
            let most = usize::try_from(self.end - self.offset).unwrap_or(usize::MAX).min(1 << 30);
            match rustix::fs::sendfile(&socket, &self.file, Some(&mut self.offset), most) {
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
        let most = buffer.len().min(usize::try_from(self.remaining()).unwrap_or(usize::MAX));
        let bytes = match self.file.read_at(&mut buffer[..most], self.offset) {
            Ok(0) if most > 0 => return Err(Reason::FileChanged),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return self.read(buffer),
            Err(error) => return Err(Errno::from_io_error(&error).map_or(Reason::Socket, reason_of)),
        };
        self.offset += bytes as u64;
        self.still_good(true).map(|_| bytes)
    }

    /// Reads bytes of what is left to send, from its byte `at` on, into one slice after the other.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] where the file ends before, [`Reason::Socket`] where it cannot be read.
    pub fn read_exactly(&self, at: u64, slices: Vec<&mut [u8]>) -> Result<(), Reason> {
        let mut slices: Vec<IoSliceMut<'_>> = slices.into_iter().map(IoSliceMut::new).collect();
        let (mut slices, mut at) = (slices.as_mut_slice(), self.offset + at);
        while !slices.is_empty() {
            match preadv(&self.file, slices, at) {
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

    /// Bytes that were queued from a file that has changed since may be neither the old nor the new ones: then the
    /// client's connection must not end well.
    fn still_good(&self, done: bool) -> Result<bool, Reason> {
        if self.is_unchanged() { Ok(done) } else { Err(Reason::FileChanged) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
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

    #[test]
    fn a_peer_that_is_gone_is_told_from_a_bad_file() {
        let file = file_of(b"0123456789");
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(payload(&file, 0, 10).send_to(&ours), Err(Reason::ClientGone));
    }
}
