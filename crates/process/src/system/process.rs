//! The id of this process, kept so that it takes no system call. Also whether the library's state is this process's
//! own. In a child that `_Fork(3)` made, it is the parent's state.

use std::sync::atomic::{AtomicU32, Ordering};

/// Id of this process; 0 until it is asked for. In a child that `_Fork(3)` made, it is the parent's id.
static OWN: AtomicU32 = AtomicU32::new(0);

/// Notes the id of this process: the program, or the child of a fork.
pub fn begin() {
    OWN.store(std::process::id(), Ordering::Relaxed);
}

/// This process's id.
pub fn own() -> u32 {
    if OWN.load(Ordering::Relaxed) == 0 {
        begin();
    }
    OWN.load(Ordering::Relaxed)
}

/// Whether the library's state is that of this process. In a child that `_Fork(3)` made it is the parent's, because the
/// library does not hear of that call.
pub fn is_own() -> bool {
    own() == std::process::id()
}
