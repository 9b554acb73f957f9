//! Pages that get their bytes. The kernel may have no memory for one. It is asked again for a while, and then the process ends,
//! as it might by the kernel's own choice: a page that was left out would read as zeros.

use std::io;
use std::ops::Range;

use rustix::mm::{Advice, madvise};
use rustix::thread::nanosleep;
use rustix::time::Timespec;
use shunt_sys::userfaultfd::Userfaultfd;

use super::whole_pages;
use crate::faults;

/// Together a second.
const TRIES: u32 = 100;
const BETWEEN: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Fills missing pages from `at` on. False: they are not mapped any more. The process may end in it, and `bytes` with it.
pub(super) fn fill(faults: &Userfaultfd, at: usize, bytes: &[u8]) -> bool {
    patiently(|| faults.fill(at, bytes)).unwrap_or_else(|| end(bytes))
}

/// The same with zeros.
pub(super) fn fill_zeros(faults: &Userfaultfd, pages: Range<usize>) -> bool {
    patiently(|| faults.fill_zeros(pages.clone())).unwrap_or_else(|| end(&[]))
}

/// `None`: there is no memory. What was done before it failed stays done, and is passed over the next time.
fn patiently(fill: impl Fn() -> io::Result<()>) -> Option<bool> {
    for _ in 0..TRIES {
        match fill() {
            Ok(()) => return Some(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                let _ = nanosleep(&BETWEEN);
            }
            Err(_) => return Some(false),
        }
    }
    None
}

fn end(bytes: &[u8]) -> ! {
    // A pipe takes a page of memory for the sentence.
    let start = bytes.as_ptr() as usize;
    let spare = whole_pages(&(start..start + bytes.len()));
    // SAFETY: bytes of the library's own, which nobody reads any more: from here on the process only ends.
    let _ = unsafe { madvise(spare.start as *mut _, spare.len(), Advice::LinuxDontNeed) };
    faults::end_process("the kernel has no memory for bytes that this process has read (raise its memory limit)")
}
