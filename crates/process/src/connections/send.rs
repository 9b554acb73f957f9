//! Writes to a framed connection, which carries real bytes and references to bytes in a store (shunt_odb::frame).
//! *Present* bytes are in the program's memory; if they are many, they are put into the store. *Absent* bytes are
//! already in a store, and the program's memory only stands for them; they stay where they are. References to both go
//! into the socket. All other bytes are sent inline, as real bytes. One call to the kernel sends all of a write, unless
//! the write has more parts than the kernel takes.

use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use libc::iovec;
use rustix::fs::FileType;
use shunt_odb::fetch::Call;
use shunt_odb::frame::Sending;
use shunt_odb::hold::Hold;
use shunt_odb::reference::Reference;
use shunt_odb::store::usage::Counted;
use smallvec::{SmallVec, smallvec};

use crate::connections::learning::Message;
use crate::connections::runtime::Runtime;
use crate::connections::states::Connection;
use crate::connections::waiting;
use crate::memory::Copies;
use crate::memory::outside;
use crate::store::COPIED_MAX;
use crate::system::counts::count;
use crate::system::kernel::{self, Errno};
use crate::system::parts::{PARTS_AT_ONCE, Parts, addresses, length, of, slices, split};

/// Fewest bytes that are put into the store. Fewer are sent inline.
const STORED_MIN: usize = 8 << 10;
/// A part of a write (an iovec) that is shorter than this counts as a header, or as framing of the program's own
/// protocol. It does not go into one payload with longer parts beside it.
const FRAMING_MAX: usize = 512;
/// Most bytes that a frame of real bytes from memory or from a file promises. All of them have to be sent as real
/// bytes, even if the socket takes only some of them now.
const REAL_AT_ONCE: usize = 256 << 10;

/// A part of a write.
enum Part {
    Present(Parts),
    Absent(Absent),
}

/// Absent memory, and the payload bytes that it stands for. A share of the payload is taken only if these bytes are
/// passed on by reference.
struct Absent {
    memory: Parts,
    hold: Arc<Hold>,
    offset: u64,
    bytes: u64,
}

/// Cuts a write into present and absent parts.
fn parts(runtime: &Runtime, iov: &[iovec], parts: &mut SmallVec<[Part; 4]>, copies: &mut Copies) {
    let mut present = |parts: &mut SmallVec<[Part; 4]>, range: &Range<usize>| {
        runtime.memory.readable(range, copies, |range| add_present(parts, range));
    };
    for part in iov.iter().filter(|part| part.iov_len > 0) {
        let all = addresses(part);
        let mut at = all.start;
        for piece in runtime.memory.absent_within(&all) {
            present(parts, &(at..piece.addresses.start));
            at = piece.addresses.end;
            let memory = of(&piece.addresses);
            let bytes = piece.addresses.len() as u64;
            if let Some(Part::Absent(before)) = parts.last_mut()
                && before.hold.payload() == piece.hold.payload()
                && before.offset + before.bytes == piece.offset
            {
                before.bytes += bytes;
                before.memory.push(memory);
            } else {
                let memory = smallvec![memory];
                parts.push(Part::Absent(Absent { memory, hold: piece.hold, offset: piece.offset, bytes }));
            }
        }
        present(parts, &(at..all.end));
    }
}

fn add_present(parts: &mut SmallVec<[Part; 4]>, addresses: Range<usize>) {
    if addresses.is_empty() {
        return;
    }
    match parts.last_mut() {
        Some(Part::Present(memory)) => memory.push(of(&addresses)),
        _ => parts.push(Part::Present(smallvec![of(&addresses)])),
    }
}

/// A frame of a write.
enum Frame {
    /// Real bytes that an earlier frame has promised.
    Promised(Parts),
    Real(Parts),
    /// Reference to bytes that this write has put into the store.
    Stored(Reference),
    /// Reference to absent bytes, which stay in the store that has them.
    Forwarded(Reference),
}

impl Frame {
    /// Memory with the frame's real bytes.
    fn memory(&self) -> &[iovec] {
        match self {
            Self::Promised(memory) | Self::Real(memory) => memory,
            Self::Stored(_) | Self::Forwarded(_) => &[],
        }
    }

