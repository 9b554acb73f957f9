//! Memory that forgets: values that are overwritten before their memory is anybody else's.
//!
//! Libraries of ciphers and of TLS leave expanded keys and decrypted messages in memory that they free:
//! [`ErasingAllocator`] is for those. Rust moves values by copying them, so that a key is in every stack frame that it
//! went through: [`wipe_stack`] is for those.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::marker::PhantomData;
use std::mem::needs_drop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::locked;

/// A value in locked memory ([`locked`]) that is overwritten with zeros when this is dropped. It stays where it is:
/// moving this moves a pointer.
pub struct Erased<T> {
    place: NonNull<T>,
    value: PhantomData<T>,
}

// SAFETY: the value is this one's alone, and its memory belongs to no thread.
unsafe impl<T: Send> Send for Erased<T> {}
// SAFETY: through `&Erased<T>` there is only `&T`.
unsafe impl<T: Sync> Sync for Erased<T> {}

impl<T> Erased<T> {
    /// Takes a value that has nothing to free.
    pub fn new(value: T) -> Self {
        const {
            assert!(!needs_drop::<T>(), "overwriting a value that owns something would leak it");
            assert!(size_of::<T>() <= locked::PLACE_BYTES && align_of::<T>() <= locked::PLACE_BYTES);
        }
        let place = locked::take().cast::<T>();
        // SAFETY: a place is ours alone, large enough and aligned.
        unsafe { place.write(value) };
        Self { place, value: PhantomData }
    }
}

impl<T> Deref for Erased<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: initialised by `new`, and only `drop` ends that.
        unsafe { self.place.as_ref() }
    }
}

impl<T> DerefMut for Erased<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { self.place.as_mut() }
    }
}

impl<T> Erased<T> {
    /// Leaves zeros where the value was.
    fn erase(&mut self) {
        let bytes = self.place.cast::<u8>();
        for at in 0..size_of::<T>() {
            // SAFETY: inside the value; volatile, so that the compiler does not take it for a dead store.
            unsafe { bytes.add(at).write_volatile(0) };
        }
        compiler_fence(Ordering::SeqCst);
    }
}

impl<T> Drop for Erased<T> {
    fn drop(&mut self) {
        self.erase();
        // SAFETY: taken by `new`, and gone with this.
        unsafe { locked::give_back(self.place.cast()) };
    }
}

/// Not the value.
impl<T> fmt::Debug for Erased<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(erased at its end)")
    }
}

/// The system's allocator, for a program through which keys of others go: what is freed is overwritten with zeros first.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErasingAllocator;

// SAFETY: the system's allocator, whose contract is the same; memory is written to only before it is given back, within
// its layout. `realloc` is the trait's own, which copies and frees, so that nothing stays where it was.
unsafe impl GlobalAlloc for ErasingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `layout.size()` bytes at `at` are the caller's until this call ends.
        unsafe {
            at.write_bytes(0, layout.size());
            compiler_fence(Ordering::SeqCst);
            // The compiler knows that nobody reads freed memory, unless it is told that somebody might.
            std::hint::black_box(at);
            System.dealloc(at, layout);
        }
    }
}

/// Bytes of stack that [`wipe_stack`] clears: more than any path of a key needs.
pub const WIPED_STACK_BYTES: usize = 32 << 10;

/// Overwrites the stack below the caller's frame: whatever the calls that it made before left there.
#[inline(never)]
pub fn wipe_stack() {
    let mut below = [0u8; WIPED_STACK_BYTES];
    // The compiler must believe that somebody reads it.
    std::hint::black_box(&mut below);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drop_does_leaves_zeros() {
        let mut erased = Erased::new([0x5au8; 64]);
        assert_eq!(*erased, [0x5a; 64]);
        erased.erase();
        assert_eq!(*erased, [0; 64]);
    }

    #[test]
    fn freed_memory_is_zero() {
        let layout = Layout::array::<u8>(64).unwrap();
        // SAFETY: allocated and freed with the same layout. What the allocator wrote into the freed memory is looked at
        // through a second allocation of the same size, which glibc serves from the same place.
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
