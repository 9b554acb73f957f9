//! Memory that processes share (memfd_create(2)): read and written by copying, because others change it meanwhile.

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

/// A whole memfd, mapped for reading and writing.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnFd,
    base: NonNull<u8>,
    bytes: usize,
    writable: bool,
    shared: PhantomData<AtomicU64>,
}

// SAFETY: the mapping belongs to no thread, and all access is by copies or atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; racing copies give unspecified bytes, never undefined behaviour of Rust's: they go through the
// kernel or through `ptr::copy` on memory that no reference covers.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory, all zeros, whose size is fixed: nobody that it is shared with can make an access fault (SIGBUS).
    ///
    /// # Errors
    /// The kernel's.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, true)
    }

    /// Memory that another process made.
    ///
    /// # Errors
    /// The kernel's, or that its size can be changed.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        Self::sealed(file, true)
    }

    /// The same, only to be read. What writes would abort the process: no method that does may be called.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_to_read(file: OwnedFd) -> io::Result<Self> {
        Self::sealed(file, false)
    }

    /// A descriptor that only reads this memory, and that nobody but its owner can turn into another.
    ///
    /// # Errors
    /// The kernel's.
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

    /// Becomes other memory of the same size, at the same address: the memory of before is not mapped here any more.
    ///
    /// # Errors
    /// The kernel's. Then some of it may be what it was.
    ///
    /// # Panics
    /// The sizes differ.
    pub fn replace(&self, by: &Self) -> io::Result<()> {
        assert!(self.bytes == by.bytes && self.writable && by.writable);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: in the place of our own mapping, which all access to goes by copies or atomics.
        unsafe { mmap(self.base.as_ptr().cast(), self.bytes, access, flags, &by.file, 0) }?;
        // SAFETY: the number of a descriptor of ours, which stays one; it is not dropped twice.
        let mut own = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(self.file.as_fd().as_raw_fd()) });
        Ok(rustix::io::dup3(&by.file, &mut own, rustix::io::DupFlags::CLOEXEC)?)
    }

    /// Becomes new memory, all zeros, without a file: where a process may open none any more. Nobody else can have it.
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// # Safety
    /// It is not dropped, and its descriptor, whose number may be another's from here on, is only asked about.
    pub unsafe fn replace_by_own(&self) -> io::Result<()> {
        assert!(self.writable);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: as above.
        unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.bytes, access, flags) }?;
        // SAFETY: the caller's promise.
        unsafe { self.file.close_for_good() };
        Ok(())
    }

    /// Bytes of it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies in.
    ///
    /// # Panics
    /// Outside the memory, as all of these do.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(self.writable);
        let to = self.at(offset, bytes.len());
        // SAFETY: `bytes.len()` bytes at `to` are mapped, and no reference of ours covers them.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies out.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) };
    }

    /// Has the kernel read a file into it (pread(2)), without another copy.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read_file(&self, offset: usize, bytes: usize, file: BorrowedFd<'_>, from: u64) -> io::Result<usize> {
        assert!(self.writable);
        let to = self.at(offset, bytes);
        let from = libc::off_t::try_from(from).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes at `to`, which are mapped.
        let got = unsafe { libc::pread(file.as_raw_fd(), to.cast(), bytes, from) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Gives a socket a copy of some of it (send(2)), as much as it takes now: how many bytes.
    ///
    /// # Errors
    /// The kernel's: `WouldBlock` where it takes nothing.
    pub fn send(&self, offset: usize, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let from = self.at(offset, bytes);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the kernel reads at most `bytes` bytes at `from`, which are mapped.
        let sent = unsafe { libc::send(socket.as_raw_fd(), from.cast(), bytes, flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// A word of it. To be loaded only, where the memory is only to be read.
    ///
    /// # Panics
    /// Outside the memory, or where `offset` is not a multiple of 4.
    #[must_use]
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: mapped for as long as `self`, aligned, and an atomic has no invalid values.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// Two words of it, as above.
    ///
    /// # Panics
    /// Outside the memory, or where `offset` is not a multiple of 8.
    #[must_use]
    #[inline]
    pub fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: as in `word`.
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
        // SAFETY: the mapping is ours and whole; all references into it are bound to `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
