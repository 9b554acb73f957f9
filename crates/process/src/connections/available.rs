//! FIONREAD: the number of bytes that the program could read now. It is not the number of bytes in the socket, which
//! may also have headers of *frames*, and *references* that stand for many bytes (shunt_odb::frame).

use std::os::fd::RawFd;

use shunt_odb::frame::Want;

use crate::connections::ahead::{Piece, walk};
use crate::connections::reading::{Read, Stop};
use crate::connections::runtime::Runtime;
use crate::system::kernel::{self, Errno, own};

/// Number of bytes that the program could read now. All of them have to be counted. If a program (nginx with
/// edge-triggered events) reads more bytes than this number, it believes that the others have come since. Then it waits
/// until the kernel reports more.
///
/// A program may also rely on this number and read no more bytes. So a read that takes the last of these bytes also
/// takes the header behind them from the socket ([`Read::tidy`]).
pub fn available(runtime: &'static Runtime, fd: RawFd, place: u32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_receiving(&runtime.connections, fd);
    let bytes = look(Read::new(runtime, connection, fd, 0))?;
    connection.tell(bytes);
    Ok(bytes)
}

/// Takes from the socket what comes before the program's next byte, such as a frame's header. Then counts the bytes for
/// the program that follow.
fn look(mut read: Read<'_>) -> Result<usize, Errno> {
    let fd = read.fd();
    let there = rustix::io::ioctl_fionread(kernel::borrow(fd)).map_err(|error| error.raw_os_error())?;
    let there = usize::try_from(there).unwrap_or(usize::MAX);
    let mut receiving = read.state();
    match receiving.want() {
        Want::Plain => return Ok(there),
        Want::Real(left) if left >= there as u64 => return Ok(there),
        _ if there == 0 => return Ok(0),
        _ => {}
    }
    if there == 1
        && let Ok(Some(left)) = receiving.known_reference()
    {
        return Ok(usize::try_from(left.length).unwrap_or(usize::MAX));
    }
    let next = read.frame();
    read.keep();
    match next {
        Ok(_) => {}
        Err(Stop::Empty(_) | Stop::End | Stop::Split) => return Ok(0),
        Err(Stop::Plain) => return Ok(there),
        Err(Stop::Failed(errno)) => return Err(errno),
    }
    let mut bytes = vec![0; there];
    let seen = match kernel::receive(fd, &own(&mut bytes), libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(seen) => &bytes[..seen],
        Err(libc::EAGAIN) => return Ok(0),
        Err(errno) => return Err(errno),
    };
    let mut total = 0_usize;
    walk(&mut read.state(), seen, |piece| {
        total = total.saturating_add(match piece {
            Piece::Real(bytes) => bytes.len(),
            Piece::Reference(left) => left.length as usize,
        });
        true
    });
    Ok(total)
}