    /// Number of the program's bytes in the frame.
    fn bytes(&self) -> usize {
        match self {
            Self::Promised(memory) | Self::Real(memory) => length(memory),
            Self::Stored(reference) | Self::Forwarded(reference) => reference.length as usize,
        }
    }

    /// Counts `bytes` bytes of the frame as sent.
    fn count(&self, bytes: usize) {
        let what = match self {
            Self::Promised(_) | Self::Real(_) => Counted::SentReal,
            Self::Stored(_) => Counted::SentByReference,
            Self::Forwarded(_) => Counted::PassedOn,
        };
        count(what, bytes);
    }

    /// Takes back the reference of a frame that was not sent.
    fn withdraw(&self, runtime: &Runtime) {
        match self {
            Self::Promised(_) | Self::Real(_) => {}
            Self::Stored(reference) => runtime.store.withdraw(reference),
            Self::Forwarded(reference) => runtime.memory.returns.give(reference.payload, reference.weight),
        }
    }

    /// Adds the frame's header or reference to the bytes that `sending` owes to the socket. Returns how many of the
    /// frame's real bytes may follow in the same write.
    fn begin(&self, sending: &mut Sending, is_short: bool) -> usize {
        match self {
            Self::Promised(memory) | Self::Real(memory) if is_short => sending.short(length(memory)),
            Self::Promised(memory) | Self::Real(memory) => sending.real(length(memory)),
            Self::Stored(reference) | Self::Forwarded(reference) => {
                sending.reference(reference);
                0
            }
        }
    }
}

/// Writes to a connection that may be framed, as sendmsg(2) does.
pub fn write(runtime: &Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    if !connection.frames(&runtime.connections, fd) {
        let comes_again = || waiting::comes_again(fd, flags);
        let emit = |iov: &[iovec]| outside::sendmsg(fd, iov, flags);
        return outside::write(&runtime.memory, iov, outside::AT_ONCE, &Call::new(&comes_again), emit);
    }
    if flags & libc::MSG_OOB != 0 {
        // The receiving kernel takes an urgent byte out of the stream, so it cannot be a byte of a frame.
        return Err(libc::EOPNOTSUPP);
    }
    let _locked = connection.lock_sending(&runtime.connections, fd);
    let mut write = Write::new(runtime, connection, fd, flags)?;
    let mut message = Message::new(runtime, connection, fd);
    write.is_short =
        (1..STORED_MIN).contains(&length(iov)) && !iov.iter().any(|part| runtime.memory.meets(&addresses(part)));
    let outcome = if write.is_short { write.short(iov, &mut message) } else { write.long(iov, &mut message) };
    message.end(write.sent);
    write.end(outcome)
}

/// Sends a file's bytes from `from` on to a framed connection, as sendfile(2) does.
pub fn write_file(
    runtime: &Runtime,
    fd: RawFd,
    place: u32,
    file: BorrowedFd<'_>,
    from: u64,
    bytes: usize,
) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_sending(&runtime.connections, fd);
    let mut write = Write::new(runtime, connection, fd, 0)?;
    write.is_short = bytes < STORED_MIN;
    let mut message = Message::new(runtime, connection, fd);
    // Sends all of the bytes, as the kernel would do: a program considers the socket full after a short write, and
    // waits for room.
    let mut outcome = Ok(());
    while write.sent < bytes && outcome.is_ok() {
        let before = write.sent;
        outcome = write.file(file, from + before as u64, bytes - before, &mut message);
        if write.sent == before {
            break;
        }
    }
    message.end(write.sent);
    write.end(outcome)
}

/// Sends `bytes` bytes that are in a pipe, as one frame of real bytes: first the frame's header, and then the bytes by
/// the kernel's own splice(2).
pub fn from_pipe(
    runtime: &Runtime,
    fd: RawFd,
    place: u32,
    pipe: RawFd,
    bytes: usize,
    flags: u32,
) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_sending(&runtime.connections, fd);
    let mut write = Write::new(runtime, connection, fd, 0)?;
    let outcome = write.splice(pipe, bytes, flags);
    write.end(outcome)
}

