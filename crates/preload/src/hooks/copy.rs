//! Copies: a program that copies absent memory gets all of it with one question, and what follows it, not page by page.
//!
//! So nginx writes over TLS: 16 KiB at a time, by way of a buffer of its own. And so does OpenSSL 3.0 with what it is given.

use libc::{c_void, size_t};

use super::socket::checked;
use super::{Inside, errno, real, set_errno};
use crate::blocks::{self, PageState};
use crate::memory::pages_around;
use crate::runtime::runtime;

/// Less is a field, not a part of a body.
const COPY_MIN: usize = 512;
/// Behind what is copied. Who copies one part of a block goes on.
const AHEAD_BYTES: usize = 256 << 10;

/// Before a copy.
#[inline]
fn copying(from: *const c_void, bytes: size_t) {
    if bytes >= COPY_MIN && blocks::contains(from as usize) {
        fetch(from as usize, bytes);
    }
}

/// Asks for no lock before it knows of a missing page: the library copies what is there, and with locks held.
#[cold]
fn fetch(from: usize, bytes: usize) {
    let copied = from..from.saturating_add(bytes);
    if blocks::any(&pages_around(&copied), PageState::Missing)
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        let before = errno();
        let ahead = copied.end.saturating_add(AHEAD_BYTES).min(blocks::around(from).end);
        // Where it cannot be had, the copy itself ends the process, with a sentence.
        let _ = runtime.memory.fetch_range(&(from..ahead.max(copied.end)));
        set_errno(before);
    }
}

/// What memcpy(3) of programs that were linked before glibc 2.14 allows, too: overlapping memory. To glibc it is the same.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    copying(from, bytes);
    // SAFETY: the program's own call, as all here.
    unsafe { real::memmove(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    // SAFETY: as above.
    unsafe { memcpy(to, from, bytes).byte_add(bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __memcpy_chk(
    to: *mut c_void,
    from: *const c_void,
    bytes: size_t,
    room: size_t,
) -> *mut c_void {
    checked(bytes, room);
    // SAFETY: as above.
    unsafe { memcpy(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __mempcpy_chk(
    to: *mut c_void,
    from: *const c_void,
    bytes: size_t,
    room: size_t,
) -> *mut c_void {
    checked(bytes, room);
    // SAFETY: as above.
    unsafe { mempcpy(to, from, bytes) }
}

same! {
    memmove is memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __mempcpy is mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __memmove_chk is __memcpy_chk(to: *mut c_void, from: *const c_void, bytes: size_t, room: size_t) -> *mut c_void;
}
