//! FIONREAD: how many bytes the program could read now, which are not as many as are in the socket.

use std::os::fd::RawFd;

use shunt_odb::frame::{Beginning, PREAMBLE, Receiving, Want};

use crate::descriptors;
use crate::kernel;
use crate::receive::{Read, Stop, own};
use crate::runtime::Runtime;
use crate::send::Errno;

/// Bytes that the program could read now. Takes frames as far as there is nothing in them for the program: it may go by
/// what this says and read no more, and what is left in a socket may be all that keeps its window shut.
pub fn available(runtime: &'static Runtime, fd: RawFd, place: u32) -> Result<usize, Errno> {
    let connection = runtime.connections.at(place);
    let _locked = connection.lock_receiving();
    let mut read = Read::new(runtime, connection, fd, 0);
    let there = rustix::io::ioctl_fionread(descriptors::borrow(fd)).map_err(|error| error.raw_os_error())?;
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
    match kernel::receive(fd, &own(&mut bytes), libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(seen) => Ok(count(&mut read.state(), &bytes[..seen])),
        Err(libc::EAGAIN) => Ok(0),
        Err(errno) => Err(errno),
    }
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
