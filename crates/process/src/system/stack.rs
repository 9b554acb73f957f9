//! Which memory is a thread's stack. It is never made absent: the library runs on it, also where it holds the lock that
//! the fault's handler needs, and later where a buffer is now.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// A stack that is not the thread's own (a coroutine's, a signal's) ends at the latest so many bytes behind what is in use of it.
const OTHER_BYTES: usize = 8 << 20;

thread_local! {
    /// This thread's stack; empty: not known yet.
    static OWN: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Whether an address is in the thread's stack or, where it runs on another now, may be in the part of that which is in use.
pub fn is_own(address: usize) -> bool {
    let here = 0u8;
    let from = &raw const here as usize;
    let Some(own) = own() else { return address >= from };
    own.contains(&address) || !own.contains(&from) && (from..from.saturating_add(OTHER_BYTES)).contains(&address)
}

/// `None`: the kernel does not say (in another root directory, without /proc). Then all above is taken for it.
fn own() -> Option<Range<usize>> {
    let (start, end) = OWN.get();
    if end != 0 {
        return Some(start..end);
    }
    let mut attributes = MaybeUninit::uninit();
    let (mut start, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: filled by the first call, where it succeeds, read by the second and ended by the third.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        libc::pthread_attr_getstack(attributes.as_ptr(), &mut start, &mut bytes);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
    }
    OWN.set((start as usize, start as usize + bytes));
    Some(start as usize..start as usize + bytes)
}
