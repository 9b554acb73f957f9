//! Reads of a framed connection, which carries real bytes and references to bytes in a store (shunt_odb::frame). Real
//! bytes are received as they come. For a reference, the program's buffer becomes *absent* memory where that is
//! possible ([`crate::memory::Memory::can_be_absent`]): memory that only stands for the bytes. Elsewhere the bytes are
//! fetched into the buffer. A *reference* comes with a *share* of its payload, which keeps the bytes in the store.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::RawFd;

use libc::iovec;
use shunt_odb::frame::{Beginning, HEADER_BYTES, PREAMBLE, Receiving, Took, Want};
use shunt_odb::reference::{REFERENCE_BYTES, Reference};
use shunt_odb::touched::Touched;
use shunt_sys::userfaultfd::PAGE_BYTES;
use smallvec::SmallVec;

use crate::connections::runtime::Runtime;
use crate::connections::states::Connection;
use crate::connections::waiting::{ended, patient};
use crate::memory::any_absent;
use crate::system::inside::outside;
use crate::system::kernel::{self, Errno, own};
use crate::system::parts::{PARTS_AT_ONCE, Parts, addresses, first, length, split};
use crate::system::stack;

/// A read under way.
pub struct Read<'a> {
    runtime: &'static Runtime,
    connection: Connection<'a>,
    fd: RawFd,
    /// The program's flags, without MSG_DONTWAIT.
    flags: i32,
    receiving: Receiving,
    /// Number of bytes that the program has got.
    pub(super) got: usize,
    /// Whether this read has taken all that was in the socket.
    drained: bool,
    /// Address behind the last real bytes that this read has put into the program's memory; 0 if there are none.
    real_end: usize,
    /// Time of this read's fetches, in quarters of a microsecond, as far as it is not recorded in a share of the
    /// payload yet.
    waited: Cell<u32>,
}

/// Number of bytes to look ahead in a socket: usually a response's header and the references behind it.
const LOOK_BYTES: usize = 512;

/// Most bytes that are fetched at a time into the program's memory.
const FETCHED_AT_ONCE: usize = 1 << 20;

/// Next frame of a connection, or what is left of it.
pub enum Frame {
    /// Number of the frame's real bytes that are still to come.
    Real(u64),
    Reference(Reference),
}

/// Why a read stops before its buffer is full.
pub enum Stop {
    /// The socket has nothing more now. It must have this many bytes, headers and references included, before another
    /// look makes sense.
    Empty(usize),
    End,
    /// The read stops before absent bytes that would share a page with its last real bytes ([`Read::splits`]).
    Split,
    Failed(Errno),
    /// The direction is not framed: the caller uses the kernel's own read.
    Plain,
}

pub fn plain(runtime: &Runtime, fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    overwriting(runtime, fd, iov);
    outside(|| patient(fd, iov, flags))
}

/// Prepares buffers that the kernel is about to write received bytes into: absent bytes in them need not be fetched
/// first. Does nothing if no byte has come yet. Once a byte comes, the old contents of the whole buffer are given up.
/// Whole pages of absent memory in it, behind the bytes that come, read as zeros from then on.
pub fn overwriting(runtime: &Runtime, fd: RawFd, iov: &[iovec]) {
    if iov.iter().any(|part| runtime.memory.meets(&addresses(part)))
        && rustix::io::ioctl_fionread(kernel::borrow(fd)).is_ok_and(|there| there > 0)
    {
        iov.iter().for_each(|part| runtime.memory.overwriting(&addresses(part)));
    }
}

/// The address behind the first `bytes` bytes of some memory; 0 if `bytes` is 0.
fn end_of(memory: &[iovec], mut bytes: usize) -> usize {
    for part in memory {
        if bytes <= part.iov_len {
            return if bytes > 0 { part.iov_base as usize + bytes } else { 0 };
        }
        bytes -= part.iov_len;
    }
    0
}

impl<'a> Read<'a> {
    /// Begins a read. The caller holds the lock of the receiving direction.
    pub fn new(runtime: &'static Runtime, connection: Connection<'a>, fd: RawFd, flags: i32) -> Self {
        let receiving = connection.receiving();
        let (got, drained, real_end, waited) = (0, false, 0, Cell::new(0));
        Self { runtime, connection, fd, flags, receiving, got, drained, real_end, waited }
    }

    /// Notes that the program has got `bytes` more bytes. If these are the last bytes that it was told of (FIONREAD,
    /// MSG_PEEK), the program may wait for an edge (EPOLLET) without another read. The header or reference that comes
    /// next may keep the socket's receive window shut. So this takes it from the socket.
    pub fn tidy(&mut self, bytes: usize) {
        if self.connection.took_told(bytes)
            && !self.drained
            && let Err(Stop::Failed(errno)) = self.frame()
        {
            self.connection.keep_error(errno);
        }
    }

