//! Descriptors of a library that lives in somebody else's program: out of the way of its low numbers, and known, so that
//! what it closes without having opened it can be told from what is its own (crates/preload).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Programs that count on low numbers, or wait by select(2), do so below this.
const FROM: RawFd = 512;
const NUMBERS: usize = 1 << 20;

static OWN: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((OWN.get(number / 64)?, 1 << (number % 64)))
}

/// Whether a number is that of an [`OwnFd`].
#[must_use]
#[inline]
pub fn is_own(fd: RawFd) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// One of them.
#[derive(Debug)]
pub struct OwnFd(OwnedFd);

impl OwnFd {
    /// Moves it away and keeps it; where no such number is free, it stays where it is.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, FROM).unwrap_or(fd);
        if let Some((word, bit)) = place(fd.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Self(fd)
    }

    /// Closes it where it cannot be dropped: in a child of fork(2), where threads of the parent's have it, too.
    ///
    /// # Safety
    /// In this process it is not dropped. Its number may be another's from here on.
    pub unsafe fn close_for_good(&self) {
        self.forget_number();
        // SAFETY: open, and by the caller's promise not closed a second time.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
    }

    fn forget_number(&self) {
        if let Some((word, bit)) = place(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

impl AsFd for OwnFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        self.forget_number();
    }
}
