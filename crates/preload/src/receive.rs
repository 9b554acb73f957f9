//! What a read of a framed connection does: real bytes as they come; a reference becomes absent memory where the buffer
//! has whole pages, and is fetched where it has not.

use std::os::fd::RawFd;

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_odb::frame::{Beginning, PREAMBLE, Receiving, Want};
use shunt_odb::reference::{REFERENCE_BYTES, Reference};
use shunt_sys::userfaultfd::PAGE_BYTES;

use crate::connections::Connection;
use crate::descriptors;
use crate::hooks::{outside, real};
use crate::kernel;
use crate::memory::whole_pages;
use crate::runtime::Runtime;
use crate::send::{Errno, split};
use crate::stack;

/// A read under way.
pub struct Read<'a> {
    runtime: &'static Runtime,
    connection: Connection<'a>,
    fd: RawFd,
    /// The program's, without those that say whether to wait.
    flags: i32,
    receiving: Receiving,
    got: usize,
}

/// What comes next in a connection.
pub enum Frame {
    /// So many real bytes.
    Real(u64),
    Reference(Reference),
}

/// Why a read stops before its buffer is full.
pub enum Stop {
    /// Nothing more is there now; so many bytes of ours must be there before it makes sense to look again.
    Empty(usize),
    End,
    Failed(Errno),
    /// The direction is not framed: the kernel's own read.
    Plain,
}

/// Reads from a connection that may be framed, as recvmsg(2) does without control data.
pub fn read(runtime: &'static Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let room: usize = iov.iter().map(|part| part.iov_len).sum();
    if room == 0 || connection.receiving().want() == Want::Plain {
        return plain(runtime, fd, iov, flags);
    }
    let mut got = 0;
    loop {
        let locked = connection.lock_receiving();
        if got == 0
            && let Some(errno) = connection.take_error()
        {
            return Err(errno);
        }
        let mut read = Read::new(runtime, connection, fd, flags & !(libc::MSG_DONTWAIT | libc::MSG_WAITALL));
        read.got = got;
        let rest = split(iov, got).1;
        let stop = if flags & libc::MSG_PEEK != 0 { read.peek(rest) } else { read.fill(rest) };
        if flags & libc::MSG_PEEK == 0 {
            got = read.got;
        }
        read.keep();
        drop(locked);
        match stop {
            Ok(()) => return Ok(read.got),
            Err(Stop::Empty(_)) if read.got > 0 && (flags & libc::MSG_WAITALL == 0 || !waits(fd, flags)) => {
                return Ok(read.got);
            }
            Err(Stop::Empty(needed)) => match wait(fd, flags, needed) {
                Ok(true) => {}
                Ok(false) => return Ok(got),
                Err(errno) => return if got > 0 { Ok(got) } else { Err(errno) },
            },
            Err(Stop::End) => return Ok(read.got),
            Err(Stop::Failed(errno)) if read.got > 0 => {
                connection.keep_error(errno);
                return Ok(read.got);
            }
            Err(Stop::Failed(errno)) => return Err(errno),
            Err(Stop::Plain) => return plain(runtime, fd, iov, flags),
        }
    }
}

fn plain(runtime: &Runtime, fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    overwriting(runtime, fd, iov);
    outside(|| patient(fd, iov, flags))
}

/// Before the kernel reads into memory: what was absent there need not be fetched first. A program that gives a read a
/// buffer has given up all that was in it, once a byte comes: what is behind the bytes that come reads as zeros.
pub fn overwriting(runtime: &Runtime, fd: RawFd, iov: &[iovec]) {
    let memory = |part: &iovec| part.iov_base as usize..part.iov_base as usize + part.iov_len;
    if iov.iter().any(|part| runtime.memory.meets(&memory(part)))
        && rustix::io::ioctl_fionread(descriptors::borrow(fd)).is_ok_and(|there| there > 0)
    {
        iov.iter().for_each(|part| runtime.memory.forget(&memory(part)));
    }
}

/// recvmsg(2) that may wait: glibc's, where the thread may be cancelled.
fn patient(fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let mut message = kernel::message(iov);
    // SAFETY: the parts are the program's or our own, writable for the call.
    let got = unsafe { real::recvmsg(fd, &raw mut message, flags) };
    usize::try_from(got).map_err(|_| crate::hooks::errno())
}

fn own(bytes: &mut [u8]) -> [iovec; 1] {
    [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }]
}