    /// Ends the read, and stores the state for the next one.
    pub fn keep(&self) {
        if self.got > 0 && self.flags & libc::MSG_PEEK == 0 {
            self.connection.heard();
        }
        self.connection.set_receiving(&self.receiving);
    }

    /// State of the receiving direction.
    pub fn state(&self) -> Receiving {
        self.receiving
    }

    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Returns the next frame, or what is left of it.
    pub fn frame(&mut self) -> Result<Frame, Stop> {
        loop {
            match self.receiving.want() {
                Want::Preamble(bytes) => self.preamble(bytes)?,
                Want::Header(bytes) => self.header(bytes)?,
                Want::Real(left) => return Ok(Frame::Real(left)),
                Want::ReferencePart(bytes) => self.reference_part(bytes)?,
                Want::Reference => {
                    if let Some(left) = self.see_reference()? {
                        return Ok(Frame::Reference(left));
                    }
                }
                Want::Plain => return Err(Stop::Plain),
                Want::Broken => return Err(Stop::Failed(libc::ECONNRESET)),
            }
        }
    }

    /// Fills memory with as many bytes as the socket has for the program.
    pub(super) fn fill(&mut self, mut rest: Parts) -> Result<(), Stop> {
        while !rest.is_empty() {
            let before = self.got;
            self.step(&rest)?;
            if self.drained {
                // The socket has nothing more: the rest of the buffer is for another read.
                return if length(&rest) == self.got - before { Ok(()) } else { Err(Stop::Empty(1)) };
            }
            rest = split(&rest, self.got - before).1;
        }
        Ok(())
    }

    fn step(&mut self, rest: &[iovec]) -> Result<(), Stop> {
        if self.flags & libc::MSG_TRUNC != 0 {
            return self.pass_over(rest);
        }
        match self.receiving.want() {
            Want::Preamble(bytes) => self.preamble(bytes),
            Want::Header(_) => self.look_ahead(rest),
            Want::Real(left) => self.real(rest, left, &mut []),
            Want::ReferencePart(bytes) => self.reference_part(bytes),
            Want::Reference if self.splits(rest[0].iov_base as usize) => Err(Stop::Split),
            Want::Reference => match self.see_reference()? {
                Some(left) => self.deliver(&left, rest),
                None => Ok(()),
            },
            Want::Plain => Err(Stop::Plain),
            Want::Broken => Err(Stop::Failed(libc::ECONNRESET)),
        }
    }

    /// Takes bytes that the program does not want (tcp(7), MSG_TRUNC).
    fn pass_over(&mut self, rest: &[iovec]) -> Result<(), Stop> {
        match self.frame()? {
            Frame::Real(left) => {
                let (now, _) = split(rest, usize::try_from(left).unwrap_or(usize::MAX));
                let got = self.take(&now, 1)?;
                self.took_real(got);
                Ok(())
            }
            Frame::Reference(left) => {
                let now = usize::try_from(left.length).unwrap_or(usize::MAX).min(length(rest));
                self.took(&left, now, &[])
            }
        }
    }

    /// Whether the read ends before `start`, with the real bytes that it has got. Otherwise absent bytes would come
    /// into the same page, behind the real ones. A program looks at real bytes as soon as it has them, and the page
    /// would have to be fetched for that.
    fn splits(&self, start: usize) -> bool {
        self.real_end == start
            && start != 0
            && !start.is_multiple_of(PAGE_BYTES)
            && self.flags & libc::MSG_WAITALL == 0
            && !self.connection.was_shown()
            && !self.runtime.memory.can_be_absent(&(start..start + 1)).is_empty()
    }

