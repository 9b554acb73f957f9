//! Signals, for a while.

/// This thread's signals wait while this lives. A thread that it starts meanwhile never takes any.
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
        // SAFETY: the mask that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
