//! Blocks a thread's signals for a while.

/// Blocks this thread's signals for as long as this value lives. A thread that is started meanwhile never takes any,
/// because it inherits the mask.
pub struct SignalsWait(libc::sigset_t);

impl SignalsWait {
    #[allow(clippy::new_without_default, reason = "it is no value")]
    pub fn new() -> Self {
        let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are written before they are read.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for SignalsWait {
    fn drop(&mut self) {
        // SAFETY: restores the mask that the thread had before. The kernel only reads it.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
