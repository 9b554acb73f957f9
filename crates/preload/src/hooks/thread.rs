//! Whether the program has threads: some of what is done to its memory is right only where nobody else writes meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, pthread_attr_t, pthread_t};

use super::real;
use crate::memory;

/// While the thread that is being started is ours.
static OURS: AtomicBool = AtomicBool::new(false);

/// Starts a thread of our own.
pub fn start_ours<T>(start: impl FnOnce() -> T) -> T {
    OURS.store(true, Ordering::Relaxed);
    let started = start();
    OURS.store(false, Ordering::Relaxed);
    started
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    if !OURS.load(Ordering::Relaxed) {
        memory::has_threads();
    }
    // SAFETY: the program's own call, here and below.
    unsafe { real::pthread_create(thread, attributes, start, argument) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn thrd_create(
    thread: *mut c_void,
    start: extern "C-unwind" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> c_int {
    memory::has_threads();
    // SAFETY: as above.
    unsafe { real::thrd_create(thread, start, argument) }
}
