//! The end of a process in which the library cannot continue.

use std::io::IoSlice;

use super::kernel;

/// Ends the process with SIGBUS, and says why on stderr. A program must not continue with wrong bytes, and a load from
/// memory cannot return an error.
pub fn end_process(why: &str) -> ! {
    // The text is written by one call, and without allocating: there may be no memory.
    let text = [IoSlice::new(b"shunt: "), IoSlice::new(why.as_bytes()), IoSlice::new(b"; the process ends here\n")];
    let _ = rustix::io::writev(kernel::borrow(libc::STDERR_FILENO), &text);
    // SAFETY: the calls keep none of the pointers. The signal is SIGBUS, as for a lost page of a file. It has its
    // default action, because a handler that jumps back would continue.
    unsafe {
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        let mut only = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, only.as_ptr(), std::ptr::null_mut());
        libc::raise(libc::SIGBUS);
        libc::_exit(128 + libc::SIGBUS)
    }
}
