//! A BPF array map (`BPF_F_MMAPABLE`, kernel/bpf/arraymap.c), mapped as memory, so that reads and writes need no system
//! call.

use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Array of `T` that BPF programs and this process share.
#[derive(Debug)]
pub struct MappedArray<T> {
    base: NonNull<T>,
    entries: usize,
    values: PhantomData<T>,
}

// SAFETY: the memory is not tied to a thread, and writes go through `&mut self`.
unsafe impl<T: Send> Send for MappedArray<T> {}

impl<T: FromBytes + IntoBytes + Immutable + Copy> MappedArray<T> {
    /// Maps a whole array map of `entries` values.
    ///
    /// # Errors
    /// Returns the kernel's error of mmap(2), or an error where `T` cannot be an element of such a map: its size must
    /// be a multiple of 8 bytes, and its alignment at most 8.
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

    /// Reads one element. BPF programs on other cores may write it meanwhile, so the value may be a mixture of old and
    /// new bytes.
    ///
    /// # Panics
    /// Panics where `index` is out of bounds.
    pub fn read(&self, index: usize) -> T {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        // SAFETY: inside the mapping, and aligned, because pages are. Any bytes make a `T`, and a volatile read assumes
        // nothing about other writers.
        unsafe { self.base.as_ptr().add(index).read_volatile() }
    }

    /// Writes one element. BPF programs on other cores may see it half written.
    ///
    /// # Panics
    /// Panics where `index` is out of bounds.
    pub fn write(&mut self, index: usize, value: &T) {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        // SAFETY: inside the mapping, and aligned, because pages are. Other writers are BPF programs, and a volatile
        // write assumes nothing about what they do.
        unsafe { self.base.as_ptr().add(index).write_volatile(*value) }
    }

    /// Writes one field of an element, at `offset` in bytes. Does not write the other fields, because BPF programs may
    /// change them meanwhile.
    ///
    /// # Panics
    /// Panics where `index` or the field is out of bounds, or `offset` is not aligned.
    pub fn write_field<F: IntoBytes + Immutable + Copy>(&mut self, index: usize, offset: usize, field: F) {
        assert!(index < self.entries, "index {index} of {}", self.entries);
        let is_inside = offset.checked_add(size_of::<F>()).is_some_and(|end| end <= size_of::<T>());
        assert!(is_inside && offset.is_multiple_of(align_of::<F>()), "no field at {offset}");
        // SAFETY: inside the element, which is inside the mapping, and aligned, because elements are a multiple of 8
        // bytes. Other writers are BPF programs, and a volatile write assumes nothing about what they do.
        unsafe { self.base.as_ptr().add(index).byte_add(offset).cast::<F>().write_volatile(field) }
    }
}

impl<T> Drop for MappedArray<T> {
    fn drop(&mut self) {
        // SAFETY: the whole mapping belongs to this value, and no pointer into it is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.entries * size_of::<T>()) };
    }
}
