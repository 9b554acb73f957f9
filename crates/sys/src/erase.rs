//! Secrets that are overwritten before their memory is used for anything else.
//!
//! Libraries for ciphers and TLS leave expanded keys and decrypted messages in memory that they free;
//! [`ErasingAllocator`] overwrites that memory. Rust moves values by copying them, so a copy of a key remains in every
//! stack frame that the key passed through; [`wipe_stack`] overwrites these copies.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::marker::PhantomData;
use std::mem::needs_drop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::locked;

/// Owner of a value in locked memory ([`locked`]). Dropping it overwrites the value with zeros. Moving it moves only a
/// pointer, so the value keeps its address.
pub struct Erased<T> {
    place: NonNull<T>,
    value: PhantomData<T>,
}

// SAFETY: the value has one owner, and its memory is not tied to a thread.
unsafe impl<T: Send> Send for Erased<T> {}
// SAFETY: `&Erased<T>` gives only `&T`.
unsafe impl<T: Sync> Sync for Erased<T> {}

impl<T> Erased<T> {
    /// Stores a value in locked memory. The value's type must not need a drop, because the value is never dropped.
    pub fn new(value: T) -> Self {
        const {
            assert!(!needs_drop::<T>(), "overwriting a value that owns something would leak it");
            assert!(size_of::<T>() <= locked::PLACE_BYTES && align_of::<T>() <= locked::PLACE_BYTES);
        }
        let place = locked::take().cast::<T>();
        // SAFETY: `take` gave the place to this call alone. It is large enough and aligned, as asserted above.
        unsafe { place.write(value) };
        Self { place, value: PhantomData }
    }
}

impl<T> Deref for Erased<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` has initialised the value, and only `drop` ends that.
        unsafe { self.place.as_ref() }
    }
}

impl<T> DerefMut for Erased<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: `new` has initialised the value, and only `drop` ends that.
        unsafe { self.place.as_mut() }
    }
}

impl<T> Erased<T> {
    /// Overwrites the value with zeros.
    fn erase(&mut self) {
        let bytes = self.place.cast::<u8>();
        for at in 0..size_of::<T>() {
            // SAFETY: inside the value. Volatile, because the compiler would remove the write as a dead store.
            unsafe { bytes.add(at).write_volatile(0) };
        }
        compiler_fence(Ordering::SeqCst);
    }
}

impl<T> Drop for Erased<T> {
    fn drop(&mut self) {
        self.erase();
        // SAFETY: `new` got the place from `locked::take`, and nothing uses it after this.
        unsafe { locked::give_back(self.place.cast()) };
    }
}

/// Hides the value.
impl<T> fmt::Debug for Erased<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(erased at its end)")
    }
}

/// Allocator that overwrites memory with zeros before it gives the memory back to the system's allocator. For programs
/// that handle keys of other programs.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErasingAllocator;

// SAFETY: every call goes to the system's allocator, which has the same contract. Memory is written to only before it
// is given back, and within its layout. `realloc` is the trait's default, which copies and frees, so that nothing stays
// in the old memory.
unsafe impl GlobalAlloc for ErasingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the one that this call needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the one that this call needs.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `layout.size()` bytes at `at` belong to the caller until this call ends.
        unsafe {
            at.write_bytes(0, layout.size());
            compiler_fence(Ordering::SeqCst);
            // Without this the compiler may remove the writes, because nothing reads freed memory.
            std::hint::black_box(at);
            System.dealloc(at, layout);
        }
    }
}

/// Number of bytes of stack that [`wipe_stack`] overwrites: more than any chain of calls with a key uses.
pub const WIPED_STACK_BYTES: usize = 32 << 10;

/// Overwrites the first [`WIPED_STACK_BYTES`] of stack below the caller's frame, where the caller's earlier calls may
/// have left copies of keys.
#[inline(never)]
pub fn wipe_stack() {
    let mut below = [0u8; WIPED_STACK_BYTES];
    // Makes the compiler assume that the array is read, so that it does not remove the array.
    std::hint::black_box(&mut below);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_value_leaves_zeros() {
        let mut erased = Erased::new([0x5au8; 64]);
        assert_eq!(*erased, [0x5a; 64]);
        erased.erase();
        assert_eq!(*erased, [0; 64]);
    }

    #[test]
    fn freed_memory_is_zero() {
        let layout = Layout::array::<u8>(64).unwrap();
        // SAFETY: allocated and freed with the same layout. The test reads what is left in the memory through a second
        // allocation of the same size, which glibc serves from the same memory.
        unsafe {
            let at = ErasingAllocator.alloc(layout);
            at.write_bytes(0x5a, 64);
            ErasingAllocator.dealloc(at, layout);
            let again = System.alloc(layout);
            let left = std::slice::from_raw_parts(again, 64).iter().filter(|byte| **byte == 0x5a).count();
            assert_eq!(left, 0);
            System.dealloc(again, layout);
        }
    }

    #[test]
    fn debug_output_does_not_show_the_value() {
        assert!(!format!("{:?}", Erased::new(*b"secret")).contains("115"));
    }
}
