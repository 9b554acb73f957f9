//! In place of `word.rs` where loom tries every order of steps: the kernel compares a word and has a thread sleep in one step, and
//! so does a lock of loom's here.

use std::ops::Deref;
use std::time::Duration;

use loom::sync::atomic::AtomicU32;
use loom::sync::{Condvar, Mutex};

pub(super) use loom::sync::atomic::Ordering;

/// It would be a step each.
pub(super) const LOOKS: u32 = 0;

#[derive(Debug, Default)]
pub(super) struct Word {
    value: AtomicU32,
    kernel: Mutex<()>,
    woken: Condvar,
}

impl Word {
    pub(super) fn new(value: u32) -> Self {
        Self { value: AtomicU32::new(value), kernel: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Deref for Word {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.value
    }
}

/// Loom knows of no time: a wait that has a limit ends by it.
pub(super) fn wait(word: &Word, while_it_is: u32, at_most: Option<Duration>) -> bool {
    let kernel = word.kernel.lock().expect("loom's are not poisoned");
    if word.load(Ordering::SeqCst) != while_it_is {
        return false;
    }
    if at_most.is_some() {
        return true;
    }
    drop(word.woken.wait(kernel));
    false
}

pub(super) fn wake(word: &Word, how_many: u32) {
    let _kernel = word.kernel.lock().expect("loom's are not poisoned");
    if how_many == 1 { word.woken.notify_one() } else { word.woken.notify_all() }
}
