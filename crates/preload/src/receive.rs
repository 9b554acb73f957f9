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
use crate::hooks::real;
use crate::memory::whole_pages;
use crate::runtime::Runtime;
use crate::send::{Errno, split};

/// A read under way.
struct Read<'a> {
    runtime: &'static Runtime,
    connection: Connection<'a>,
    fd: RawFd,
    /// The program's, without those that say whether to wait.
    flags: i32,
    receiving: Receiving,
    got: usize,
}

/// Why a read stops before its buffer is full.
enum Stop {
    /// Nothing more is there now; so many bytes of ours must be there before it makes sense to look again.
    Empty(usize),
    End,
    Failed(Errno),
    /// The direction is not framed: the kernel's own read.
    Plain,
}

const NOT_OURS: i32 = libc::MSG_OOB | libc::MSG_ERRQUEUE;

/// Reads from a connection that may be framed, as recvmsg(2) does without control data.
pub fn read(runtime: &'static Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let room: usize = iov.iter().map(|part| part.iov_len).sum();
    if flags & NOT_OURS != 0 || room == 0 || connection.receiving().want() == Want::Plain {
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
        let kept = flags & !(libc::MSG_DONTWAIT | libc::MSG_WAITALL);
        let receiving = connection.receiving();
        let mut read = Read { runtime, connection, fd, flags: kept, receiving, got };
        let rest = split(iov, got).1;
        let stop = if flags & libc::MSG_PEEK != 0 { read.peek(rest) } else { read.fill(rest) };
        if flags & libc::MSG_PEEK == 0 {
            got = read.got;
        }
        connection.set_receiving(&read.receiving);
        if read.got > 0 {
            connection.set_burst(0);
        }
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
    kernel(fd, iov, flags)
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

/// recvmsg(2) by the kernel, not by our own symbol.
fn kernel(fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len().min(libc::UIO_MAXIOV as usize);
    // SAFETY: the parts are the program's or our own, writable for the call.
    let got = unsafe { real::recvmsg(fd, &raw mut message, flags) };
    usize::try_from(got).map_err(|_| crate::hooks::errno())
}

fn own(bytes: &mut [u8]) -> [iovec; 1] {
    [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }]
}

/// Whether the program waits in this call for what is not there.
fn waits(fd: RawFd, flags: i32) -> bool {
    let nonblocking = rustix::fs::fcntl_getfl(descriptors::borrow(fd));
    flags & libc::MSG_DONTWAIT == 0 && !nonblocking.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits as the program's own call would, with its timeout and its signals, until so many bytes of ours are there. False:
/// no more will come.
fn wait(fd: RawFd, flags: i32, needed: usize) -> Result<bool, Errno> {
    if !waits(fd, flags) {
        return Err(libc::EAGAIN);
    }
    let mut seen = [0; REFERENCE_BYTES];
    let needed = needed.min(seen.len());
    let got = kernel(fd, &own(&mut seen[..needed]), libc::MSG_PEEK | libc::MSG_WAITALL)?;
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

impl Read<'_> {
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
        match self.receiving.want() {
            Want::Preamble(bytes) => self.preamble(bytes),
            Want::Header(bytes) => self.header(bytes),
            Want::Real(left) => {
                let (now, _) = split(rest, usize::try_from(left).unwrap_or(usize::MAX));
                overwriting(self.runtime, self.fd, &now);
                let got = self.take(&now, 1)?;
                self.receiving.took_real(got as u64);
                self.got += got;
                Ok(())
            }
            Want::ReferencePart(bytes) => self.reference_part(bytes),
            Want::Reference => {
                let left = self.see_reference()?;
                self.deliver(&left, rest)
            }
            Want::Plain => Err(Stop::Plain),
            Want::Broken => Err(Stop::Failed(libc::ECONNRESET)),
        }
    }

    /// Takes bytes from the socket without waiting.
    fn take(&mut self, into: &[iovec], needed: usize) -> Result<usize, Stop> {
        match kernel(self.fd, into, self.flags | libc::MSG_DONTWAIT) {
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

    fn see_reference(&mut self) -> Result<Reference, Stop> {
        let mut last = [0];
        self.look(&mut last)?;
        self.receiving.saw_reference(last[0]).map_err(|_| Stop::Failed(libc::ECONNRESET))
    }

    /// Takes what was looked at, all of which is there.
    fn drain(&mut self, bytes: usize) -> Result<(), Stop> {
        let mut taken = [0; REFERENCE_BYTES];
        match kernel(self.fd, &own(&mut taken[..bytes]), libc::MSG_DONTWAIT) {
            Ok(got) if got == bytes => Ok(()),
            _ => Err(Stop::Failed(libc::ECONNRESET)),
        }
    }

    /// Gives the program what a reference stands for, in one part of its memory.
    fn deliver(&mut self, left: &Reference, rest: &[iovec]) -> Result<(), Stop> {
        let part = rest[0];
        let room = usize::try_from(left.length).unwrap_or(usize::MAX).min(part.iov_len);
        let start = part.iov_base as usize;
        let pages = whole_pages(&(start..start + room));
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

    /// Accounts for bytes that the program gets; with an address, as absent memory.
    fn took(&mut self, left: &Reference, bytes: usize, absent: Option<usize>) -> Result<(), Stop> {
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
        let mut bytes = vec![0; reference.length as usize];
        let fetched = self.runtime.memory.holders.fetch(reference, &mut bytes);
        fetched.map_err(|_| Stop::Failed(libc::ECONNRESET))?;
        // SAFETY: memory that the program has given to read into, as long as this; a bad address faults as memcpy would
        // where the kernel would say EFAULT.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, bytes.len()) };
        Ok(())
    }

    /// MSG_PEEK: what the next frame has, without taking it.
    fn peek(&mut self, rest: Vec<iovec>) -> Result<(), Stop> {
        loop {
            match self.receiving.want() {
                Want::Real(left) => {
                    let (now, _) = split(&rest, usize::try_from(left).unwrap_or(usize::MAX));
                    self.got = self.take(&now, 1)?;
                    return Ok(());
                }
                Want::Reference => {
                    let left = self.see_reference()?;
                    let part = rest[0];
                    let now = (part.iov_len as u64).min(left.length);
                    self.fetch(&Reference { length: now, ..left }, part.iov_base as usize)?;
                    self.got = now as usize;
                    return Ok(());
                }
                _ => self.step(&rest)?,
            }
        }
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
    let seen = kernel(fd, &own(&mut bytes), libc::MSG_PEEK | libc::MSG_DONTWAIT)?;
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
                let Ok(left) = receiving.saw_reference(bytes[0]) else { return total };
                receiving.took_reference(&left, left.length);
                total += left.length as usize;
                1
            }
            Want::Plain | Want::Broken => return total,
        };
        bytes = &bytes[used..];
    }
    total
}
