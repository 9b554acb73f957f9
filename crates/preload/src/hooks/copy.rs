//! Copies: a program that copies absent memory gets all of it with one question, and what follows it, not page by page.
//!
//! So nginx writes over TLS: 16 KiB at a time, by way of a buffer of its own. And so does OpenSSL 3.0 with what it is given.

use std::ops::Range;

use libc::{c_void, size_t};

use super::socket::checked;
use super::{errno, real, set_errno};
use crate::blocks::{self, PageState};
use crate::inside::Inside;
use crate::memory::{any_absent, pages_around};
use crate::runtime::{Runtime, runtime};
use crate::{bypass, tls};

/// Less is a field, not a part of a body.
const COPY_MIN: usize = 512;
/// Behind what is copied. Who copies one part of a block goes on.
const AHEAD_BYTES: usize = 256 << 10;

/// Copies where memory may be absent.
#[cold]
fn copies(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    if !copy(to as usize, from as usize, bytes) {
        // SAFETY: as below.
        unsafe { real::memmove(to, from, bytes) };
    }
    to
}

/// True: it is done. Asks for no lock before it knows of a missing page: the library copies what is there, and with locks held.
fn copy(to: usize, from: usize, bytes: usize) -> bool {
    let (source, target) = (from..from.saturating_add(bytes), to..to.saturating_add(bytes));
    let is_missing =
        |range: &Range<usize>| blocks::contains(range.start) && blocks::any(&pages_around(range), PageState::Missing);
    let is_ours = is_missing(&source) || tls::watches() && is_missing(&target);
    if !is_ours {
        return false;
    }
    let (Some(runtime), Some(_inside)) = (runtime(), Inside::enter()) else { return false };
    let before = errno();
    let copied = absent(runtime, &source, &target);
    set_errno(before);
    copied
}

/// What is copied towards a TLS connection stays absent: it may leave without ever being here.
fn absent(runtime: &'static Runtime, source: &Range<usize>, target: &Range<usize>) -> bool {
    let memory = &runtime.memory;
    if memory.meets(source) && !memory.absent_within(source).is_empty() {
        let goes_on = source.len() >= COPY_MIN || memory.behind_absent(target.start) > 0;
        // SAFETY: the program's own copy, as below.
        if tls::watches() && goes_on && bypass::can_begin(runtime) && unsafe { memory.copy(source, target.start) } {
            return true;
        }
        if source.len() < COPY_MIN {
            return false;
        }
        let ahead = source.end.saturating_add(AHEAD_BYTES).min(blocks::around(source.start).end);
        // Where it cannot be had, the copy itself ends the process, with a sentence.
        let _ = memory.fetch_range(&(source.start..ahead.max(source.end)));
    }
    // What is real beside what is absent.
    // SAFETY: as above.
    tls::watches() && memory.absent_within(source).is_empty() && unsafe { memory.copy(source, target.start) }
}

/// What memcpy(3) of programs that were linked before glibc 2.14 allows, too: overlapping memory. To glibc it is the same.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    let reads = bytes >= COPY_MIN && blocks::contains(from as usize);
    let writes = tls::watches() && blocks::contains(to as usize) && bytes > 0;
    if (reads || writes) && any_absent() {
        return copies(to, from, bytes);
    }
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
