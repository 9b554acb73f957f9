//! Copies of memory. A program that copies absent memory has all of it fetched together, with the bytes behind it, and
//! not page by page. nginx copies what it writes over TLS, 16 KiB at a time, into a buffer of its own. OpenSSL 3.0
//! copies what it is given, too.
//!
//! Memory that a program overwrites is not fetched first. Buffers that are used again still stand for bytes of their
//! last use.

use std::ops::Range;

use libc::{c_int, c_void, size_t};
use shunt_process::bypass;
use shunt_process::connections::runtime::{Runtime, runtime};
use shunt_process::memory::blocks::{self, PageState};
use shunt_process::memory::{any_absent, pages_around};
use shunt_process::system::inside::Inside;
use shunt_process::system::process;
use shunt_process::tls;

use super::socket::checked;
use super::{errno, real, set_errno};

/// Shortest copy that may be a part of a body. Shorter ones are fields.
const COPY_MIN: usize = 512;
/// Number of bytes to fetch behind a copy. A program that copies one part of a block usually copies the next, too.
const AHEAD_BYTES: usize = 256 << 10;

/// Copies memory that may be absent.
#[cold]
fn copies(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    if !copy(to as usize, from as usize, bytes) {
        // SAFETY: as below.
        unsafe { real::memmove(to, from, bytes) };
    }
    to
}

/// Whether a page of a block is missing in a range. Takes no lock: the library copies present memory, too, while it
/// holds locks.
fn is_missing(range: &Range<usize>) -> bool {
    blocks::contains(range.start) && blocks::any(&pages_around(range), PageState::Missing)
}

/// Calls `work` inside the library, and preserves the program's errno. Returns false if the thread is inside already,
/// or if `work` returns false.
fn inside(work: impl FnOnce(&'static Runtime) -> bool) -> bool {
    let (Some(runtime), Some(_inside)) = (runtime(), Inside::enter()) else { return false };
    let before = errno();
    // A child of _Fork(3) would fill its parent's memory, and not its own.
    let done = process::is_own() && work(runtime);
    set_errno(before);
    done
}

/// Copies memory, if a page of it is missing. Returns whether the copy is done.
fn copy(to: usize, from: usize, bytes: usize) -> bool {
    let (source, target) = (from..from.saturating_add(bytes), to..to.saturating_add(bytes));
    (is_missing(&source) || is_missing(&target)) && inside(|runtime| absent(runtime, &source, &target))
}

/// Copies memory that has missing pages. Bytes that are copied towards a TLS connection stay absent: they may leave
/// without ever being here. Returns whether the copy is done.
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
        // If they cannot be fetched, the copy itself ends the process, with a message.
        let _ = memory.fetch_range(&(source.start..ahead.max(source.end)));
    }
    // Real bytes are copied beside absent ones, or over them.
    let keeps = tls::watches() || stands_for_any(runtime, target);
    // SAFETY: as above.
    keeps && memory.absent_within(source).is_empty() && unsafe { memory.copy(source, target.start) }
}

/// Whether a touch somewhere in a range would have bytes fetched.
fn stands_for_any(runtime: &Runtime, range: &Range<usize>) -> bool {
    !runtime.memory.absent_within(&pages_around(range)).is_empty()
}

/// Fills memory that may be absent. Returns whether that is done.
#[cold]
fn fills(to: usize, value: u8, bytes: usize) -> bool {
    const AT_ONCE: usize = 64 << 10;
    let target = to..to.saturating_add(bytes);
    let fill = |runtime: &Runtime| {
        if !stands_for_any(runtime, &target) {
            return false;
        }
        let with = vec![value; AT_ONCE.min(bytes)];
        for at in target.clone().step_by(AT_ONCE) {
            // SAFETY: the program's own call.
            unsafe { runtime.memory.write(at, &with[..AT_ONCE.min(target.end - at)]) };
        }
        true
    };
    is_missing(&target) && inside(fill)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn memset(to: *mut c_void, value: c_int, bytes: size_t) -> *mut c_void {
    let is_large = bytes >= COPY_MIN && blocks::contains(to as usize) && any_absent();
    if !(is_large && fills(to as usize, value as u8, bytes)) {
        // SAFETY: the program's own call.
        unsafe { real::memset(to, value, bytes) };
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __memset_chk(to: *mut c_void, value: c_int, bytes: size_t, room: size_t) -> *mut c_void {
    checked(bytes, room);
    // SAFETY: the program's own call.
    unsafe { memset(to, value, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn bzero(to: *mut c_void, bytes: size_t) {
    // SAFETY: the program's own call.
    unsafe { memset(to, 0, bytes) };
}

/// The memory may overlap: memcpy(3) of programs that were linked before glibc 2.14 allows that. glibc has the same
/// code for both.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    let reads = bytes >= COPY_MIN && blocks::contains(from as usize);
    let writes = bytes > 0 && (bytes >= COPY_MIN || tls::watches()) && blocks::contains(to as usize);
    if (reads || writes) && any_absent() {
        return copies(to, from, bytes);
    }
    // SAFETY: the program's own call, as all here.
    unsafe { real::memmove(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    // SAFETY: the program's own call.
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
    // SAFETY: the program's own call.
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
    // SAFETY: the program's own call.
    unsafe { mempcpy(to, from, bytes) }
}

same! {
    memmove is memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __mempcpy is mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __bzero is bzero(to: *mut c_void, bytes: size_t) -> ();
    __memmove_chk is __memcpy_chk(to: *mut c_void, from: *const c_void, bytes: size_t, room: size_t) -> *mut c_void;
}