/// The frames of a write.
type Frames = SmallVec<[Frame; 4]>;

/// Cuts a write into frames. Its first `promised` bytes belong to a frame of real bytes that an earlier write has
/// begun. Returns false if the fetch of bytes that are sent inline has taken long. Then the program has to write the
/// rest by another call.
fn cut(
    runtime: &Runtime,
    iov: &[iovec],
    mut promised: usize,
    frames: &mut Frames,
    message: &mut Message<'_>,
    copies: &mut Copies,
    call: &Call<'_>,
) -> Result<bool, Stop> {
    let mut all = SmallVec::new();
    parts(runtime, iov, &mut all, copies);
    for part in all {
        match part {
            Part::Present(memory) => {
                let (owed, rest) = split(&memory, promised);
                promised -= length(&owed);
                if !owed.is_empty() {
                    frames.push(Frame::Promised(owed));
                }
                present(runtime, &rest, frames, message);
            }
            Part::Absent(Absent { memory, hold, offset, bytes }) => {
                let (owed, rest) = split(&memory, promised);
                let now = length(&owed);
                promised -= now;
                let passes = !rest.is_empty() && message.is_source(&hold.payload().holder);
                if !fetch(runtime, &owed, frames, call)? {
                    return Ok(false);
                }
                if now > 0 {
                    frames.push(Frame::Promised(owed));
                }
                let reference = if passes { hold.refer(offset + now as u64, bytes - now as u64) } else { None };
                if let Some(reference) = reference {
                    frames.push(Frame::Forwarded(reference));
                } else if fetch(runtime, &rest, frames, call)? {
                    present(runtime, &rest, frames, message);
                } else {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

/// Fetches absent memory whose bytes are sent inline. Returns false if that has taken long and `call` may end early.
fn fetch(runtime: &Runtime, memory: &[iovec], frames: &Frames, call: &Call<'_>) -> Result<bool, Stop> {
    for part in memory {
        match runtime.memory.fetch_within(&addresses(part), call) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(_) => {
                frames.iter().for_each(|frame| frame.withdraw(runtime));
                return Err(Stop::Failed(libc::ECONNRESET));
            }
        }
    }
    Ok(true)
}

/// Adds frames for present bytes. Bytes are sent inline if they are few, if they are framing of the program's protocol,
/// or if their receiver would look at them (learning.rs). All others go through the store.
fn present(runtime: &Runtime, memory: &[iovec], frames: &mut Frames, message: &mut Message<'_>) {
    if length(memory) >= STORED_MIN {
        message.look(memory);
    }
    let mut rest = memory;
    while let Some(first) = rest.first() {
        let is_framing = |part: &iovec| part.iov_len < FRAMING_MAX;
        let kind = is_framing(first);
        let (run, after) = rest.split_at(rest.iter().position(|part| is_framing(part) != kind).unwrap_or(rest.len()));
        rest = after;
        let mut left = Parts::from_slice(run);
        while length(&left) >= STORED_MIN {
            let (now, behind) = split(&left, COPIED_MAX);
            let begins = frames.is_empty() && message.begins();
            let Some(telling) = message.plan(length(&now), begins) else {
                real(now, frames);
                left = behind;
                continue;
            };
            let (head, body) = split(&now, telling.head);
            let (body, tail) = split(&body, length(&body) - telling.tail);
            let Some(reference) = runtime.store.put(&slices(&body), message.stream()) else { break };
            message.stored(&reference, &telling);
            real(head, frames);
            frames.push(Frame::Stored(reference));
            real(tail, frames);
            left = behind;
        }
        real(left, frames);
    }
}

/// Whether memory ends with the end of a header (HTTP's, or FastCGI's with its padding), so that the body may be
/// written next.
fn ends_head(memory: &[iovec]) -> bool {
    const END: usize = 12;
    let slices = slices(memory);
    let Some(slice) = slices.last() else { return false };
    slice[slice.len().saturating_sub(END)..].windows(4).any(|four| four == b"\r\n\r\n")
}

/// Adds frames for bytes that are sent inline.
fn real(memory: Parts, frames: &mut Frames) {
    let mut left = memory;
    while !left.is_empty() {
        let (now, behind) = split(&left, REAL_AT_ONCE);
        match frames.last_mut() {
            Some(Frame::Real(before)) if length(before) + length(&now) <= REAL_AT_ONCE => before.extend(now),
            _ => frames.push(Frame::Real(now)),
        }
        left = behind;
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
    /// The write has no absent bytes, and is too short for the store.
    is_short: bool,
}

/// Why a write stops before its end.
enum Stop {
    /// The kernel took only a part of the bytes, or a fetch has taken long. The program has to write the rest by
    /// another call.
    Full,
    Failed(Errno),
}

impl<'a> Write<'a> {
    /// Begins a write. The caller holds the lock of the sending direction. First sends the rest of a reference that the
    /// last write has left.
    fn new(runtime: &'a Runtime, connection: Connection<'a>, fd: RawFd, flags: i32) -> Result<Self, Errno> {
        let mut write =
            Self { runtime, connection, fd, flags, sending: connection.sending(), sent: 0, is_short: false };
        if write.sending.is_broken() {
            return Err(libc::ECONNRESET);
        }
        // No frame of real bytes is open. So the bytes that are owed are the rest of a reference that the socket took
        // only in part.
        if write.sending.promised() == 0 && !write.sending.owed().is_empty() {
            let pushed = write.push(libc::MSG_MORE);
            connection.set_sending(&write.sending);
            pushed?;
        }
        Ok(write)
    }

    /// Sends the bytes that are owed to the socket.
    fn push(&mut self, flags: i32) -> Result<(), Errno> {
        while !self.sending.owed().is_empty() {
            let owed = self.sending.owed();
            let part = iovec { iov_base: owed.as_ptr().cast_mut().cast(), iov_len: owed.len() };
            let taken = kernel::send(self.fd, &[part], self.flags | flags)?;
            self.sending.sent(taken);
        }
        Ok(())
    }

    fn splice(&mut self, pipe: RawFd, bytes: usize, flags: u32) -> Result<(), Stop> {
        let promised = self.sending.real(bytes);
        self.push(libc::MSG_MORE).map_err(Stop::Failed)?;
        // The state is stored before splice(2), in which the thread may be cancelled: the header was sent.
        self.connection.set_sending(&self.sending);
        let moved = waiting::splice(pipe, self.fd, promised, flags).map_err(Stop::Failed)?;
        self.sent = self.sending.sent(moved);
        Ok(())
    }

    /// Ends the write, and returns what the program's call returns.
    fn end(mut self, outcome: Result<(), Stop>) -> Result<usize, Errno> {
        self.sending.wrote(self.sent, self.is_short);
        self.connection.set_sending(&self.sending);
        match outcome {
            Ok(()) => Ok(self.sent),
            _ if self.sent > 0 => Ok(self.sent),
            Err(Stop::Full) => Err(libc::EAGAIN),
            Err(Stop::Failed(errno)) => Err(errno),
        }
    }

    fn long(&mut self, iov: &[iovec], message: &mut Message<'_>) -> Result<(), Stop> {
        let (mut frames, mut copies) = (Frames::new(), Copies::new());
        let promised = self.sending.promised() as usize;
        let comes_again = || waiting::comes_again(self.fd, self.flags);
        let call = Call::new(&comes_again);
        let is_all = cut(self.runtime, iov, promised, &mut frames, message, &mut copies, &call);
        let outcome = is_all.and_then(|is_all| {
            self.all(&frames)?;
            if is_all { Ok(()) } else { Err(Stop::Full) }
        });
        if let (1.., Some(Frame::Promised(memory) | Frame::Real(memory))) = (self.sent, frames.first()) {
            message.look(memory);
        }
        outcome
    }

    /// Sends a short write without a header, if an earlier frame has promised all of its bytes; else with one.
    fn short(&mut self, iov: &[iovec], message: &mut Message<'_>) -> Result<(), Stop> {
        let (bytes, promised) = (length(iov), self.sending.promised() as usize);
        let outcome = if self.sending.owed().is_empty() && promised >= bytes && iov.len() <= PARTS_AT_ONCE {
            kernel::send(self.fd, iov, self.flags).map_err(Stop::Failed).and_then(|taken| {
                self.sent = self.sending.sent(taken);
                count(Counted::SentReal, taken);
                if taken < bytes { Err(Stop::Full) } else { Ok(()) }
            })
        } else {
            let (owed, rest) = split(iov, promised);
            let frames = [Frame::Promised(owed), Frame::Real(rest)].into_iter().filter(|frame| frame.bytes() > 0);
            self.all(&frames.collect::<Frames>())
        };
        if self.sent > 0 && ends_head(iov) {
            message.look(iov);
        }
        outcome
    }

    /// Sends frames, with as many parts in each call as the kernel takes. Takes back the references that are not sent.
    fn all(&mut self, frames: &[Frame]) -> Result<(), Stop> {
        let mut rest = frames;
        while !rest.is_empty() {
            match self.some(rest) {
                Ok(went) => rest = &rest[went..],
                Err((went, stop)) => {
                    rest[went..].iter().for_each(|frame| frame.withdraw(self.runtime));
                    return Err(stop);
                }
            }
        }
        Ok(())
    }

    /// Makes one system call. Returns how many frames were sent; an error comes with the number of those that were sent
    /// at least in part.
    fn some(&mut self, frames: &[Frame]) -> Result<usize, (usize, Stop)> {
        let mut planned = self.sending;
        let mut owed: SmallVec<[u8; 512]> = SmallVec::new();
        let mut cuts: SmallVec<[usize; 4]> = SmallVec::new();
        let mut parts = 0;
        for frame in frames {
            parts += 1 + frame.memory().len();
            if parts > PARTS_AT_ONCE && !cuts.is_empty() {
                break;
            }
            let real = frame.begin(&mut planned, self.is_short);
            owed.extend_from_slice(planned.owed());
            cuts.push(owed.len());
            planned.sent(planned.owed().len() + real);
        }
        let frames_now = &frames[..cuts.len()];
        let mut iov = Parts::new();
        let mut from = 0;
        for (frame, cut) in frames_now.iter().zip(cuts) {
            if cut > from {
                iov.push(iovec { iov_base: owed[from..].as_ptr().cast_mut().cast(), iov_len: cut - from });
                from = cut;
            }
            iov.extend_from_slice(frame.memory());
        }
        let mut flags = self.flags;
        if frames_now.len() < frames.len() {
            flags |= libc::MSG_MORE;
        }
        if self.sent > 0 {
            // The kernel would send no SIGPIPE for a write that has succeeded in part.
            flags |= libc::MSG_NOSIGNAL;
        }
        let asked = length(&iov);
        debug_assert!(iov.len() <= PARTS_AT_ONCE + 1);
        let taken = kernel::send(self.fd, &iov, flags).map_err(|errno| (0, Stop::Failed(errno)))?;
        if taken == asked {
            self.sending = planned;
            self.sent += frames_now.iter().map(Frame::bytes).sum::<usize>();
            frames_now.iter().for_each(|frame| frame.count(frame.bytes()));
            return Ok(frames_now.len());
        }
        Err((self.account(frames_now, taken), Stop::Full))
    }

    /// Updates the state after the kernel has taken only `taken` bytes of some frames. Returns how many frames were
    /// sent, at least in part.
    fn account(&mut self, frames: &[Frame], mut taken: usize) -> usize {
        for (at, frame) in frames.iter().enumerate() {
            if taken == 0 {
                return at;
            }
            let real = frame.begin(&mut self.sending, self.is_short);
            let now = taken.min(self.sending.owed().len() + real);
            let went = self.sending.sent(now);
            taken -= now;
            if !frame.memory().is_empty() {
                self.sent += went;
                frame.count(went);
            } else if self.push(0).is_ok() {
                // The kernel took a part of this reference, and then the rest, because the socket is blocking.
                self.sent += frame.bytes();
                frame.count(frame.bytes());
            } else {
                // The program is told that none of these bytes is written. The rest of the reference will say that it
                // does not count.
                self.sending.void_reference();
                return at;
            }
        }
        frames.len()
    }

    /// Sends some of a file's bytes from offset `from` on, at most `bytes`; nothing if the file ends before `from`.
    fn file(&mut self, file: BorrowedFd<'_>, from: u64, bytes: usize, message: &mut Message<'_>) -> Result<(), Stop> {
        let before = self.sent;
        let can_be_stored = bytes >= STORED_MIN && self.sending.takes_reference();
        let begins = before == 0 && message.begins();
        let telling = can_be_stored.then(|| message.plan(bytes.min(REAL_AT_ONCE), begins)).flatten();
        let Some(telling) = telling else { return self.file_for_real(file, from, bytes.min(REAL_AT_ONCE)) };
        // No tail is sent inline: at a file's end there is no framing of the program's protocol, at which a receiver
        // would look.
        if telling.head > 0 {
            self.file_for_real(file, from, telling.head)?;
        }
        let head = self.sent - before;
        if !self.sending.takes_reference() {
            // The socket took only a part of the head: the program has to send the rest by another call.
            return Ok(());
        }
        let most = if telling.probe { COPIED_MAX } else { bytes };
        let stored = self.runtime.store.put_file(file, from + head as u64, (bytes - head).min(most), message.stream());
        match stored {
            Some(reference) => {
                message.stored(&reference, &telling);
                self.all(&[Frame::Stored(reference)])
            }
            None => self.file_for_real(file, from + head as u64, (bytes - head).min(REAL_AT_ONCE)),
        }
    }

    /// Sends some of a file's bytes inline.
    fn file_for_real(&mut self, file: BorrowedFd<'_>, from: u64, bytes: usize) -> Result<(), Stop> {
        if self.sending.owed().is_empty() && self.sending.promised() >= bytes as u64 {
            match self.rest_of_frame(file, from, bytes) {
                Err(Stop::Failed(libc::EINVAL)) => {}
                outcome => return outcome,
            }
        }
        // A frame promises a number of bytes, so the file's size has to say how many there are.
        let status = rustix::fs::fstat(file).ok();
        let status = status.filter(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile);
        let Some(status) = status else { return self.copy_of_file(file, from, bytes) };
        let there = u64::try_from(status.st_size).unwrap_or(0).saturating_sub(from).min(bytes as u64);
        if there == 0 {
            return Ok(());
        }
        let there = there as usize;
        let promised = if self.is_short { self.sending.short(there) } else { self.sending.real(there) };
        self.push(libc::MSG_MORE).map_err(Stop::Failed)?;
        self.rest_of_frame(file, from, promised)
    }

    /// Sends bytes of a file that the open frame has promised.
    fn rest_of_frame(&mut self, file: BorrowedFd<'_>, from: u64, bytes: usize) -> Result<(), Stop> {
        let moved = kernel::send_file(self.fd, file, from, bytes).map_err(Stop::Failed)?;
        self.sent += self.sending.sent(moved);
        count(Counted::SentReal, moved);
        // A short count need not mean a full socket: the next call to the kernel will tell.
        Ok(())
    }

    /// Sends bytes of a file that is no regular file, inline. Its size does not say how many bytes it has.
    fn copy_of_file(&mut self, file: BorrowedFd<'_>, from: u64, bytes: usize) -> Result<(), Stop> {
        let mut buffer = vec![0u8; bytes];
        let got = loop {
            match rustix::io::pread(file, &mut buffer[..], from) {
                Err(rustix::io::Errno::INTR) => {}
                // The file is a directory, for which sendfile(2) returns EINVAL.
                Err(rustix::io::Errno::ISDIR) => return Err(Stop::Failed(libc::EINVAL)),
                other => break other.map_err(|error| Stop::Failed(error.raw_os_error()))?,
            }
        };
        let memory = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: got };
        let (owed, rest) = split(&[memory], self.sending.promised() as usize);
        let frames = [Frame::Promised(owed), Frame::Real(rest)].into_iter().filter(|frame| frame.bytes() > 0);
        self.all(&frames.collect::<Frames>())
    }
}
