//! Which process this is, known without a system call, and whether it is one that the library knows of.

use std::sync::atomic::{AtomicU32, Ordering};

/// 0: nobody has asked yet. In a child that was made by `_Fork(3)` it is its parent.
static OWN: AtomicU32 = AtomicU32::new(0);

/// A process begins: the program, or the child of a fork.
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

/// Whether this process is the one that the library's state is about, and no child that the library does not know of.
pub fn is_own() -> bool {
    own() == std::process::id()
}
