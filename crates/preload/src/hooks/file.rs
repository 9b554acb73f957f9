//! sendfile(2) from files into connections, and splice(2) between connections and pipes. A connection between two
//! programs under Shunt (started by `shunt run`) may carry references in place of bytes. These bytes then stay in a
//! store (part of a machine's agent).

use std::os::fd::RawFd;

use libc::{c_int, off64_t, size_t, ssize_t};
use shunt_process::bypass;
use shunt_process::connections::runtime::Runtime;
use shunt_process::connections::{pipe, send};
use shunt_process::system::inside::Inside;
use shunt_process::system::kernel::{Errno, borrow};

use super::{connection, real, returned};

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t {
    match connection(to) {
        Some((runtime, place)) => {
            let Some(_inside) = Inside::enter() else { return returned(Err(libc::EAGAIN)) };
            // SAFETY: the pointer is null, or to the program's offset.
            returned(sends_file(runtime, to, place, from, unsafe { offset.as_mut() }, bytes))
        }
        None if connection(from).is_none() => {
            if bypass::is_full_of_rescue(to, 0) {
                return returned(Err(libc::EAGAIN));
            }
            // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
            unsafe { real::sendfile64(to, from, offset, bytes) }
        }
        None => returned(Err(libc::EINVAL)),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t {
    // SAFETY: off_t has 64 bits, so this passes the program's arguments on to the same function under its other name.
    unsafe { sendfile64(to, from, offset, bytes) }
}

/// Most bytes that one call moves (sendfile(2)).
const AT_ONCE: usize = 0x7fff_f000;

fn sends_file(
    runtime: &Runtime,
    to: RawFd,
    place: u32,
    from: RawFd,
    offset: Option<&mut off64_t>,
    bytes: usize,
) -> Result<usize, Errno> {
    if !runtime.connections.at(place).frames(&runtime.connections, to) {
        let offset = offset.map_or(std::ptr::null_mut(), std::ptr::from_mut);
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        let sent = unsafe { real::sendfile64(to, from, offset, bytes) };
        return usize::try_from(sent).map_err(|_| super::errno());
    }
    let file = borrow(from);
    let at = match &offset {
        Some(offset) => u64::try_from(**offset).map_err(|_| libc::EINVAL)?,
        None => rustix::fs::tell(file).map_err(|error| match error.raw_os_error() {
            libc::ESPIPE => libc::EINVAL,
            errno => errno,
        })?,
    };
    let sent = send::write_file(runtime, to, place, file, at, bytes.min(AT_ONCE))?;
    match offset {
        Some(offset) => *offset += sent as off64_t,
        None => {
            let _ = rustix::fs::seek(file, rustix::fs::SeekFrom::Start(at + sent as u64));
        }
    }
    Ok(sent)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    bytes: size_t,
    flags: u32,
) -> ssize_t {
    let offsets = !from_offset.is_null() || !to_offset.is_null();
    let ends = (connection(from), connection(to));
    if let (None, None) = ends {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::splice(from, from_offset, to, to_offset, bytes, flags) };
    }
    let Some(_inside) = Inside::enter() else { return returned(Err(libc::EAGAIN)) };
    match ends {
        _ if offsets => returned(Err(libc::ESPIPE)),
        (Some((runtime, place)), None) => returned(pipe::from_connection(runtime, from, place, to, bytes, flags)),
        (None, Some((runtime, place))) => returned(pipe::into_connection(runtime, from, to, place, bytes, flags)),
        // One of the two must be a pipe.
        _ => returned(Err(libc::EINVAL)),
    }
}
