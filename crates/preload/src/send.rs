//! What a write of a framed connection does: large present bytes go to the store and absent bytes stay where they are,
//! and references to them go into the socket; everything else goes for real.

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::RawFd;

use libc::iovec;
use shunt_odb::frame::Sending;
use shunt_odb::reference::Reference;
use shunt_odb::store::usage::Counted;
use shunt_sys::userfaultfd::PAGE_BYTES;

use crate::connections::Connection;
use crate::counts::count;
use crate::kernel;
use crate::memory::any_absent;
use crate::pipe;
use crate::runtime::Runtime;

/// Less than this is sent for real.
const STORED_MIN: usize = 8 << 10;
/// The most that one reference stands for.
const STORED_MAX: usize = 1 << 20;

/// Parts of one write to the kernel, with room for one of ours.
const PARTS_AT_ONCE: usize = libc::UIO_MAXIOV as usize - 1;

/// The kernel's errno.
pub type Errno = i32;

fn addresses(part: &iovec) -> Range<usize> {
    part.iov_base as usize..part.iov_base as usize + part.iov_len
}

fn length(parts: &[iovec]) -> usize {
    parts.iter().map(|part| part.iov_len).sum()
}

/// The first `bytes` of some memory, and the rest.
pub fn split(parts: &[iovec], bytes: usize) -> (Vec<iovec>, Vec<iovec>) {
    let (mut first, mut rest) = (Vec::with_capacity(parts.len()), Vec::new());
    let mut left = bytes;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let now = part.iov_len.min(left);
        left -= now;
        if now > 0 {
            first.push(iovec { iov_base: part.iov_base, iov_len: now });
        }
        if now < part.iov_len {
            rest.push(iovec {
                iov_base: part.iov_base.cast::<u8>().wrapping_add(now).cast(),
                iov_len: part.iov_len - now,
            });
        }
    }
    (first, rest)
}

/// What a write consists of, in order.
enum Part {
    Present(Vec<iovec>),
    /// Absent memory, and the reference that stands for it.
    Absent(Vec<iovec>, Reference),
}

/// Cuts a write into what is present and what is absent.
fn parts(runtime: &Runtime, iov: &[iovec]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for part in iov.iter().filter(|part| part.iov_len > 0) {
        let all = addresses(part);
        let mut at = all.start;
        for piece in runtime.memory.absent_within(&all) {
            present(&mut parts, at..piece.addresses.start);
            at = piece.addresses.end;
            let memory = of(&piece.addresses);
            let bytes = piece.addresses.len() as u64;
            let payload = piece.hold.payload();
            if let Some(Part::Absent(before, reference)) = parts.last_mut()
                && reference.payload == payload
                && reference.offset + reference.length == piece.offset
            {
                reference.length += bytes;
                before.push(memory);
            } else if let Some(reference) = piece.hold.refer(piece.offset, bytes) {
                parts.push(Part::Absent(vec![memory], reference));
            } else {
                present(&mut parts, piece.addresses);
            }
        }
        present(&mut parts, at..all.end);
    }
    parts
}

fn of(addresses: &Range<usize>) -> iovec {
    iovec { iov_base: addresses.start as *mut libc::c_void, iov_len: addresses.len() }
}

fn present(parts: &mut Vec<Part>, addresses: Range<usize>) {
    if addresses.is_empty() {
        return;
    }
    match parts.last_mut() {
        Some(Part::Present(memory)) => memory.push(of(&addresses)),
        _ => parts.push(Part::Present(vec![of(&addresses)])),
    }
}

/// A write under way.
struct Write<'a> {
    runtime: &'a Runtime,
    connection: Connection<'a>,
    fd: RawFd,
    flags: i32,
    sending: Sending,
    sent: usize,
}

/// Why a write stops before its end.
enum Stop {
    /// The kernel took less: the rest is for another write.
    Full,
    Failed(Errno),
}

