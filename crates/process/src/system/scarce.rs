//! Where the kernel has no memory for what a program has read: it is asked again for a while, and then the process ends, as it
//! might by the kernel's own choice. A page that was left out would read as zeros.

use rustix::mm::{Advice, madvise};
use rustix::thread::nanosleep;
use rustix::time::Timespec;
use shunt_sys::userfaultfd::PAGE_BYTES;

use super::ending::end_process;

/// Together a second.
const TRIES: u32 = 100;
const BETWEEN: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Pages that are there to be given up: a pipe takes one for the sentence.
#[repr(C, align(4096))]
struct Spare([u8; 4 * PAGE_BYTES]);

/// Not of zeros, whose pages the kernel would leave out.
static mut SPARE: Spare = Spare([1; 4 * PAGE_BYTES]);

/// When the library is loaded: has the spare pages.
pub fn begin() {
    for page in 0..4 {
        // SAFETY: a byte of the static's, which nobody else looks at.
        unsafe { (&raw mut SPARE).cast::<u8>().add(page * PAGE_BYTES).write_volatile(2) };
    }
}

/// Asks the kernel until it gives something. `None`: it has had no memory for a second.
pub fn patiently<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..TRIES {
        let given = ask();
        if given.is_some() {
            return given;
        }
        let _ = nanosleep(&BETWEEN);
    }
    None
}

/// Ends the process, which has no memory.
pub fn end() -> ! {
    // SAFETY: pages of the static's, which nobody looks at.
    let _ = unsafe { madvise((&raw mut SPARE).cast(), size_of::<Spare>(), Advice::LinuxDontNeed) };
    end_process(
        "the kernel has no memory for bytes that this process has read, or to keep track of them (raise its memory limit)",
    )
}
