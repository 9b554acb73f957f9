//! recv(2) and similar calls on a connection that may be framed: one that carries references beside real bytes
//! (shunt_odb::frame).

use std::os::fd::RawFd;

use libc::iovec;
use shunt_odb::frame::Want;

use super::peek::peek;
use super::reading::{Read, Stop, plain};
use super::runtime::Runtime;
use super::waiting::{announce, wait, waits};
use crate::system::kernel::Errno;
use crate::system::parts::behind;

/// Reads from a connection that may be framed, as recvmsg(2) does without control data.
pub fn read(runtime: &'static Runtime, fd: RawFd, place: u32, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let room: usize = iov.iter().map(|part| part.iov_len).sum();
    if room == 0 || connection.receiving().want() == Want::Plain {
        return plain(runtime, fd, iov, flags);
    }
    if flags & libc::MSG_PEEK != 0 {
        return peek(runtime, fd, place, iov, flags);
    }
    let mut got = 0;
    loop {
        let locked = connection.lock_receiving(&runtime.connections, fd);
        if got == 0
            && let Some(errno) = connection.take_error()
        {
            return Err(errno);
        }
        let mut read = Read::new(runtime, connection, fd, flags & !libc::MSG_DONTWAIT);
        read.got = got;
        let stop = read.fill(behind(iov, got));
        read.give_up_behind(iov);
        read.tidy(read.got - got);
        got = read.got;
        read.keep();
        if got > 0 {
            connection.set_shown(false);
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
            Err(Stop::Split) => {
                announce(fd);
                return Ok(read.got);
            }
            Err(Stop::Failed(errno)) if read.got > 0 => {
                connection.keep_error(errno);
                announce(fd);
                return Ok(read.got);
            }
            Err(Stop::Failed(errno)) => return Err(errno),
            Err(Stop::Plain) => return plain(runtime, fd, iov, flags),
        }
    }
}
