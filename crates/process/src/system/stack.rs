//! Finds out which memory is a thread's stack. Absent memory has no bytes yet: when a thread touches it, the fault
//! handler fetches them. A stack is never made absent, because the library runs on the same stack. It could touch
//! absent memory while it holds the lock that the fault handler needs, and would wait for ever. A program's buffer on
//! the stack is no exception: later the library's own frames may lie there.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Number of bytes that count as stack, from the thread's present frame upwards, while the thread runs on another stack
/// than its own: a coroutine's, or a signal handler's. The library does not know where such a stack ends.
const OTHER_BYTES: usize = 8 << 20;

thread_local! {
    /// Start and end of this thread's stack; zeros until they are known.
    static OWN: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Whether an address is in the thread's own stack. If the thread runs on another stack now, also whether the address
/// may be in the used part of that other stack.
pub fn is_own(address: usize) -> bool {
    let here = 0u8;
    let from = &raw const here as usize;
    let Some(own) = own() else { return address >= from };
    own.contains(&address) || !own.contains(&from) && (from..from.saturating_add(OTHER_BYTES)).contains(&address)
}

/// The thread's own stack. `None` if the kernel does not tell (in another root directory, without /proc). Then all
/// memory above the current frame counts as stack.
fn own() -> Option<Range<usize>> {
    let (start, end) = OWN.get();
    if end != 0 {
        return Some(start..end);
    }
    let mut attributes = MaybeUninit::uninit();
    let (mut start, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes are filled by the first call, if it succeeds; read by the second; and released by the
    // third.
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
