//! Model of futex(2), which replaces `word.rs` in builds for loom. Loom tries every order of the threads' steps. The
//! kernel compares the word and puts the thread to sleep in one step. Here a mutex of loom (`kernel`), held during
//! both, makes them one step.

use std::ops::Deref;
use std::time::Duration;

use loom::sync::atomic::AtomicU32;
use loom::sync::{Condvar, Mutex};

pub(super) use loom::sync::atomic::Ordering;

/// Number of times that a waiter polls a lock before it sleeps: none, because each poll would be one more step for loom
/// to explore.
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

/// Waits as futex(2) does while the word has the value `while_it_is`. Loom has no clock, so a wait with a time limit
/// ends at once, as if the time had run out.
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
