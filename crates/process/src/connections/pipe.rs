//! splice(2) between connections and pipes. A *framed* connection carries frames (shunt_odb::frame) of *real* bytes,
//! which are sent as they are, and of *references*, which stand for bytes in a store. The kernel's own splice moves
//! real bytes, frame by frame. Bytes that a reference stands for are fetched first.

use std::os::fd::{AsRawFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::connections::reading::{Frame, Read, Stop};
use crate::connections::runtime::Runtime;
use crate::connections::send;
use crate::connections::waiting;
use crate::system::inside::outside;
use crate::system::kernel::{Errno, borrow};

/// Most fetched bytes that are put into a pipe at a time: as many as a new pipe holds.
const AT_ONCE: u64 = 64 << 10;

/// Moves bytes from a connection into a pipe, as splice(2) does.
pub fn from_connection(
    runtime: &'static Runtime,
    fd: RawFd,
    place: u32,
    pipe: RawFd,
    bytes: usize,
    flags: u32,
) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    loop {
        let locked = connection.lock_receiving(&runtime.connections, fd);
        let mut read = Read::new(runtime, connection, fd, 0);
        let moved = move_frame(&mut read, pipe, bytes, flags);
        if let Ok(moved) = moved {
            read.tidy(moved);
        }
        read.keep();
        drop(locked);
        match moved {
            Ok(moved) => return Ok(moved),
            Err(Stop::End) => return Ok(0),
            // This does not occur: only reads into memory stop for this reason.
            Err(Stop::Split) => return Err(libc::EAGAIN),
            Err(Stop::Plain) => return waiting::splice(fd, pipe, bytes, flags),
            Err(Stop::Failed(errno)) => return Err(errno),
            Err(Stop::Empty(_)) if flags & libc::SPLICE_F_NONBLOCK != 0 => return Err(libc::EAGAIN),
            // The pipe is full: if the call may wait, waits until its reader has taken bytes.
            Err(Stop::Empty(_)) if !is_ready(pipe, PollFlags::OUT, false)? => {
                if !waiting::waits(pipe, 0) {
                    return Err(libc::EAGAIN);
                }
                is_ready(pipe, PollFlags::OUT, true)?;
            }
            Err(Stop::Empty(needed)) => {
                if !waiting::wait(fd, 0, needed)? {
                    return Ok(0);
                }
            }
        }
    }
}

/// Moves some bytes of the connection's next frame into the pipe.
fn move_frame(read: &mut Read<'_>, pipe: RawFd, bytes: usize, flags: u32) -> Result<usize, Stop> {
    match read.frame()? {
        Frame::Real(left) => {
            let now = bytes.min(usize::try_from(left).unwrap_or(usize::MAX));
            match waiting::splice(read.fd(), pipe, now, flags | libc::SPLICE_F_NONBLOCK) {
                Ok(0) => Err(Stop::End),
                Ok(moved) => {
                    read.took_real(moved);
                    Ok(moved)
                }
                Err(libc::EAGAIN) => Err(Stop::Empty(1)),
                Err(errno) => Err(Stop::Failed(errno)),
            }
        }
        Frame::Reference(left) => {
            let now = left.length.min(AT_ONCE).min(bytes as u64);
            let fetched = read.fetched(&left, now)?;
            let moved = put(&fetched, pipe).map_err(|errno| match errno {
                libc::EAGAIN => Stop::Empty(1),
                errno => Stop::Failed(errno),
            })?;
            read.took(&left, moved, &[])?;
            Ok(moved)
        }
    }
}

/// Puts as many bytes into a pipe as it takes now. The bytes go through a pipe of the library's own: splice(2) between
/// the two does not wait, even if the program's pipe is blocking.
fn put(bytes: &[u8], pipe: RawFd) -> Result<usize, Errno> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|error| error.raw_os_error())?;
    let there = rustix::io::write(&into, bytes).map_err(|error| error.raw_os_error())?;
    waiting::splice(out.as_raw_fd(), pipe, there, libc::SPLICE_F_NONBLOCK)
}

/// Moves bytes from a pipe into a connection. If the connection is framed, they become a frame of real bytes.
pub fn into_connection(
    runtime: &Runtime,
    pipe: RawFd,
    fd: RawFd,
    place: u32,
    bytes: usize,
    flags: u32,
) -> Result<usize, Errno> {
    if !runtime.connections.at(place).frames(&runtime.connections, fd) {
        return waiting::splice(pipe, fd, bytes, flags);
    }
    loop {
        let there = rustix::io::ioctl_fionread(borrow(pipe)).map_err(|_| libc::EINVAL)?;
        let now = usize::try_from(there).unwrap_or(usize::MAX).min(bytes);
        if now > 0 {
            return send::from_pipe(runtime, fd, place, pipe, now, flags);
        }
        let waits = flags & libc::SPLICE_F_NONBLOCK == 0 && waiting::waits(pipe, 0);
        if !is_ready(pipe, PollFlags::IN, waits)? {
            return if is_ready(pipe, PollFlags::HUP, false)? { Ok(0) } else { Err(libc::EAGAIN) };
        }
    }
}

fn is_ready(fd: RawFd, what: PollFlags, waits: bool) -> Result<bool, Errno> {
    let mut wanted = [PollFd::from_borrowed_fd(borrow(fd), what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ask = |patience| poll(&mut wanted, patience).map_err(|error| error.raw_os_error());
    if waits {
        outside(|| ask(None))?
    } else {
        ask(Some(&now))?
    };
    Ok(wanted[0].revents().intersects(what))
}
