//! A BPF array map (`BPF_F_MMAPABLE`, kernel/bpf/arraymap.c) as memory: written without a system call.

use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An array of `T`, shared with the kernel's programs.
#[derive(Debug)]
pub struct MappedArray<T> {
    base: NonNull<T>,
    entries: usize,
    values: PhantomData<T>,
}

// SAFETY: the memory belongs to no thread; writes go through `&mut self`.
unsafe impl<T: Send> Send for MappedArray<T> {}

impl<T: FromBytes + IntoBytes + Immutable + Copy> MappedArray<T> {
    /// Maps a whole array map of `entries` values.
    ///
    /// # Errors
    /// The kernel's, or that `T` is not as long as an element is in the map (a multiple of 8).
    pub fn new(map: impl AsFd, entries: usize) -> io::Result<Self> {
        if !size_of::<T>().is_multiple_of(8) || align_of::<T>() > 8 {
            return Err(io::Error::other("the element of a mapped array is a multiple of 8 bytes"));
        }
        let bytes = entries * size_of::<T>();
        // SAFETY: a new mapping at an address of the kernel's choice; the kernel refuses a length beyond the map's.
        let base =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, map, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Self { base, entries, values: PhantomData })
    }

    /// Reads one element. Programs on other cores may be writing a part of it.
    ///
    /// # Panics
    /// Where `index` is out of bounds.
    pub fn read(&self, index: usize) -> T {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        // SAFETY: inside the mapping, aligned (pages are); any bytes make a `T`, and a volatile read makes no assumption
        // about other writers.
        unsafe { self.base.as_ptr().add(index).read_volatile() }
    }

    /// Writes one element. Programs on other cores may see a part of it.
    ///
    /// # Panics
    /// Where `index` is out of bounds.
    pub fn write(&mut self, index: usize, value: &T) {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        // SAFETY: inside the mapping, aligned (pages are); other writers are the kernel's programs, and a volatile
        // write makes no assumption about what they do.
        unsafe { self.base.as_ptr().add(index).write_volatile(*value) }
    }

    /// Writes a field of one element, `offset` bytes into it. The rest may be changed by programs meanwhile, and is not
    /// touched.
    ///
    /// # Panics
    /// Where that is out of bounds, or not aligned.
    pub fn write_field<F: IntoBytes + Immutable + Copy>(&mut self, index: usize, offset: usize, field: F) {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        let is_inside = offset.checked_add(size_of::<F>()).is_some_and(|end| end <= size_of::<T>());
        assert!(is_inside && offset.is_multiple_of(align_of::<F>()), "no field at {offset}");
        // SAFETY: inside the element, which is inside the mapping, and aligned: elements are a multiple of 8 bytes. Other
        // writers are the kernel's programs, and a volatile write makes no assumption about what they do.
        unsafe { self.base.as_ptr().add(index).byte_add(offset).cast::<F>().write_volatile(field) }
    }
}

impl<T> Drop for MappedArray<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and whole; nothing points into it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.entries * size_of::<T>()) };
    }
}
