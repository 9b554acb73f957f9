//! Memory shared between processes (memfd_create(2)). It is read and written only by copying or by atomics, because
//! other processes change it meanwhile.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::own::OwnFd;

/// A memfd, all of which is mapped into this process.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnFd,
    base: NonNull<u8>,
    bytes: usize,
    writable: bool,
    shared: PhantomData<AtomicU64>,
}

// SAFETY: the mapping is not tied to a thread, and all access is by copies or atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: all access is by copies or atomics. Racing copies yield unspecified bytes, but no undefined behaviour in
// Rust: they are made by the kernel, or by `ptr::copy` on memory that no reference covers.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of zeros. Its size is sealed, so that no process that shares the memory can shrink it, which
    /// would make accesses of others fail (SIGBUS).
    ///
    /// # Errors
    /// Returns the kernel's error of memfd_create(2), ftruncate(2), fcntl(2) or mmap(2).
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, true)
    }

    /// Maps memory that another process created.
    ///
    /// # Errors
    /// Returns the kernel's error of fcntl(2) or mmap(2), or an error where the memory can still shrink.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        Self::sealed(file, true)
    }

    /// Maps memory that another process created, for reading only. Methods that write must not be called: they panic,
    /// or the write is a fault (SIGSEGV).
    ///
    /// # Errors
    /// The same as those of [`Self::open`].
    pub fn open_to_read(file: OwnedFd) -> io::Result<Self> {
        Self::sealed(file, false)
    }

    /// Opens a second, read-only descriptor of this memory. Also removes the file's write permission, so that a process
    /// that gets this descriptor cannot open the memory for writing. Only the file's owner can permit that again.
    ///
    /// # Errors
    /// Returns the kernel's error of fchmod(2) or open(2).
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        fchmod(&self.file, Mode::RUSR)?;
        Ok(File::open(format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd()))?.into())
    }

    fn sealed(file: OwnedFd, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("shared memory whose size is not sealed"));
        }
        Self::map(file, writable)
    }

    fn map(file: OwnedFd, writable: bool) -> io::Result<Self> {
        let bytes = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Self { file: OwnFd::new(file), base, bytes, writable, shared: PhantomData })
    }

    /// Maps the memory of `by` in place of this memory, at the same address, and makes this value's descriptor one of
    /// the memory of `by`. This value then no longer has its old memory.
    ///
    /// # Errors
    /// Returns the kernel's error of mmap(2) or dup3(2). Then parts of the mapping may be unchanged.
    ///
    /// # Panics
    /// Panics where the sizes differ, or one of the two is mapped only for reading.
    pub fn replace(&self, by: &Self) -> io::Result<()> {
        assert!(self.bytes == by.bytes && self.writable && by.writable);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: replaces this value's own mapping, which is accessed only by copies and atomics.
        unsafe { mmap(self.base.as_ptr().cast(), self.bytes, access, flags, &by.file, 0) }?;
        // SAFETY: this value owns the descriptor and keeps it. `ManuallyDrop` prevents a second close.
        let mut own = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(self.file.as_fd().as_raw_fd()) });
        Ok(rustix::io::dup3(&by.file, &mut own, rustix::io::DupFlags::CLOEXEC)?)
    }

    /// Maps new private memory of zeros in place of this memory, for a process that may be unable to open another file.
    /// No other process can get the new memory.
    ///
    /// # Errors
    /// Returns the kernel's error of mmap(2).
    ///
    /// # Safety
    /// The caller does not drop this value. This value's descriptor is closed, and its number may belong to another
    /// descriptor from now on. So the caller does not use the descriptor.
    pub unsafe fn replace_by_own(&self) -> io::Result<()> {
        assert!(self.writable);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: replaces this value's own mapping, which is accessed only by copies and atomics.
        unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.bytes, access, flags) }?;
        // SAFETY: the caller promises not to drop this value.
        unsafe { self.file.close_for_good() };
        Ok(())
    }

    /// Size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the size is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: the offset is inside the mapping, as asserted above.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies `bytes` into the memory at `offset`.
    ///
    /// # Panics
    /// Panics where the range is outside the memory, as all methods with an offset do, or where the memory is mapped
    /// only for reading.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(self.writable);
        let to = self.at(offset, bytes.len());
        // SAFETY: `bytes.len()` bytes at `to` are mapped, and no reference of this process covers them.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Fills `into` with the bytes of the memory from `offset` on.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `into.len()` bytes at `from` are mapped, and no reference of this process covers them.
        unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) };
    }

    /// Reads at most `bytes` bytes of a file, from the file's offset `from` on, into the memory at `offset` (pread(2)).
    /// Returns the number of bytes read.
    ///
    /// # Errors
    /// Returns the kernel's error of pread(2).
    pub fn read_file(&self, offset: usize, bytes: usize, file: BorrowedFd<'_>, from: u64) -> io::Result<usize> {
        assert!(self.writable);
        let to = self.at(offset, bytes);
        let from = libc::off_t::try_from(from).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes at `to`, which are mapped.
        let got = unsafe { libc::pread(file.as_raw_fd(), to.cast(), bytes, from) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Sends a range of the memory on a socket (send(2)), as much of it as the socket takes without waiting. Returns
    /// the number of bytes sent.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2): `WouldBlock` where the socket takes nothing.
    pub fn send(&self, offset: usize, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let from = self.at(offset, bytes);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the kernel reads at most `bytes` bytes at `from`, which are mapped.
        let sent = unsafe { libc::send(socket.as_raw_fd(), from.cast(), bytes, flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Returns the 4 bytes at `offset` as an atomic. Where the memory is mapped only for reading, the caller may only
    /// load the atomic.
    ///
    /// # Panics
    /// Panics where the range is outside the memory, or `offset` is not a multiple of 4.
    #[must_use]
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: mapped for as long as `self` lives, and aligned; an atomic has no invalid values.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// Returns the 8 bytes at `offset` as an atomic. Where the memory is mapped only for reading, the caller may only
    /// load the atomic.
    ///
    /// # Panics
    /// Panics where the range is outside the memory, or `offset` is not a multiple of 8.
    #[must_use]
    #[inline]
    pub fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: mapped for as long as `self` lives, and aligned; an atomic has no invalid values.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping belongs to this value, and all references into it borrow `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
