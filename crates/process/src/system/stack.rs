//! Which memory is a thread's stack. It is never made absent: the library runs on it, also where it holds the lock that
//! the fault's handler needs.

use std::cell::Cell;
use std::mem::MaybeUninit;

thread_local! {
    /// The end of this thread's stack; 0: not known yet.
    static END: Cell<usize> = const { Cell::new(0) };
}

/// Whether an address is in the part of this thread's stack that is in use.
pub fn is_own(address: usize) -> bool {
    let here = 0u8;
    let from = &raw const here as usize;
    address >= from && address < end()
}

fn end() -> usize {
    let known = END.get();
    if known != 0 {
        return known;
    }
    let mut attributes = MaybeUninit::uninit();
    let (mut start, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: filled by the first call, where it succeeds, read by the second and ended by the third.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            // Better no absent memory on this thread than a deadlock.
            return usize::MAX;
        }
        libc::pthread_attr_getstack(attributes.as_ptr(), &mut start, &mut bytes);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
    }
    END.set(start as usize + bytes);
    END.get()
}
