//! The library's own allocator. Not glibc's, whose locks a faulting thread may hold; and with a lock that costs next to
//! nothing where nobody else holds it, because nobody does, as a rule.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dlmalloc::Dlmalloc;

pub struct Allocator(Mutex<Dlmalloc>);

thread_local! {
    /// While this thread forks. Without a destructor: to enter one, memory is allocated.
    static HELD: Cell<Option<ManuallyDrop<MutexGuard<'static, Dlmalloc>>>> = const { Cell::new(None) };
}

impl Allocator {
    pub const fn new() -> Self {
        Self(Mutex::new(Dlmalloc::new()))
    }

    fn lock(&self) -> MutexGuard<'_, Dlmalloc> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Before a fork, after everything else: no other thread is in the middle of an allocation when the child begins.
pub extern "C" fn before_fork() {
    HELD.set(Some(ManuallyDrop::new(crate::ALLOCATOR.lock())));
}

/// In both, before everything else.
pub extern "C" fn after_fork() {
    drop(HELD.take().map(ManuallyDrop::into_inner));
}

// SAFETY: dlmalloc's, one call at a time.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are dlmalloc's, here and below.
        unsafe { self.lock().malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.lock().free(at, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.lock().calloc(layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.lock().realloc(at, layout.size(), layout.align(), bytes) }
    }
}
