//! Descriptors of a library that runs inside another program (`shunt run`). They have high numbers, so they leave the
//! low numbers, on which programs rely, free. Their numbers are recorded, so that crates/preload can tell when a
//! program closes a descriptor of the library by mistake.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Lowest number to which the library's descriptors are moved. Programs that rely on low numbers, or wait with
/// select(2), use numbers below it.
const FROM: RawFd = 512;
/// Descriptor numbers below this one are recorded.
const NUMBERS: usize = 1 << 20;

static OWN: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((OWN.get(number / 64)?, 1 << (number % 64)))
}

/// Whether a descriptor number is that of an [`OwnFd`].
#[must_use]
#[inline]
pub fn is_own(fd: RawFd) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// A descriptor of the library.
#[derive(Debug)]
pub struct OwnFd(OwnedFd);

impl OwnFd {
    /// Moves a descriptor to a high number and records it. Where no high number is free, the descriptor keeps its
    /// number.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, FROM).unwrap_or(fd);
        if let Some((word, bit)) = place(fd.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Self(fd)
    }

    /// Closes the descriptor without dropping this value: in a child of fork(2), copies of the parent's data still
    /// refer to the value.
    ///
    /// # Safety
    /// The caller does not drop this value in this process. From now on the number may belong to another descriptor.
    pub unsafe fn close_for_good(&self) {
        self.forget_number();
        // SAFETY: the descriptor is open, and the caller promises that it is not closed a second time.
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
