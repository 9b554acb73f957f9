//! Copies of memory. If a program copies absent memory, which stands for bytes in a store, all of it is fetched
//! together, with the bytes behind it, and not page by page. nginx copies what it writes over TLS, 16 KiB at a time,
//! into a buffer of its own. OpenSSL 3.0 copies what it is given, too.
//!
//! A *block* is memory that malloc(3) has returned. A page of a large block is *missing* if the kernel has no memory
//! for it: a thread that touches it waits until the library has filled it.
//!
//! Memory that these functions overwrite is usually not fetched first. (A buffer that is used again may still stand for
//! bytes of its last use.)

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

/// Shortest copy, in bytes, that counts as a copy of a part of a body. Shorter ones are usually single fields.
const COPY_MIN: usize = 512;
/// Number of bytes to fetch behind those that are copied. A program that copies a part of a block usually copies the
/// next part, too.
const AHEAD_BYTES: usize = 256 << 10;

/// Copies memory that may be absent.
#[cold]
fn copies(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    if !copy(to as usize, from as usize, bytes) {
        // SAFETY: the program passed these arguments to a function that copies, so they are valid for this call.
        unsafe { real::memmove(to, from, bytes) };
    }
    to
}

/// Whether a range of a block has a missing page. Takes no lock, because the library calls memcpy(3) itself, for
/// present memory, while it holds locks.
fn is_missing(range: &Range<usize>) -> bool {
    blocks::contains(range.start) && blocks::any(&pages_around(range), PageState::Missing)
}

/// Calls `work` with the thread marked as inside the library, and preserves the program's errno. Returns what `work`
/// returns, or false where `work` is not called: the library is not active, or the thread is inside it already.
fn inside(work: impl FnOnce(&'static Runtime) -> bool) -> bool {
    let (Some(runtime), Some(_inside)) = (runtime(), Inside::enter()) else { return false };
    let before = errno();
    // `work` is not called in a child of _Fork(3), where it would fill pages of the parent, not the child's own.
    let done = process::is_own() && work(runtime);
    set_errno(before);
    done
}

/// Copies memory, if a page of the source or the target is missing. Returns whether the copy is done.
fn copy(to: usize, from: usize, bytes: usize) -> bool {
    let (source, target) = (from..from.saturating_add(bytes), to..to.saturating_add(bytes));
    (is_missing(&source) || is_missing(&target)) && inside(|runtime| absent(runtime, &source, &target))
}

/// Copies memory that has missing pages. Bytes that are probably copied in order to be written over TLS stay absent in
/// the copy: another machine may send them to the client. Returns whether the copy is done.
fn absent(runtime: &'static Runtime, source: &Range<usize>, target: &Range<usize>) -> bool {
    let memory = &runtime.memory;
    if memory.meets(source) && !memory.absent_within(source).is_empty() {
        let goes_on = source.len() >= COPY_MIN || memory.behind_absent(target.start) > 0;
        // SAFETY: the program has asked for this copy.
        if tls::watches() && goes_on && bypass::can_begin(runtime) && unsafe { memory.copy(source, target.start) } {
            return true;
        }
        if source.len() < COPY_MIN {
            return false;
        }
        let ahead = source.end.saturating_add(AHEAD_BYTES).min(blocks::around(source.start).end);
        // If the bytes cannot be fetched, the copy itself touches them, which ends the process with a message.
        let _ = memory.fetch_range(&(source.start..ahead.max(source.end)));
    }
    // The source's bytes are in place now, unless they could not be fetched. They are copied without a touch of missing
    // pages, if the target's pages stand for other bytes, or may soon stand for some (TLS).
    let keeps = tls::watches() || stands_for_any(runtime, target);
    // SAFETY: the program has asked for this copy.
    keeps && memory.absent_within(source).is_empty() && unsafe { memory.copy(source, target.start) }
}

/// Whether a touch somewhere in a range would cause a fetch.
fn stands_for_any(runtime: &Runtime, range: &Range<usize>) -> bool {
    !runtime.memory.absent_within(&pages_around(range)).is_empty()
}

/// Fills a range of a block with a value, if the range's pages stand for bytes of a store. These bytes are given up.
/// Returns whether the range is filled.
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
            // SAFETY: the program has asked for this memory to be filled.
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
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        unsafe { real::memset(to, value, bytes) };
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __memset_chk(to: *mut c_void, value: c_int, bytes: size_t, room: size_t) -> *mut c_void {
    checked(bytes, room);
    // SAFETY: the arguments are valid for this call, because the program's call of `__memset_chk` needs the same.
    unsafe { memset(to, value, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn bzero(to: *mut c_void, bytes: size_t) {
    // SAFETY: the arguments are valid for this call, because the program's call of `bzero` needs the same.
    unsafe { memset(to, 0, bytes) };
}

/// memcpy(3), and memmove(3). Source and target may overlap, because memcpy(3) of programs that were linked before
/// glibc 2.14 allows that. glibc has the same code for both functions.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    let reads = bytes >= COPY_MIN && blocks::contains(from as usize);
    let writes = bytes > 0 && (bytes >= COPY_MIN || tls::watches()) && blocks::contains(to as usize);
    if (reads || writes) && any_absent() {
        return copies(to, from, bytes);
    }
    // SAFETY: the program passed these arguments to a function that copies, so they are valid for this call.
    unsafe { real::memmove(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void {
    // SAFETY: the arguments are valid for this call, because the program's call of `mempcpy` needs the same.
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
    // SAFETY: the arguments are valid for this call, because the program's call of `__memcpy_chk` needs the same.
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
    // SAFETY: the arguments are valid for this call, because the program's call of `__mempcpy_chk` needs the same.
    unsafe { mempcpy(to, from, bytes) }
}

same! {
    memmove is memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __mempcpy is mempcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    __bzero is bzero(to: *mut c_void, bytes: size_t) -> ();
    __memmove_chk is __memcpy_chk(to: *mut c_void, from: *const c_void, bytes: size_t, room: size_t) -> *mut c_void;
}
