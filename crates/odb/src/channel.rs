//! One end of a connection between a reader and a store: bytes in order, in records of TLS between machines, plain on one
//! machine (a pair of Unix sockets, which no other process has).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use shunt_sys::own::OwnFd;
use shunt_wire::tls::{MAX_CONTENT_BYTES, OVERHEAD_BYTES};

use crate::records::{Broken, HEADER_BYTES, RECORD_BYTES, Records, Sealing, record_bytes};

/// Records that are sealed, or opened, together: more of them leave the processor's nearest caches before the kernel copies
/// them, fewer cost more system calls.
const RECORDS_AT_ONCE: usize = 4;
/// Content of so many.
pub const CONTENT_AT_ONCE: usize = RECORDS_AT_ONCE * MAX_CONTENT_BYTES as usize;

/// Whether the other end of a connection with a store is still there, without asking it.
pub(crate) fn is_served(socket: impl AsFd) -> bool {
    let mut ended = [PollFd::new(&socket, PollFlags::RDHUP)];
    // A signal says nothing of it.
    !matches!(poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// Where content is put together and sealed. One serves many connections.
#[derive(Debug)]
pub struct Bench {
    place: Box<[u8]>,
    used: usize,
}

impl Default for Bench {
    /// For [`CONTENT_AT_ONCE`].
    fn default() -> Self {
        Self { place: vec![0; RECORDS_AT_ONCE * RECORD_BYTES].into_boxed_slice(), used: 0 }
    }
}

impl Bench {
    /// For so much content, in one record.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        Self { place: vec![0; bytes + OVERHEAD_BYTES as usize].into_boxed_slice(), used: 0 }
    }

    /// Takes off what is on it: it is not to be sent after all, and the next that it serves is another connection.
    pub fn clear(&mut self) {
        self.used = 0;
    }
}

/// One end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnFd,
    records: Option<Records>,
    /// Whether calls wait for the other end, as long as the socket's timeouts say, or until a signal comes.
    waits: bool,
    received: Box<[u8]>,
    /// Of `received`: content that was not taken yet.
    content: Range<usize>,
    /// Of `received`, behind it: what was not opened yet.
    sealed: Range<usize>,
    /// Sealed, and not taken by the socket.
    unsent: Vec<u8>,
    /// Bytes that the socket has given, and taken.
    moved: Moved,
}

/// How many bytes have gone either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) received: u64,
    pub(crate) sent: u64,
}

fn broken(_: Broken) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Channel {
    /// An end that receives bodies, and waits for them, for moments: its caller looks how long nothing moves.
    ///
    /// # Errors
    /// These are no keys.
    pub fn of_reader(socket: OwnedFd, sealing: &Sealing) -> io::Result<Self> {
        Self::new(socket, sealing, RECORDS_AT_ONCE * RECORD_BYTES, true)
    }

    /// An end that receives small requests, and waits for nothing.
    ///
    /// # Errors
    /// These are no keys.
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

    /// Has calls wait, or not, from here on: whether they did.
    pub(crate) fn waits(&mut self, waits: bool) -> bool {
        std::mem::replace(&mut self.waits, waits)
    }

    /// How many bytes the socket has given and taken so far. As long as it gives more, the other end is there; what it takes may lie
    /// in the kernel.
    pub(crate) fn moved(&self) -> Moved {
        self.moved
    }

    /// Whether what passes is encrypted: the other end is on another machine.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.records.is_some()
    }

    /// Puts content onto the bench, as records where there are any; `fill` writes a part of it, from a byte of it on.
    ///
    /// # Errors
    /// The keys have protected as much as they may.
    ///
    /// # Panics
    /// Beyond [`CONTENT_AT_ONCE`].
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

    /// Sends what is on the bench. False: the socket has not taken all, and the rest waits here for [`Self::flush`].
    ///
    /// # Errors
    /// The connection's.
    pub fn send(&mut self, bench: &mut Bench, more: bool) -> io::Result<bool> {
        let bytes = &bench.place[..std::mem::take(&mut bench.used)];
        let sent = if self.unsent.is_empty() { self.send_some(bytes, more)? } else { 0 };
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(self.unsent.is_empty())
    }

    /// Sends what waits. False: some still does.
    ///
    /// # Errors
    /// The connection's.
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

    /// Takes content that the other end has sent: 0 where it has ended.
    ///
    /// # Errors
    /// Nothing is there now, or comes in time; what came is not of this connection; and the connection's.
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

    /// Opens what has come as a whole. False: more must come first.
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
            return Err(broken(Broken)); // a record that is too long for this end
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