/// Writes to a connection that may be framed, as sendmsg(2) does.
pub fn write(runtime: &Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    if !connection.frames() {
        return plain(runtime, fd, iov, flags);
    }
    if flags & libc::MSG_OOB != 0 {
        // Urgent bytes are not in the stream where they were written; frames are.
        return Err(libc::EOPNOTSUPP);
    }
    let _locked = connection.lock_sending();
    let mut write = Write { runtime, connection, fd, flags, sending: connection.sending(), sent: 0 };
    if write.sending.is_broken() {
        return Err(libc::ECONNRESET);
    }
    let mut parts = parts(runtime, iov).into_iter().peekable();
    let mut outcome = Ok(());
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        outcome = match part {
            Part::Present(memory) => write.present(&memory, last),
            Part::Absent(memory, reference) => write.absent(&memory, reference, last),
        };
        if outcome.is_err() {
            break;
        }
    }
    for part in parts {
        if let Part::Absent(_, reference) = part {
            runtime.memory.returns.give(reference.payload, reference.weight);
        }
    }
    connection.set_sending(&write.sending);
    connection.set_burst(connection.burst() + write.sent as u64);
    match outcome {
        Ok(()) => Ok(write.sent),
        _ if write.sent > 0 => Ok(write.sent),
        Err(Stop::Full) => Err(libc::EAGAIN),
        Err(Stop::Failed(errno)) => Err(errno),
    }
}

/// Has what is absent of some memory in place.
fn fetch(runtime: &Runtime, parts: &[iovec]) -> Result<(), Errno> {
    if !any_absent() {
        return Ok(());
    }
    let ranges: Vec<Range<usize>> = parts.iter().map(addresses).collect();
    runtime.memory.fetch_ranges(&ranges).map_err(|_| libc::ECONNRESET)
}

/// To a connection that is not framed: absent memory is fetched at once, not page by page.
pub fn plain(runtime: &Runtime, fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    fetch(runtime, iov)?;
    let message = kernel::message(iov);
    // SAFETY: the program's own call.
    let sent = crate::hooks::outside(|| unsafe { crate::hooks::real::sendmsg(fd, &raw const message, flags) });
    usize::try_from(sent).map_err(|_| crate::hooks::errno())
}

/// From a pipe, `bytes` that are in it: a frame's header, and the kernel's own splice behind it.
pub fn from_pipe(
    runtime: &Runtime,
    fd: RawFd,
    place: u32,
    pipe: RawFd,
    bytes: usize,
    flags: u32,
) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_sending();
    let mut write = Write { runtime, connection, fd, flags: 0, sending: connection.sending(), sent: 0 };
    if write.sending.is_broken() {
        return Err(libc::ECONNRESET);
    }
    let outcome = write.splice(pipe, bytes, flags);
    connection.set_sending(&write.sending);
    connection.set_burst(connection.burst() + write.sent as u64);
    outcome.map(|()| write.sent)
}