/// Whether the program waits in this call for what is not there.
pub fn waits(fd: RawFd, flags: i32) -> bool {
    let nonblocking = rustix::fs::fcntl_getfl(descriptors::borrow(fd));
    flags & libc::MSG_DONTWAIT == 0 && !nonblocking.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits as the program's own call would, with its timeout and its signals, until so many bytes of ours are there. False:
/// no more will come.
pub fn wait(fd: RawFd, flags: i32, needed: usize) -> Result<bool, Errno> {
    if !waits(fd, flags) {
        return Err(libc::EAGAIN);
    }
    let mut seen = [0; REFERENCE_BYTES];
    let needed = needed.min(seen.len());
    let got = outside(|| patient(fd, &own(&mut seen[..needed]), libc::MSG_PEEK | libc::MSG_WAITALL))?;
    // Less of it: a signal came, or the end.
    Ok(got == needed || got > 0 && !ended(fd))
}

/// Whether the other end will send no more.
fn ended(fd: RawFd) -> bool {
    let asked = PollFlags::RDHUP;
    let mut wanted = [PollFd::from_borrowed_fd(descriptors::borrow(fd), asked)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut wanted, Some(&now)).is_ok() && wanted[0].revents().intersects(asked | PollFlags::HUP | PollFlags::ERR)
}

impl<'a> Read<'a> {
    /// Begins one, with the connection's lock held.
    pub fn new(runtime: &'static Runtime, connection: Connection<'a>, fd: RawFd, flags: i32) -> Self {
        Self { runtime, connection, fd, flags, receiving: connection.receiving(), got: 0 }
    }

    /// Ends it: others go on from here.
    pub fn keep(&self) {
        self.connection.set_receiving(&self.receiving);
        if self.got > 0 {
            self.connection.set_burst(0);
        }
    }

    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// The frame that is next, or what is left of it.
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

    /// Fills memory with as much as there is.
    fn fill(&mut self, mut rest: Vec<iovec>) -> Result<(), Stop> {
        while !rest.is_empty() {
            let before = self.got;
            self.step(&rest)?;
            rest = split(&rest, self.got - before).1;
        }
        Ok(())
    }

    fn step(&mut self, rest: &[iovec]) -> Result<(), Stop> {
        match self.frame()? {
            Frame::Real(left) => {
                let (now, _) = split(rest, usize::try_from(left).unwrap_or(usize::MAX));
                overwriting(self.runtime, self.fd, &now);
                let got = self.take(&now, 1)?;
                self.took_real(got);
                Ok(())
            }
            // The program wants none of it (tcp(7)).
            Frame::Reference(left) if self.flags & libc::MSG_TRUNC != 0 => {
                let room: usize = rest.iter().map(|part| part.iov_len).sum();
                self.took(&left, usize::try_from(left.length).unwrap_or(usize::MAX).min(room), None)
            }
            Frame::Reference(left) => self.deliver(&left, rest),
        }
    }

    /// Accounts for real bytes that the program has got.
    pub fn took_real(&mut self, bytes: usize) {
        self.receiving.took_real(bytes as u64);
        self.got += bytes;
    }

    /// Takes bytes from the socket without waiting.
    fn take(&mut self, into: &[iovec], needed: usize) -> Result<usize, Stop> {
        match kernel::receive(self.fd, into, self.flags | libc::MSG_DONTWAIT) {
            Ok(0) => Err(Stop::End),
            Ok(got) => Ok(got),
            Err(libc::EAGAIN) => Err(Stop::Empty(needed)),
            Err(errno) => Err(Stop::Failed(errno)),
        }
    }

    fn look(&mut self, into: &mut [u8]) -> Result<usize, Stop> {
        let before = std::mem::replace(&mut self.flags, libc::MSG_PEEK);
        let seen = self.take(&own(into), into.len());
        self.flags = before;
        seen
    }

    fn preamble(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut seen = [0; PREAMBLE.len()];
        let there = self.look(&mut seen[..bytes])?;
        match self.receiving.saw_preamble(&seen[..there]) {
            Beginning::Framed => {
                self.drain(PREAMBLE.len())?;
                self.connection.begin_frames();
                Ok(())
            }
            Beginning::Plain => Err(Stop::Plain),
            // A program's own bytes that begin as a preamble does, and end there.
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

    /// The reference that is next; `None`: it does not count, and is taken.
    fn see_reference(&mut self) -> Result<Option<Reference>, Stop> {
        let mut last = [0];
        self.look(&mut last)?;
        let seen = self.receiving.saw_reference(last[0]).map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        if seen.is_none() {
            self.drain(1)?;
            self.receiving.took_void();
        }
        Ok(seen)
    }

    /// Takes what was looked at, all of which is there.
    fn drain(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut taken = [0; REFERENCE_BYTES];
        match kernel::receive(self.fd, &own(&mut taken[..bytes]), libc::MSG_DONTWAIT) {
            Ok(got) if got == bytes => Ok(()),
            _ => Err(Stop::Failed(libc::ECONNRESET)),
        }
    }

    /// Gives the program what a reference stands for, in one part of its memory.
    fn deliver(&mut self, left: &Reference, rest: &[iovec]) -> Result<(), Stop> {
        let part = rest[0];
        let room = usize::try_from(left.length).unwrap_or(usize::MAX).min(part.iov_len);
        let start = part.iov_base as usize;
        let pages = if stack::is_own(start) { start..start } else { whole_pages(&(start..start + room)) };
        // Up to the first whole page, then whole pages, then what is behind them.
        let now = match pages.start - start {
            _ if pages.is_empty() => room,
            0 => pages.len(),
            head => head,
        };
        let this = Reference { length: now as u64, ..*left };
        self.runtime.memory.forget(&(start..start + now));
        if now < PAGE_BYTES || pages.is_empty() || pages.start != start {
            self.fetch(&this, start)?;
            self.took(left, now, None)
        } else {
            self.took(left, now, Some(start))
        }
    }

    /// Accounts for bytes of a reference that the program gets; with an address, as absent memory.
    pub fn took(&mut self, left: &Reference, bytes: usize, absent: Option<usize>) -> Result<(), Stop> {
        let (share, used_up) = self.receiving.took_reference(left, bytes as u64);
        let memory = &self.runtime.memory;
        // Kept until the bytes are there, or stand there: while it is, nobody can free them.
        let hold = share.map(|share| memory.hold(left, share));
        if let Some(start) = absent {
            let made = hold.as_ref().is_some_and(|hold| memory.make_absent(start..start + bytes, hold, left.offset));
            if !made {
                self.fetch(&Reference { length: bytes as u64, ..*left }, start)?;
            }
        }
        if used_up {
            self.drain(1)?;
        }
        self.got += bytes;
        Ok(())
    }

    /// Fetches bytes into program memory.
    fn fetch(&self, reference: &Reference, start: usize) -> Result<(), Stop> {
        // Into our own memory first: the program's may be absent, and its faults are served over the same connection.
        let bytes = self.fetched(reference, reference.length)?;
        // SAFETY: memory that the program has given to read into, as long as this; a bad address faults as memcpy would
        // where the kernel would say EFAULT.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, bytes.len()) };
        Ok(())
    }

    /// The first bytes of a reference, in memory of our own.
    pub fn fetched(&self, reference: &Reference, bytes: u64) -> Result<Vec<u8>, Stop> {
        let mut into = vec![0; bytes as usize];
        let fetched = self.runtime.memory.holders.fetch(&Reference { length: bytes, ..*reference }, &mut into);
        fetched.map(|()| into).map_err(|_| Stop::Failed(libc::ECONNRESET))
    }

    /// MSG_PEEK: what the next frame has, without taking it.
    fn peek(&mut self, rest: Vec<iovec>) -> Result<(), Stop> {
        match self.frame()? {
            Frame::Real(left) => {
                let (now, _) = split(&rest, usize::try_from(left).unwrap_or(usize::MAX));
                self.got = self.take(&now, 1)?;
            }
            Frame::Reference(left) => {
                let part = rest[0];
                let now = (part.iov_len as u64).min(left.length);
                if self.flags & libc::MSG_TRUNC == 0 {
                    self.fetch(&Reference { length: now, ..left }, part.iov_base as usize)?;
                }
                self.got = now as usize;
            }
        }
        Ok(())
    }
}

/// FIONREAD: bytes that the program could read now.
pub fn available(runtime: &Runtime, fd: RawFd, place: u32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_receiving();
    let mut receiving = connection.receiving();
    let there = rustix::io::ioctl_fionread(descriptors::borrow(fd)).map_err(|error| error.raw_os_error())?;
    let there = usize::try_from(there).unwrap_or(usize::MAX);
    match receiving.want() {
        Want::Plain => return Ok(there),
        Want::Real(left) if left >= there as u64 => return Ok(there),
        _ if there == 0 => return Ok(0),
        _ => {}
    }
    let mut bytes = vec![0; there];
    let seen = kernel::receive(fd, &own(&mut bytes), libc::MSG_PEEK | libc::MSG_DONTWAIT)?;
    Ok(count(&mut receiving, &bytes[..seen]))
}

/// Bytes of the program in what is in the socket.
fn count(receiving: &mut Receiving, mut bytes: &[u8]) -> usize {
    let mut total = 0;
    while !bytes.is_empty() {
        let used = match receiving.want() {
            Want::Preamble(length) => match receiving.saw_preamble(&bytes[..length.min(bytes.len())]) {
                Beginning::Framed => PREAMBLE.len(),
                Beginning::Plain => return bytes.len(),
                Beginning::Undecided => return total,
            },
            Want::Header(length) => {
                let now = length.min(bytes.len());
                if receiving.took_header(&bytes[..now]).is_err() {
                    return total;
                }
                now
            }
            Want::Real(left) => {
                let now = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                receiving.took_real(now as u64);
                total += now;
                now
            }
            Want::ReferencePart(length) => {
                let now = length.min(bytes.len());
                if receiving.took_reference_part(&bytes[..now]).is_err() {
                    return total;
                }
                now
            }
            Want::Reference => {
                match receiving.saw_reference(bytes[0]) {
                    Err(_) => return total,
                    Ok(None) => receiving.took_void(),
                    Ok(Some(left)) => {
                        receiving.took_reference(&left, left.length);
                        total += left.length as usize;
                    }
                }
                1
            }
            Want::Plain | Want::Broken => return total,
        };
        bytes = &bytes[used..];
    }
    total
}
