//! Whether the program has threads: some of what is done to its memory is right only where nobody else writes meanwhile.

use std::cell::Cell;

use libc::{c_int, c_void, pthread_attr_t, pthread_t};

use super::real;
use crate::inside::Inside;
use crate::memory;

thread_local! {
    /// While the thread that this one starts is ours.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of that name of the library's, which takes no signals: those are the program's threads'. False: there can be
/// no more.
///
/// It is in the library as long as it lives: its own system calls end no turn of the program, whose thread may hold Handings,
/// and wait for a lock that this one has just dropped and is to wake it for.
pub fn start_library(name: &'static str, work: impl FnOnce() + Send + 'static) -> bool {
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written before they are read. The new thread inherits a mask that blocks all.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let builder = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
    let started = start_ours(|| {
        builder.spawn(|| {
            let _inside = Inside::enter();
            work();
        })
    });
    // SAFETY: the mask that the first call wrote.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.is_ok()
}

/// Starts a thread of our own.
fn start_ours<T>(start: impl FnOnce() -> T) -> T {
    OURS.set(true);
    let started = start();
    OURS.set(false);
    started
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    if !OURS.get() {
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