impl Write<'_> {
    /// One write to the kernel: what is owed, and `real` behind it. Returns how much of `real` it took.
    fn push(&mut self, real: &[iovec], more: bool) -> Result<usize, Errno> {
        let owed = self.sending.owed().to_vec();
        let mut iov = Vec::with_capacity(real.len() + 1);
        if !owed.is_empty() {
            iov.push(iovec { iov_base: owed.as_ptr().cast_mut().cast(), iov_len: owed.len() });
        }
        iov.extend_from_slice(real);
        let mut flags = self.flags;
        if more {
            flags |= libc::MSG_MORE;
        }
        if self.sent > 0 {
            // The kernel would not signal a write that has succeeded in part.
            flags |= libc::MSG_NOSIGNAL;
        }
        let taken = kernel::send(self.fd, &iov, flags)?;
        Ok(self.sending.sent(taken))
    }

    fn splice(&mut self, pipe: RawFd, bytes: usize, flags: u32) -> Result<(), Errno> {
        let promised = self.sending.real(bytes);
        while !self.sending.owed().is_empty() {
            self.push(&[], true)?;
        }
        let moved = pipe::between(pipe, self.fd, promised, flags)?;
        self.sent = self.sending.sent(moved);
        Ok(())
    }

    /// Bytes that are there: real where they are few, else through the store.
    fn present(&mut self, memory: &[iovec], last: bool) -> Result<(), Stop> {
        let bytes = length(memory);
        if bytes < STORED_MIN || !self.sending.takes_reference() {
            return self.real(memory, !last);
        }
        // The reader has put what came before into a buffer that begins at a page, as we have it allocate: fill
        // up that page for real, so that what follows begins at one.
        let phase = (self.connection.burst() as usize + self.sent) % PAGE_BYTES;
        let head = (PAGE_BYTES - phase) % PAGE_BYTES;
        if bytes < head + STORED_MIN {
            return self.real(memory, !last);
        }
        let (first, mut rest) = split(memory, head);
        if !first.is_empty() {
            self.real(&first, true)?;
        }
        while length(&rest) >= STORED_MIN && self.sending.takes_reference() {
            let now = (length(&rest) / PAGE_BYTES * PAGE_BYTES).min(STORED_MAX);
            let (body, after) = split(&rest, now);
            // SAFETY: readable memory of the program for the length of the call; that another thread may change it
            // meanwhile is as with write(2). It is only copied.
            let slices: Vec<IoSlice<'_>> = (body.iter())
                .map(|part| IoSlice::new(unsafe { std::slice::from_raw_parts(part.iov_base.cast(), part.iov_len) }))
                .collect();
            let Some(reference) = self.runtime.store.put(&slices) else { break };
            if let Err(stop) = self.refer(&reference, !(last && after.is_empty())) {
                self.runtime.store.withdraw(&reference);
                return Err(stop);
            }
            count(Counted::SentByReference, now);
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { self.real(&rest, !last) }
    }

    /// Bytes that are elsewhere: the reference goes on.
    fn absent(&mut self, memory: &[iovec], reference: Reference, last: bool) -> Result<(), Stop> {
        if self.sending.takes_reference() {
            let went = self.refer(&reference, !last);
            match went {
                Ok(()) => count(Counted::PassedOn, length(memory)),
                Err(_) => self.runtime.memory.returns.give(reference.payload, reference.weight),
            }
            return went;
        }
        self.runtime.memory.returns.give(reference.payload, reference.weight);
        self.real(memory, !last)
    }

    fn real(&mut self, memory: &[iovec], more: bool) -> Result<(), Stop> {
        fetch(self.runtime, memory).map_err(Stop::Failed)?;
        let mut rest = split(memory, usize::MAX).0;
        while !rest.is_empty() {
            let promised = self.sending.real(length(&rest));
            let (mut body, _) = split(&rest, promised);
            body.truncate(PARTS_AT_ONCE);
            let now = length(&body);
            let went = self.push(&body, more || now < length(&rest)).map_err(Stop::Failed)?;
            count(Counted::SentReal, went);
            self.sent += went;
            rest = split(&rest, went).1;
            // A blocking socket that took nothing of it but what was owed is asked again.
            if went < now && went > 0 {
                return Err(Stop::Full);
            }
        }
        Ok(())
    }

    /// Sends a reference. Where the socket takes only a part of it, none of the bytes is written: what is left of it will
    /// say that it does not count.
    fn refer(&mut self, reference: &Reference, more: bool) -> Result<(), Stop> {
        let before = self.sending;
        self.sending.reference(reference);
        let whole = self.sending.owed().len();
        while !self.sending.owed().is_empty() {
            if let Err(errno) = self.push(&[], more) {
                match self.sending.owed().len() == whole {
                    true => self.sending = before,
                    false => self.sending.void_reference(),
                }
                return Err(Stop::Failed(errno));
            }
        }
        self.sent += reference.length as usize;
        Ok(())
    }
}
