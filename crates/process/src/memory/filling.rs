//! Pages that get their bytes. The kernel may have no memory for one ([`scarce`]).

use std::io;
use std::ops::Range;

use rustix::mm::{Advice, madvise};
use shunt_sys::userfaultfd::Userfaultfd;

use super::whole_pages;
use crate::system::scarce;

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
    scarce::patiently(|| match fill() {
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => None,
        filled => Some(filled.is_ok()),
    })
}

fn end(bytes: &[u8]) -> ! {
    let start = bytes.as_ptr() as usize;
    let spare = whole_pages(&(start..start + bytes.len()));
    // SAFETY: bytes of the library's own, which nobody reads any more: from here on the process only ends.
    let _ = unsafe { madvise(spare.start as *mut _, spare.len(), Advice::LinuxDontNeed) };
    scarce::end()
}
