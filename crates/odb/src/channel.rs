//! One end of a connection between a store, which has the payloads of a machine's programs, and a reader, which fetches
//! them. The connection carries bytes in order. Between machines they are in TLS records. On one machine they are
//! plain, in a pair of Unix sockets that no other process has. To *seal* content is to encrypt it into a record, and to
//! *open* a record is to decrypt it.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use shunt_sys::own::OwnFd;
use shunt_wire::tls::{MAX_CONTENT_BYTES, OVERHEAD_BYTES};

use crate::records::{Broken, HEADER_BYTES, RECORD_BYTES, Records, Sealing, record_bytes};

/// Number of records that are sealed, or received, together. More of them would leave the processor's nearest caches
/// before the kernel copies them; fewer would cost more system calls.
const RECORDS_AT_ONCE: usize = 4;
/// Number of content bytes in [`RECORDS_AT_ONCE`] records.
pub const CONTENT_AT_ONCE: usize = RECORDS_AT_ONCE * MAX_CONTENT_BYTES as usize;

/// Whether the other end of a connection with a store is still open. Checked without a message.
pub(crate) fn is_served(socket: impl AsFd) -> bool {
    let mut ended = [PollFd::new(&socket, PollFlags::RDHUP)];
    // An interrupted poll tells nothing, and counts as open.
    !matches!(poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// Buffer in which content is put together and sealed. One bench serves many connections in turn.
#[derive(Debug)]
pub struct Bench {
    place: Box<[u8]>,
    used: usize,
}

impl Default for Bench {
    /// Makes a bench for [`CONTENT_AT_ONCE`] bytes of content.
    fn default() -> Self {
        Self { place: vec![0; RECORDS_AT_ONCE * RECORD_BYTES].into_boxed_slice(), used: 0 }
    }
}

impl Bench {
    /// Makes a bench for this many bytes of content, in one record.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        Self { place: vec![0; bytes + OVERHEAD_BYTES as usize].into_boxed_slice(), used: 0 }
    }

    /// Empties the bench without sending, so that it can serve another connection.
    pub fn clear(&mut self) {
        self.used = 0;
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Channel {
    socket: OwnFd,
    records: Option<Records>,
    /// Whether calls wait for the other end, at most until the socket's timeout has passed or a signal comes.
    waits: bool,
    received: Box<[u8]>,
    /// Content in `received` that was not taken yet.
    content: Range<usize>,
    /// Bytes in `received`, after the content, of records that were not opened yet.
    sealed: Range<usize>,
    /// Bytes that are to be sent, and that the socket has not taken. They are sealed if the connection is encrypted.
    unsent: Vec<u8>,
    /// Numbers of bytes that the socket has delivered and taken.
    moved: Moved,
}

/// Numbers of bytes that a socket has moved, in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) received: u64,
    pub(crate) sent: u64,
}

fn broken(_: Broken) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Channel {
    /// Makes a reader's end, which receives bodies. Its calls wait for short times; the caller checks how long nothing
    /// has moved.
    ///
    /// # Errors
    /// The keys are invalid.
    pub fn of_reader(socket: OwnedFd, sealing: &Sealing) -> io::Result<Self> {
        Self::new(socket, sealing, RECORDS_AT_ONCE * RECORD_BYTES, true)
    }

    /// Makes a store's end, which receives small requests. Its calls never wait.
    ///
    /// # Errors
    /// The keys are invalid.
    pub fn of_store(socket: OwnedFd, sealing: &Sealing) -> io::Result<Self> {
        Self::new(socket, sealing, 4096, false)
    }

    fn new(socket: OwnedFd, sealing: &Sealing, bytes: usize, waits: bool) -> io::Result<Self> {
        let records = match sealing.suite.get() {
            0 => None,
            _ => Some(Records::new(sealing).ok_or_else(|| broken(Broken))?),
        };
        let received = vec![0; bytes].into_boxed_slice();
        Ok(Self {
            socket: OwnFd::new(socket),
            records,
            waits,
            received,
            content: 0..0,
            sealed: 0..0,
            unsent: Vec::new(),
            moved: Moved::default(),
        })
    }

    /// Sets whether calls wait for the other end from now on. Returns whether they did before.
    pub(crate) fn waits(&mut self, waits: bool) -> bool {
        std::mem::replace(&mut self.waits, waits)
    }

    /// Numbers of bytes that the socket has delivered and taken so far. While it delivers more, the other end is alive.
    /// Bytes that it has taken may still be in this machine's kernel, and prove nothing.
    pub(crate) fn moved(&self) -> Moved {
        self.moved
    }

    /// Whether the connection is encrypted, which means that the other end is on another machine.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.records.is_some()
    }

    /// Puts `bytes` bytes of content onto the bench, in records if the connection is encrypted. `fill` gets an offset
    /// in the content and a buffer, and fills the buffer with the content from there on.
    ///
    /// # Errors
    /// The keys have reached their limit.
    ///
    /// # Panics
    /// Panics if the bench has no room. A default bench has room for [`CONTENT_AT_ONCE`] bytes.
    pub fn put(&mut self, bench: &mut Bench, bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) -> io::Result<()> {
        let Some(records) = &mut self.records else {
            fill(0, &mut bench.place[bench.used..][..bytes]);
            bench.used += bytes;
            return Ok(());
        };
        for from in (0..bytes).step_by(MAX_CONTENT_BYTES.into()) {
            let now = (bytes - from).min(MAX_CONTENT_BYTES.into());
            let record = &mut bench.place[bench.used..][..now + OVERHEAD_BYTES as usize];
            fill(from, &mut record[HEADER_BYTES..HEADER_BYTES + now]);
            records.seal(record).map_err(broken)?;
            bench.used += record.len();
        }
        Ok(())
    }

    /// Sends the content of the bench. Returns false if the socket has not taken all of it; the channel keeps the rest
    /// for [`Self::flush`].
    ///
    /// # Errors
    /// Returns the kernel's error of send(2).
    pub fn send(&mut self, bench: &mut Bench, more: bool) -> io::Result<bool> {
        let bytes = &bench.place[..std::mem::take(&mut bench.used)];
        let sent = if self.unsent.is_empty() { self.send_some(bytes, more)? } else { 0 };
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(self.unsent.is_empty())
    }

    /// Sends the bytes that the channel has kept. Returns false if the socket has not taken all of them.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2).
    pub fn flush(&mut self) -> io::Result<bool> {
        if !self.unsent.is_empty() {
            let unsent = std::mem::take(&mut self.unsent);
            let sent = self.send_some(&unsent, false)?;
            self.unsent.extend_from_slice(&unsent[sent..]);
        }
        Ok(self.unsent.is_empty())
    }

    fn send_some(&mut self, bytes: &[u8], more: bool) -> io::Result<usize> {
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::MORE, more);
        flags.set(SendFlags::DONTWAIT, !self.waits);
        let mut sent = 0;
        while sent < bytes.len() {
            match rustix::net::send(&self.socket, &bytes[sent..], flags) {
                Ok(more) => {
                    sent += more;
                    self.moved.sent += more as u64;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) if self.waits => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(sent)
    }

    /// Takes content that the other end has sent, and returns its length. Returns 0 if the other end has closed the
    /// connection.
    ///
    /// # Errors
    /// `WouldBlock` if nothing came in time, `InvalidData` if no valid record came, else the kernel's error of recv(2).
    pub fn take(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.content.is_empty() {
            if !self.open()? && self.receive()? == 0 {
                return Ok(0);
            }
        }
        let now = self.content.len().min(into.len());
        into[..now].copy_from_slice(&self.received[self.content.start..][..now]);
        self.content.start += now;
        Ok(now)
    }

    /// Opens the next record, if all of it has come. Returns false if more bytes have to come first.
    fn open(&mut self) -> io::Result<bool> {
        let there = &mut self.received[self.sealed.clone()];
        let Some(records) = &mut self.records else {
            self.content = self.sealed.clone();
            self.sealed.start = self.sealed.end;
            return Ok(!self.content.is_empty());
        };
        let Some(bytes) = record_bytes(there).map_err(broken)? else { return Ok(false) };
        let Some(record) = there.get_mut(..bytes) else { return Ok(false) };
        let content = records.open(record).map_err(broken)?;
        let start = self.sealed.start + HEADER_BYTES;
        self.content = start..start + content;
        self.sealed.start += bytes;
        Ok(true)
    }

    fn receive(&mut self) -> io::Result<usize> {
        self.received.copy_within(self.sealed.clone(), 0);
        self.sealed = 0..self.sealed.len();
        self.content = 0..0;
        let room = &mut self.received[self.sealed.end..];
        if room.is_empty() {
            return Err(broken(Broken)); // the record is longer than this end accepts
        }
        let flags = if self.waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        loop {
            match rustix::net::recv(&self.socket, &mut *room, flags) {
                Ok((got, _)) => {
                    self.sealed.end += got;
                    self.moved.received += got as u64;
                    return Ok(got);
                }
                Err(Errno::INTR) if !self.waits => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
