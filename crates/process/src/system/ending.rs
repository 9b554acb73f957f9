//! How the library ends a process.

use std::io::IoSlice;

use super::kernel;

/// A program must not go on with bytes that are not the right ones, and there is no error that a load from memory
/// could return.
pub fn end_process(why: &str) -> ! {
    // In one call, and without memory: there may be none.
    let text = [IoSlice::new(b"shunt: "), IoSlice::new(why.as_bytes()), IoSlice::new(b"; it ends here\n")];
    let _ = rustix::io::writev(kernel::borrow(libc::STDERR_FILENO), &text);
    // SAFETY: takes no pointers that are kept: SIGBUS is what a lost page of a file is, too; with its default action,
    // because a handler that jumps back would go on.
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
