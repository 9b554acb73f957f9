//! Waits for the kernel to have memory for bytes that a program has read. If the kernel has none for a second, the
//! process ends, as the kernel might end it because there is no memory. The process cannot continue: the bytes' pages
//! would read as zeros.

use rustix::mm::{Advice, madvise};
use rustix::thread::nanosleep;
use rustix::time::Timespec;
use shunt_sys::userfaultfd::PAGE_BYTES;

use super::ending::end_process;

/// Number of tries, and the pause between them: a second together.
const TRIES: u32 = 100;
const BETWEEN: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Pages that the process gives back to the kernel before its last message: if stderr is a pipe, the kernel needs a
/// page for the message.
#[repr(C, align(4096))]
struct Spare([u8; 4 * PAGE_BYTES]);

/// Not filled with zeros, because the kernel keeps no memory for pages of zeros.
static mut SPARE: Spare = Spare([1; 4 * PAGE_BYTES]);

/// Writes into the spare pages, so that the kernel has memory for each. Called when the library is loaded.
pub fn begin() {
    for page in 0..4 {
        // SAFETY: a byte of the static, which is not read anywhere.
        unsafe { (&raw mut SPARE).cast::<u8>().add(page * PAGE_BYTES).write_volatile(2) };
    }
}

/// Calls `ask` until it returns a value, which means that the kernel had memory. Returns `None` if the kernel has had
/// no memory for a second.
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

/// Ends the process because there is no memory.
pub fn end() -> ! {
    // SAFETY: pages of the static, which is not read anywhere.
    let _ = unsafe { madvise((&raw mut SPARE).cast(), size_of::<Spare>(), Advice::LinuxDontNeed) };
    end_process(
        "the kernel has no memory for bytes that this process has touched: raise the memory limit of the process",
    )
}
