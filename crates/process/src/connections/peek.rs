//! MSG_PEEK on a framed connection (shunt_odb::frame): shows the program bytes that are in the socket, and leaves them
//! there. It looks across frames, as far as the program has room. Otherwise a program that looks for the end of a
//! header could look for ever: each byte of the header may be in a separate frame. A *reference* names bytes of a
//! payload in a store.

use std::os::fd::RawFd;

use libc::iovec;
use shunt_odb::frame::HEADER_BYTES;
use shunt_odb::reference::REFERENCE_BYTES;

use crate::connections::ahead::{Piece, walk};
use crate::connections::reading::{Frame, Read, Stop, plain};
use crate::connections::runtime::Runtime;
use crate::connections::waiting::{patient, wait, waits};
use crate::system::inside::outside;
use crate::system::kernel::{self, Errno, own};
use crate::system::parts::{Parts, length, split};

/// Most bytes of a frame in a socket, without its real bytes.
const FRAME_BYTES: usize = HEADER_BYTES + REFERENCE_BYTES + 1;

/// Outcome of one look.
struct Looked {
    got: usize,
    /// Number of bytes in the socket, headers and references included.
    there: usize,
}

/// Reads as recvmsg(2) does with MSG_PEEK.
pub fn peek(runtime: &'static Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    loop {
        let locked = connection.lock_receiving(&runtime.connections, fd);
        if let Some(errno) = connection.take_error() {
            return Err(errno);
        }
        let mut read = Read::new(runtime, connection, fd, 0);
        let looked = look(&mut read, iov, flags);
        read.keep();
        connection.set_shown(looked.is_ok());
        if let Ok(looked) = &looked {
            connection.tell(looked.got);
        }
        drop(locked);
        match looked {
            Ok(Looked { got, there }) if flags & libc::MSG_WAITALL != 0 && got < length(iov) && waits(fd, flags) => {
                let mut more = vec![0; there + 1];
                if outside(|| patient(fd, &own(&mut more), libc::MSG_PEEK | libc::MSG_WAITALL))? <= there {
                    return Ok(got);
                }
            }
            Ok(Looked { got, .. }) => return Ok(got),
            Err(Stop::Empty(needed)) => {
                if !wait(fd, flags, needed)? {
                    return Ok(0);
                }
            }
            Err(Stop::End | Stop::Split) => return Ok(0),
            Err(Stop::Failed(errno)) => return Err(errno),
            Err(Stop::Plain) => return plain(runtime, fd, iov, flags),
        }
    }
}

fn look(read: &mut Read<'_>, iov: &[iovec], flags: i32) -> Result<Looked, Stop> {
    let first = read.frame()?;
    let room = length(iov);
    let there = rustix::io::ioctl_fionread(kernel::borrow(read.fd()));
    let there = there.map_err(|error| Stop::Failed(error.raw_os_error()))? as usize;
    let needed = match &first {
        Frame::Real(left) if *left >= room as u64 => room,
        Frame::Reference(left) if left.length >= room as u64 => 1,
        _ => room.saturating_mul(FRAME_BYTES),
    };
    let mut seen = vec![0; there.min(needed).max(1)];
    let seen = match kernel::receive(read.fd(), &own(&mut seen), libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(0) => return Err(Stop::End),
        Ok(got) => &seen[..got],
        Err(libc::EAGAIN) => return Err(Stop::Empty(1)),
        Err(errno) => return Err(Stop::Failed(errno)),
    };
    show(read, iov, flags, seen).map(|got| Looked { got, there })
}

/// Gives the program what `seen`, bytes of the socket, stands for, as far as the program has room: real bytes without
/// the headers of their frames, and fetched bytes in place of references. Returns the number of bytes that it gave.
fn show(read: &Read<'_>, iov: &[iovec], flags: i32, seen: &[u8]) -> Result<usize, Stop> {
    let (mut got, mut rest, mut failed) = (0, Parts::from_slice(iov), None);
    // With MSG_TRUNC the program is told how many bytes there are, and gets none (tcp(7)).
    let shows = flags & libc::MSG_TRUNC == 0;
    walk(&mut read.state(), seen, |piece| {
        let room = length(&rest);
        let now = match piece {
            Piece::Real(bytes) => {
                let now = bytes.len().min(room);
                if shows {
                    read.place(&rest, &bytes[..now]);
                }
                now
            }
            Piece::Reference(left) => {
                let now = usize::try_from(left.length).unwrap_or(usize::MAX).min(room);
                if shows {
                    match read.fetched(&left, now as u64) {
                        Ok(bytes) => read.place(&rest, &bytes),
                        Err(stop) => {
                            failed = Some(stop);
                            return false;
                        }
                    }
                }
                now
            }
        };
        got += now;
        rest = split(&rest, now).1;
        now < room
    });
    match failed {
        Some(stop) if got == 0 => Err(stop),
        _ => Ok(got),
    }
}
