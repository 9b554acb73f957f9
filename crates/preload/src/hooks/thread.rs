//! Notes whether the program has several threads: some changes of its memory are right only if no other thread writes
//! meanwhile.

use libc::{c_int, c_void, pthread_attr_t, pthread_t};
use shunt_process::memory;
use shunt_process::system::threads;

use super::real;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    if !threads::are_ours() {
        memory::has_threads();
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::pthread_create(thread, attributes, start, argument) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn thrd_create(
    thread: *mut c_void,
    start: extern "C-unwind" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> c_int {
    memory::has_threads();
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::thrd_create(thread, start, argument) }
}