    /// Looks at the bytes in the socket once (MSG_PEEK), and takes the frames that it sees by one more system call.
    fn look_ahead(&mut self, rest: &[iovec]) -> Result<(), Stop> {
        let mut looked = [0; LOOK_BYTES];
        let there = self.look(&mut looked, 1)?;
        let seen = &looked[..there];
        self.drained = there < LOOK_BYTES;
        let mut rest = Parts::from_slice(rest);
        let mut at = 0;
        loop {
            let new = &seen[at..];
            match self.receiving.want() {
                _ if new.is_empty() => break,
                Want::Header(bytes) => {
                    let now = bytes.min(new.len());
                    self.receiving.took_header(&new[..now]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
                    at += now;
                }
                Want::Real(left) if left <= new.len() as u64 && left <= length(&rest) as u64 => {
                    self.place(&rest, &new[..left as usize]);
                    self.receiving.took_real(left);
                    self.got += left as usize;
                    self.real_end = end_of(&rest, left as usize);
                    rest = split(&rest, left as usize).1;
                    at += left as usize;
                }
                Want::Real(_) if rest.is_empty() => break,
                Want::Real(left) => {
                    self.drained = false;
                    return self.real(&rest, left, &mut looked[..at]);
                }
                Want::ReferencePart(bytes) => {
                    let now = bytes.min(new.len());
                    self.receiving.took_reference_part(&new[..now]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
                    at += now;
                }
                Want::Reference => {
                    let counts = self.receiving.saw_reference(new[0]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
                    if counts.is_some() {
                        self.drained = false;
                        break;
                    }
                    self.receiving.took_void();
                    at += 1;
                }
                Want::Preamble(_) | Want::Plain | Want::Broken => return Err(Stop::Failed(libc::ECONNRESET)),
            }
        }
        Self::drain(self.fd, &mut looked[..at])
    }

    /// Receives a frame's real bytes into the program's memory. `left`: number of the frame's bytes that are still to
    /// come. `seen`: bytes before these in the socket, which were looked at and are taken by the same system call.
    fn real(&mut self, rest: &[iovec], left: u64, seen: &mut [u8]) -> Result<(), Stop> {
        let most = usize::try_from(left).unwrap_or(usize::MAX);
        let now = first(rest, most);
        overwriting(self.runtime, self.fd, &now);
        let room = length(&now);
        // If the first page stands for other bytes before these, a touch by the kernel would cause a fetch of the page.
        // So the bytes for that page are received into `edge`.
        let at_edge = self.runtime.memory.behind_absent(now[0].iov_base as usize).min(now[0].iov_len);
        let mut edge = vec![0; at_edge];
        let mut next = [0; HEADER_BYTES];
        let mut parts = Parts::new();
        if !seen.is_empty() {
            parts.extend(own(seen));
        }
        if at_edge > 0 {
            parts.extend(own(&mut edge));
            parts.extend(split(&now, at_edge).1);
        } else {
            parts.extend_from_slice(&now);
        }
        // If the frame ends with these bytes, the next frame's header is taken, too. If that header were left alone in
        // the socket, the kernel would report the socket as readable, and the program could read nothing.
        let whole = room as u64 == left;
        if whole && parts.len() < PARTS_AT_ONCE {
            parts.extend(own(&mut next));
        }
        let asked = length(&parts);
        let got = self.take(&parts, 1)?;
        let Some(behind) = got.checked_sub(seen.len()) else { return Err(Stop::Failed(libc::ECONNRESET)) };
        let real = behind.min(room);
        self.place(&now, &edge[..at_edge.min(real)]);
        self.receiving.took_real(real as u64);
        self.got += real;
        self.real_end = end_of(&now, real);
        if behind > room {
            self.receiving.took_header(&next[..behind - room]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        }
        self.drained = got < asked;
        Ok(())
    }

    /// Writes bytes to the program's buffers `rest`, from the first buffer on.
    pub fn place(&self, rest: &[iovec], mut bytes: &[u8]) {
        for part in rest {
            let (now, after) = bytes.split_at(bytes.len().min(part.iov_len));
            if now.is_empty() {
                break;
            }
            // SAFETY: memory that the program has given to read into.
            unsafe { self.runtime.memory.write(part.iov_base as usize, now) };
            bytes = after;
        }
    }

    /// Fills the buffer with zeros behind the real bytes that the read has got, up to the end of their page. The page
    /// may still stand for bytes of an earlier body there. A touch of the page would cause a fetch of these bytes, and
    /// end the process if they are lost.
    pub(super) fn give_up_behind(&self, iov: &[iovec]) {
        if self.real_end == 0 || !any_absent() || self.flags & libc::MSG_TRUNC != 0 {
            return;
        }
        let rest = split(iov, self.got).1;
        let Some(Range { start, end }) = rest.first().map(addresses) else { return };
        if self.real_end != start {
            return;
        }
        let page_end = start.next_multiple_of(PAGE_BYTES).min(end);
        if self.runtime.memory.meets(&(start..page_end)) {
            self.place(&rest[..1], &vec![0; page_end - start]);
        }
    }

    /// Accounts for real bytes that the program has got.
    pub fn took_real(&mut self, bytes: usize) {
        self.receiving.took_real(bytes as u64);
        self.got += bytes;
    }

    /// Takes bytes from the socket without waiting, or looks at them (MSG_PEEK). `needed`: number of bytes that the
    /// socket must have before another try makes sense, if it has none now.
    fn take(&mut self, into: &[iovec], needed: usize) -> Result<usize, Stop> {
        match kernel::receive(self.fd, into, self.flags & !libc::MSG_WAITALL | libc::MSG_DONTWAIT) {
            Ok(0) => Err(Stop::End),
            Ok(got) => Ok(got),
            Err(libc::EAGAIN) => Err(Stop::Empty(needed)),
            Err(errno) => Err(Stop::Failed(errno)),
        }
    }

    fn look(&mut self, into: &mut [u8], needed: usize) -> Result<usize, Stop> {
        let before = std::mem::replace(&mut self.flags, libc::MSG_PEEK);
        let seen = self.take(&own(into), needed);
        self.flags = before;
        seen
    }

    fn preamble(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut seen = [0; PREAMBLE.len()];
        // A peer without frames may send less than a preamble and wait for an answer. Usually the first byte is enough
        // to tell.
        let there = self.look(&mut seen[..bytes], 1)?;
        match self.receiving.saw_preamble(&seen[..there]) {
            Beginning::Framed => {
                Self::drain(self.fd, &mut seen)?;
                self.connection.begin_frames();
                Ok(())
            }
            Beginning::Plain => Err(Stop::Plain),
            // The stream has ended after fewer bytes than a preamble has, so these are the program's own.
            Beginning::Undecided if ended(self.fd) => {
                self.receiving = Receiving::plain();
                Err(Stop::Plain)
            }
            Beginning::Undecided => Err(Stop::Empty(bytes)),
        }
    }

    fn header(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut taken = [0; 8];
        let before = std::mem::replace(&mut self.flags, 0);
        let got = self.take(&own(&mut taken[..bytes]), 1);
        self.flags = before;
        self.receiving.took_header(&taken[..got?]).map_err(|_| Stop::Failed(libc::ECONNRESET))
    }

    fn reference_part(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut taken = [0; REFERENCE_BYTES];
        let before = std::mem::replace(&mut self.flags, 0);
        let got = self.take(&own(&mut taken[..bytes]), 1);
        self.flags = before;
        self.receiving.took_reference_part(&taken[..got?]).map_err(|_| Stop::Failed(libc::ECONNRESET))
    }

    /// Returns the next reference. If it does not count, takes it from the socket and returns `None`.
    fn see_reference(&mut self) -> Result<Option<Reference>, Stop> {
        if let Some(known) = self.receiving.known_reference().map_err(|_| Stop::Failed(libc::ECONNRESET))? {
            return Ok(Some(known));
        }
        let mut last = [0];
        self.look(&mut last, 1)?;
        let seen = self.receiving.saw_reference(last[0]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        if seen.is_none() {
            Self::drain(self.fd, &mut last)?;
            self.receiving.took_void();
        }
        Ok(seen)
    }

    /// Takes bytes from the socket that have been looked at, so all of them are there. With MSG_TRUNC, TCP copies
    /// nothing (tcp(7)).
    fn drain(fd: RawFd, looked: &mut [u8]) -> Result<(), Stop> {
        if looked.is_empty() {
            return Ok(());
        }
        match kernel::receive(fd, &own(looked), libc::MSG_DONTWAIT | libc::MSG_TRUNC) {
            Ok(got) if got == looked.len() => Ok(()),
            _ => Err(Stop::Failed(libc::ECONNRESET)),
        }
    }

    /// Takes the last byte of a reference that is used up, and as much of the next frame's header as the socket has.
    fn drain_reference(&mut self) -> Result<(), Stop> {
        let mut taken = [0; 1 + HEADER_BYTES];
        let got = kernel::receive(self.fd, &own(&mut taken), libc::MSG_DONTWAIT).unwrap_or(0);
        if got == 0 {
            return Err(Stop::Failed(libc::ECONNRESET));
        }
        self.drained = got < taken.len();
        self.receiving.took_header(&taken[1..got]).map_err(|_| Stop::Failed(libc::ECONNRESET))
    }

    /// Gives the program bytes of a reference, in its buffers up to the first one that cannot be absent as a whole. If
    /// that is the first buffer, the program gets bytes in a part of it ([`Self::deliver_part`]).
    fn deliver(&mut self, left: &Reference, rest: &[iovec]) -> Result<(), Stop> {
        let memory = &self.runtime.memory;
        if memory.recent_hold(&left.payload).is_none() {
            memory.holders.reach(left).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        }
        let mut absent: SmallVec<[Range<usize>; 4]> = SmallVec::new();
        let mut room = usize::try_from(left.length).unwrap_or(usize::MAX);
        for part in rest {
            let Range { start, end } = addresses(part);
            let wanted = start..end.min(start.saturating_add(room));
            let can = self.can_be_absent(&wanted);
            if can != wanted {
                if absent.is_empty() {
                    return self.deliver_part(left, &wanted, can);
                }
                break;
            }
            room -= wanted.len();
            absent.push(wanted);
            if room == 0 {
                break;
            }
        }
        let bytes = absent.iter().map(Range::len).sum();
        self.took(left, bytes, &absent)
    }

    fn can_be_absent(&self, range: &Range<usize>) -> Range<usize> {
        if stack::is_own(range.start) { range.start..range.start } else { self.runtime.memory.can_be_absent(range) }
    }

    /// Delivers into memory of which only the range `absent` can be absent. One call fills one of three parts: the
    /// bytes before that range, the range, or the bytes behind it.
    fn deliver_part(&mut self, left: &Reference, wanted: &Range<usize>, absent: Range<usize>) -> Result<(), Stop> {
        let start = wanted.start;
        if !absent.is_empty() && absent.start == start {
            let bytes = absent.len();
            return self.took(left, bytes, &[absent]);
        }
        let now = if absent.is_empty() { wanted.len() } else { absent.start - start };
        self.fetch(&Reference { length: now as u64, ..*left }, start)?;
        self.took(left, now, &[])
    }

    /// Accounts for the first `bytes` bytes of the reference `left`, which the program gets. `absent`: memory that is
    /// to stand for these bytes; empty if the program gets them in another way.
    pub fn took(&mut self, left: &Reference, bytes: usize, absent: &[Range<usize>]) -> Result<(), Stop> {
        let from_writer = self.receiving.is_from_writer();
        let memory = &self.runtime.memory;
        // The share is kept until memory has the bytes or stands for them. While it is kept, the payload cannot be
        // freed.
        let recent = memory.recent_hold(&left.payload);
        recent.iter().for_each(|hold| hold.reaches(left.offset + left.length));
        let Took { share, over, used_up } = match recent {
            Some(_) => self.receiving.took_more(left, bytes as u64),
            None => self.receiving.took_reference(left, bytes as u64),
        };
        let hold = recent.or_else(|| share.map(|share| memory.hold(left, share, from_writer)));
        memory.returns.give_units(left.payload, over, Touched::default());
        let mut fetched = bytes - absent.iter().map(Range::len).sum::<usize>();
        let mut offset = left.offset;
        for addresses in absent {
            let length = addresses.len() as u64;
            let made = hold.as_ref().is_some_and(|hold| memory.make_absent(addresses.clone(), hold, offset));
            if !made {
                fetched += addresses.len();
                if let Err(stop) = self.fetch(&Reference { offset, length, ..*left }, addresses.start) {
                    // The bytes are taken from the reference and not delivered. A program that reads on must not get
                    // the bytes behind them.
                    self.receiving.break_off();
                    return Err(stop);
                }
            }
            offset += length;
        }
        if let Some(hold) = hold.filter(|_| fetched > 0 && self.flags & libc::MSG_TRUNC == 0) {
            hold.fetched(fetched as u64);
            hold.waited(self.waited.take());
        }
        self.got += bytes;
        if used_up { self.drain_reference() } else { Ok(()) }
    }

    /// Fetches bytes into the program's memory.
    fn fetch(&self, reference: &Reference, start: usize) -> Result<(), Stop> {
        let mut done = 0;
        while done < reference.length {
            let length = (reference.length - done).min(FETCHED_AT_ONCE as u64);
            let part = Reference { offset: reference.offset + done, length, ..*reference };
            // The bytes are fetched into the library's own memory first. The program's memory may be absent, and the
            // thread that serves its faults needs the same connection to the holder.
            let bytes = self.fetched(&part, length)?;
            // SAFETY: memory that the program has given to read into; it is at least this long.
            unsafe { self.runtime.memory.write(start + done as usize, &bytes) };
            done += length;
        }
        Ok(())
    }

    /// Fetches the first `bytes` bytes of a reference into memory of the library's own.
    pub fn fetched(&self, reference: &Reference, bytes: u64) -> Result<Vec<u8>, Stop> {
        let mut into = vec![0; bytes as usize];
        let waited = self.runtime.memory.fetch(&Reference { length: bytes, ..*reference }, &mut into);
        let waited = waited.map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        self.waited.set(self.waited.get().saturating_add(waited));
        Ok(into)
    }
}
