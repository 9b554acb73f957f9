//! Streams (FILE) on connections. glibc reads and writes the descriptor of a stream without the interposed functions.
//! So streams of TCP sockets are made here, and use the interposed functions.

use std::os::fd::RawFd;

use libc::{FILE, c_char, c_int, c_void, size_t, ssize_t};
use shunt_process::connections::entries::is_kept;
use shunt_process::connections::runtime::{Runtime, runtime};
use shunt_process::descriptors;
use shunt_process::system::kernel::borrow;

use super::arguments::Arguments;
use super::{connection, descriptor, errno, real, set_errno, socket};

/// cookie_io_functions_t (fopencookie(3)).
#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: Option<unsafe extern "C-unwind" fn()>,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn vasprintf(text: *mut *mut c_char, format: *const c_char, arguments: *mut Arguments) -> c_int;
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// Offset of the descriptor in glibc's FILE, in bytes. fileno(3) returns what is there.
const FILENO_AT: usize = 112;

unsafe extern "C-unwind" fn stream_read(cookie: *mut c_void, to: *mut c_char, bytes: size_t) -> ssize_t {
    // SAFETY: glibc's own buffer.
    unsafe { socket::read(cookie as usize as RawFd, to.cast(), bytes) }
}

/// Writes all bytes, as glibc expects; fewer only after an error.
unsafe extern "C-unwind" fn stream_write(cookie: *mut c_void, from: *const c_char, bytes: size_t) -> ssize_t {
    let mut done = 0;
    while done < bytes {
        // SAFETY: glibc's own buffer.
        let now = unsafe { socket::write(cookie as usize as RawFd, from.add(done).cast(), bytes - done) };
        match usize::try_from(now) {
            Ok(now) => done += now,
            Err(_) => break,
        }
    }
    done as ssize_t
}

unsafe extern "C-unwind" fn stream_close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream's own descriptor.
    unsafe { descriptor::close(cookie as usize as RawFd) }
}

fn is_tcp(fd: RawFd) -> bool {
    fd >= 0 && rustix::net::sockopt::socket_protocol(borrow(fd)) == Ok(Some(rustix::net::ipproto::TCP))
}

/// Makes a stream of a descriptor. The stream reads, writes and closes the descriptor by the interposed functions.
///
/// # Safety
/// As for fdopen(3).
unsafe fn open(fd: RawFd, mode: *const c_char) -> *mut FILE {
    let functions = Functions { read: stream_read, write: stream_write, seek: None, close: stream_close };
    // SAFETY: the functions take the descriptor as their cookie.
    let stream = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
    if !stream.is_null() {
        // SAFETY: a FILE, whose layout is part of glibc's ABI.
        unsafe { stream.cast::<u8>().add(FILENO_AT).cast::<c_int>().write(fd) };
    }
    stream
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    let before = errno();
    if runtime().is_some() && is_tcp(fd) {
        // SAFETY: the program passed these arguments to fdopen(3), so they are valid for this call.
        return unsafe { open(fd, mode) };
    }
    set_errno(before);
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::fdopen(fd, mode) }
}

/// fclose(3). Notes that the stream's descriptor is closed, because glibc closes it without the interposed close(2).
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: the program's stream.
    let fd = if stream.is_null() { -1 } else { unsafe { stream.cast::<u8>().add(FILENO_AT).cast::<c_int>().read() } };
    if fd >= 0 && connection(fd).is_none() && !is_kept(fd) {
        descriptors::closing(fd);
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::fclose(stream) }
}

/// Replaces standard streams that are connections (inetd(8)). Called when the library is loaded.
pub fn adopt_standard(runtime: &Runtime) {
    // SAFETY: no other thread runs yet; glibc lets programs assign to these three variables.
    unsafe {
        if descriptors::place(runtime, 0).is_some() {
            stdin = open(0, c"r".as_ptr());
        }
        if descriptors::place(runtime, 1).is_some() {
            stdout = open(1, c"w".as_ptr());
        }
        if descriptors::place(runtime, 2).is_some() {
            stderr = open(2, c"w".as_ptr());
            libc::setvbuf(stderr, std::ptr::null_mut(), libc::_IONBF, 0);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut Arguments) -> c_int {
    if connection(fd).is_none() {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::vdprintf(fd, format, arguments.cast()) };
    }
    let mut text = std::ptr::null_mut();
    // SAFETY: the program's format and arguments.
    let bytes = unsafe { vasprintf(&raw mut text, format, arguments) };
    if bytes < 0 {
        return bytes;
    }
    // SAFETY: vasprintf(3) has written `bytes` bytes at `text`, which are freed only afterwards.
    let written = unsafe { stream_write(fd as usize as *mut c_void, text, bytes as usize) };
    let after = errno();
    // SAFETY: memory that vasprintf(3) has allocated.
    unsafe { libc::free(text.cast()) };
    set_errno(after);
    if written == bytes as ssize_t { bytes } else { -1 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut Arguments,
) -> c_int {
    if connection(fd).is_none() {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { real::__vdprintf_chk(fd, flag, format, arguments.cast()) };
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { vdprintf(fd, format, arguments) }
}

same! {
    _IO_fdopen is fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    _IO_fclose is fclose(stream: *mut FILE) -> c_int;
}
