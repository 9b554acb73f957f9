//! Allocator of this library, which `shunt run` preloads. It does not use glibc's heap: a thread that touches absent
//! memory, and waits for the library to fill it, may hold a lock of that heap. The lock of this allocator costs little,
//! because other threads rarely hold it.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use dlmalloc::Dlmalloc;
use libc::c_long;
use shunt_process::system::kernel;
use shunt_process::system::scarce;
use shunt_sys::lock::{Mutex, MutexGuard};
use shunt_sys::userfaultfd::PAGE_BYTES;

/// Source of memory for the allocator: mmap(2) and similar calls, made without libc. libc's functions are interposed,
/// and would take locks of the library. But a thread may hold one of these locks already while it allocates memory.
struct Kernel;

impl Kernel {
    fn mapped(number: c_long, arguments: [usize; 6]) -> *mut u8 {
        // SAFETY: a new mapping, or one that the allocator alone uses.
        unsafe { kernel::call(number, arguments) }.map_or(std::ptr::null_mut(), |at| at as *mut u8)
    }

    fn is_unmapped(at: *mut u8, bytes: usize) -> bool {
        // SAFETY: memory of the allocator that it does not use any more.
        unsafe { kernel::call(libc::SYS_munmap, [at as usize, bytes, 0, 0, 0, 0]) }.is_ok()
    }
}

// SAFETY: mmap(2), mremap(2) and munmap(2) do what the trait's methods promise.
unsafe impl dlmalloc::Allocator for Kernel {
    fn alloc(&self, bytes: usize) -> (*mut u8, usize, u32) {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = Self::mapped(libc::SYS_mmap, [0, bytes, access as usize, kind as usize, usize::MAX, 0]);
        if at.is_null() { (at, 0, 0) } else { (at, bytes, 0) }
    }

    fn remap(&self, at: *mut u8, before: usize, bytes: usize, may_move: bool) -> *mut u8 {
        let flags = if may_move { libc::MREMAP_MAYMOVE } else { 0 };
        Self::mapped(libc::SYS_mremap, [at as usize, before, bytes, flags as usize, 0, 0])
    }

    fn free_part(&self, at: *mut u8, before: usize, bytes: usize) -> bool {
        Self::is_unmapped(at.wrapping_add(bytes), before - bytes)
    }

    fn free(&self, at: *mut u8, bytes: usize) -> bool {
        Self::is_unmapped(at, bytes)
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

type Heap = Dlmalloc<Kernel>;

pub struct Allocator(Mutex<Heap>);

thread_local! {
    /// Held lock of the heap while this thread forks. It has no destructor, because registering one allocates memory.
    static HELD: Cell<Option<ManuallyDrop<MutexGuard<'static, Heap>>>> = const { Cell::new(None) };
}

impl Allocator {
    pub const fn new() -> Self {
        Self(Mutex::new(Dlmalloc::new_with_allocator(Kernel)))
    }

    fn lock(&self) -> MutexGuard<'_, Heap> {
        self.0.lock()
    }
}

/// Takes the allocator's lock before a fork, after all other locks: no other thread is in the middle of an allocation
/// when the child begins.
pub fn before_fork() {
    HELD.set(Some(ManuallyDrop::new(crate::ALLOCATOR.lock())));
}

/// Releases the lock in the parent and in the child, before all other locks.
pub fn after_fork() {
    drop(HELD.take().map(ManuallyDrop::into_inner));
}

/// Asks for memory until there is some; ends the process if there is none for too long. Rust would abort the process
/// with a message that itself takes memory.
fn patiently(ask: impl Fn() -> *mut u8) -> *mut u8 {
    scarce::patiently(|| NonNull::new(ask())).map_or_else(|| scarce::end(), NonNull::as_ptr)
}

// SAFETY: the memory is dlmalloc's, which is called under a lock.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: dlmalloc needs what GlobalAlloc's caller promises: a valid layout.
        patiently(|| unsafe { self.lock().malloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: dlmalloc needs what GlobalAlloc's caller promises: a valid layout, and for `at` a block of this heap.
        unsafe { self.lock().free(at, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: dlmalloc needs what GlobalAlloc's caller promises: a valid layout.
        patiently(|| unsafe { self.lock().calloc(layout.size(), layout.align()) })
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: dlmalloc needs what GlobalAlloc's caller promises: a valid layout, and for `at` a block of this heap.
        patiently(|| unsafe { self.lock().realloc(at, layout.size(), layout.align(), bytes) })
    }
}
