//! Fills *missing* pages: the kernel has nothing there, and a thread that touches such a page waits (userfaultfd(2)).
//! The kernel may have no memory for a page; then the library waits for some ([`scarce`]).

use std::io;
use std::ops::Range;

use rustix::mm::{Advice, madvise};
use shunt_sys::userfaultfd::Userfaultfd;

use super::whole_pages;
use crate::system::scarce;

/// Fills missing pages from `at` on with `bytes`. Returns false if they are not mapped any more. If the kernel has no
/// memory, the process ends here, and the memory of `bytes` is given up first.
pub(super) fn fill(faults: &Userfaultfd, at: usize, bytes: &[u8]) -> bool {
    patiently(|| faults.fill(at, bytes)).unwrap_or_else(|| end(bytes))
}

/// Fills missing pages with zeros, as [`fill`] does with bytes.
pub(super) fn fill_zeros(faults: &Userfaultfd, pages: Range<usize>) -> bool {
    patiently(|| faults.fill_zeros(pages.clone())).unwrap_or_else(|| end(&[]))
}

/// Calls `fill` again while the kernel has no memory. Returns `None` if it has none for too long, else whether `fill`
/// succeeded. Pages that a failed call has filled stay filled, and the next call skips them.
fn patiently(fill: impl Fn() -> io::Result<()>) -> Option<bool> {
    scarce::patiently(|| match fill() {
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => None,
        filled => Some(filled.is_ok()),
    })
}

fn end(bytes: &[u8]) -> ! {
    let start = bytes.as_ptr() as usize;
    let spare = whole_pages(&(start..start + bytes.len()));
    // SAFETY: bytes of the library's own, which are not read again: the process ends.
    let _ = unsafe { madvise(spare.start as *mut _, spare.len(), Advice::LinuxDontNeed) };
    scarce::end()
}
