//! userfaultfd(2) for missing pages of this process. Their memory is *absent*: a thread that touches it waits until
//! this process has filled it. The structs and numbers repeat include/uapi/linux/userfaultfd.h, because libc has only
//! the system call.
//!
//! A userfaultfd that is made through /dev/userfaultfd (Linux 6.1) also serves faults inside system calls, and needs no
//! privilege but access to that file. It belongs to the memory of the process that made it, so each process makes its
//! own.
//!
//! This module calls the kernel through rustix for memory and events, not through libc. The reason is that
//! crates/preload interposes libc's calls, and calls this module while it holds locks of its own.
//!
//! While memory is being unmapped or moved, the kernel fills no page (EAGAIN) until somebody has read the event about
//! the change. So a thread that fills pages also reads events: the thread that handles events may be waiting for a lock
//! that the filling thread holds.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::mm::{Advice, madvise};
use zerocopy::FromBytes;

use crate::lock::{Mutex, MutexGuard};
use crate::own::OwnFd;

/// Bytes of a page. Shunt runs only on x86_64.
pub const PAGE_BYTES: usize = 4096;

const UFFDIO: libc::c_ulong = 0xaa;
const API: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMAP: u8 = 0x14;
const EVENT_UNMAP: u8 = 0x16;

/// Encodes the number of an ioctl request: `_IOWR(UFFDIO, number, T)`.
const fn iowr<T>(number: libc::c_ulong) -> libc::c_ulong {
    3 << 30 | (size_of::<T>() as libc::c_ulong) << 16 | UFFDIO << 8 | number
}

/// Encodes the number of an ioctl request: `_IOR(UFFDIO, number, T)`.
const fn ior<T>(number: libc::c_ulong) -> libc::c_ulong {
    2 << 30 | (size_of::<T>() as libc::c_ulong) << 16 | UFFDIO << 8 | number
}

/// Argument of UFFDIO_API (`struct uffdio_api`).
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// Range of addresses, an argument of several ioctls (`struct uffdio_range`).
#[repr(C)]
#[derive(Clone, Copy)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// Argument of UFFDIO_REGISTER (`struct uffdio_register`).
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// Argument of UFFDIO_COPY (`struct uffdio_copy`).
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// Argument of UFFDIO_ZEROPAGE (`struct uffdio_zeropage`).
#[repr(C)]
struct UffdioZeropage {
    range: UffdioRange,
    mode: u64,
    zeropage: i64,
}

/// `struct uffd_msg`, which the kernel packs so that 32-bit and 64-bit programs see the same layout.
#[derive(Clone, Copy, FromBytes)]
#[repr(C)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// Event that the kernel reports about registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for the page that holds this address.
    Fault(usize),
    /// mremap(2) has moved memory.
    Remap { from: usize, to: usize, bytes: usize },
    /// The memory is no longer mapped. The thread that unmapped it continues when this event has been read.
    Unmap { start: usize, end: usize },
}

/// Opens /dev/userfaultfd: the right to make userfaultfds, which child processes inherit with the descriptor.
///
/// # Errors
/// Returns the kernel's error of open(2): the file does not exist before Linux 6.1, or this user may not read and write
/// it.
pub fn open_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")
}

/// Userfaultfd of this process, through which its missing pages are filled.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnFd,
    /// Events read by threads that fill pages, for the thread that handles events.
    taken: Mutex<VecDeque<Event>>,
    /// Eventfd that is readable while `taken` holds events.
    any_taken: OwnFd,
}

impl Userfaultfd {
    /// Makes a nonblocking userfaultfd for the calling process from the open /dev/userfaultfd.
    ///
    /// # Errors
    /// Returns the kernel's error of ioctl(2) or eventfd(2).
    ///
    /// # Safety
    /// This value discards the contents of memory ([`Self::discard`]) and fills absent pages. The caller passes only
    /// memory whose owner expects that.
    pub unsafe fn new(device: BorrowedFd<'_>) -> io::Result<Self> {
        // USERFAULTFD_IOC_NEW is _IO(UFFDIO, 0).
        // SAFETY: takes flags by value and returns a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), UFFDIO << 8, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened this descriptor for this process, and nothing else owns it.
        let fd = OwnFd::new(unsafe { OwnedFd::from_raw_fd(fd) });
        let any_taken = OwnFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let this = Self { fd, taken: Mutex::default(), any_taken };
        let mut api = UffdioApi { api: API, features: FEATURE_EVENT_REMAP | FEATURE_EVENT_UNMAP, ioctls: 0 };
        this.ioctl(iowr::<UffdioApi>(0x3f), &mut api)?;
        Ok(this)
    }

    /// Closes the descriptors in a child of fork(2). The userfaultfd belongs to the parent's memory, which the child
    /// must not change.
    ///
    /// # Safety
    /// The caller neither uses this value again in this process, nor drops it.
    pub unsafe fn close_parents(&self) {
        // SAFETY: the caller promises neither to use this value again nor to drop it.
        unsafe { (self.fd.close_for_good(), self.any_taken.close_for_good()) };
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: every caller pairs a request with the struct that it reads and writes.
        match unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes whole pages absent. Their contents are lost, and a thread that touches a page waits until it is filled.
    ///
    /// # Errors
    /// Returns an error where the memory is not private, anonymous, unlocked and mapped, or is registered with another
    /// userfaultfd. After an error, the memory may have lost its contents, but reads as ordinary memory.
    pub fn discard(&self, pages: Range<usize>) -> io::Result<()> {
        // This call is a check: the kernel refuses MADV_FREE for files and shared memory. MADV_DONTNEED alone would
        // leave their pages in the page cache, and a touch would find them again. The kernel refuses both calls for
        // locked memory.
        Self::advise(&pages, Advice::LinuxFree)?;
        // Registers first: a thread that touches a page after it was emptied must wait, not read zeros.
        self.register(pages.clone())?;
        self.empty(pages)
    }

    /// Registers private anonymous memory: from now on this process fills its missing pages.
    ///
    /// # Errors
    /// Returns the kernel's error of UFFDIO_REGISTER.
    pub fn register(&self, pages: Range<usize>) -> io::Result<()> {
        let range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        let mut register = UffdioRegister { range, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        self.ioctl(iowr::<UffdioRegister>(0x00), &mut register)
    }

    /// Drops the contents of registered pages, so that they are missing.
    ///
    /// # Errors
    /// Returns the kernel's error of madvise(2), for example for locked memory.
    pub fn empty(&self, pages: Range<usize>) -> io::Result<()> {
        Self::advise(&pages, Advice::LinuxDontNeed)
    }

    fn advise(pages: &Range<usize>, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is memory whose contents the owner has given up (see `new`).
        Ok(unsafe { madvise(pages.start as *mut std::ffi::c_void, pages.len(), advice) }?)
    }

    /// Asks the kernel whether the page at `at` is registered with this userfaultfd and absent now. The mapping there
    /// may have changed since the page was registered.
    #[must_use]
    pub fn is_absent(&self, at: usize) -> bool {
        // The kernel checks the destination page before it reads the source. Nothing is mapped at this source address,
        // so EFAULT means that the destination page is absent.
        const NOWHERE: u64 = 1 << 16;
        loop {
            let mut copy = UffdioCopy { dst: at as u64, src: NOWHERE, len: PAGE_BYTES as u64, mode: 0, copy: 0 };
            match self.ioctl(iowr::<UffdioCopy>(0x03), &mut copy).map_err(|error| error.raw_os_error()) {
                Err(Some(libc::EAGAIN)) => self.let_change(),
                outcome => return outcome == Err(Some(libc::EFAULT)),
            }
        }
    }

    /// Turns pages back into ordinary memory. Absent pages read as zeros from then on.
    ///
    /// # Errors
    /// Returns the kernel's error of UFFDIO_UNREGISTER.
    pub fn unregister(&self, pages: Range<usize>) -> io::Result<()> {
        let mut range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        self.ioctl(ior::<UffdioRange>(0x01), &mut range)
    }

    /// Fills absent pages from `at` on with `bytes`, whose length is a multiple of [`PAGE_BYTES`], and wakes the
    /// threads that wait for them. A page that is present keeps its contents.
    ///
    /// # Errors
    /// Returns the kernel's error of UFFDIO_COPY, for example where the memory is not registered any more.
    pub fn fill(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        // Length of the next copy. For a range of more than one mapping, the kernel returns ENOENT, even if all of the
        // range is registered. Then copies are one page long.
        let mut at_once = bytes.len();
        while done < bytes.len() {
            let left = &bytes[done..(done + at_once).min(bytes.len())];
            let mut copy = UffdioCopy {
                dst: (at + done) as u64,
                src: left.as_ptr() as u64,
                len: left.len() as u64,
                mode: 0,
                copy: 0,
            };
            match self.ioctl(iowr::<UffdioCopy>(0x03), &mut copy) {
                Ok(()) => done += left.len(),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && left.len() > PAGE_BYTES => {
                    at_once = PAGE_BYTES;
                }
                Err(error) => {
                    done += self.progress(&error, copy.copy, at + done)?;
                }
            }
        }
        Ok(())
    }

    /// Fills absent pages with zeros, as [`Self::fill`] does with bytes.
    ///
    /// # Errors
    /// Returns the kernel's error of UFFDIO_ZEROPAGE.
    pub fn fill_zeros(&self, pages: Range<usize>) -> io::Result<()> {
        let mut at = pages.start;
        while at < pages.end {
            let range = UffdioRange { start: at as u64, len: (pages.end - at) as u64 };
            let mut zeropage = UffdioZeropage { range, mode: 0, zeropage: 0 };
            match self.ioctl(iowr::<UffdioZeropage>(0x04), &mut zeropage) {
                Ok(()) => return Ok(()),
                Err(error) => at += self.progress(&error, zeropage.zeropage, at)?,
            }
        }
        Ok(())
    }

    /// Returns how many bytes to advance after a copy to `at` has failed. At a present page (EEXIST), this is one page,
    /// and the threads that wait for the page are woken. While the address space is changing (EAGAIN), this is the
    /// number of bytes that the kernel has copied (`did`).
    ///
    /// # Errors
    /// Returns any other error.
    fn progress(&self, error: &io::Error, did: i64, at: usize) -> io::Result<usize> {
        match error.raw_os_error() {
            Some(libc::EEXIST) => self.wake(at..at + PAGE_BYTES).map(|()| PAGE_BYTES),
            Some(libc::EAGAIN) => {
                let did = usize::try_from(did).unwrap_or(0);
                if did == 0 {
                    self.let_change();
                }
                Ok(did)
            }
            _ => Err(io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }

    /// Reads events, so that threads that unmap or move memory can continue: each waits until its event has been read.
    fn let_change(&self) {
        let mut taken = self.taken();
        let before = taken.len();
        while let Ok(Some(event)) = self.read_event() {
            taken.push_back(event);
        }
        if taken.len() > before {
            let _ = rustix::io::write(&self.any_taken, &1u64.to_ne_bytes());
        } else {
            // The threads that change memory have not sent their events yet, or have not run since their events were
            // read.
            rustix::thread::sched_yield();
        }
    }

    fn taken(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.taken.lock()
    }

    /// Wakes threads that wait for these pages. A thread whose page is still absent faults again.
    ///
    /// # Errors
    /// Returns the kernel's error of UFFDIO_WAKE.
    pub fn wake(&self, pages: Range<usize>) -> io::Result<()> {
        let mut range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        self.ioctl(ior::<UffdioRange>(0x02), &mut range)
    }

    /// Waits for an event, at most for `patience`. Returns false where none came.
    #[must_use]
    pub fn wait(&self, patience: Timespec) -> bool {
        let mut wanted = [PollFd::new(&self.fd, PollFlags::IN), PollFd::new(&self.any_taken, PollFlags::IN)];
        poll(&mut wanted, Some(&patience)) != Ok(0)
    }

    /// Returns the next event; `None` when there is none.
    ///
    /// # Errors
    /// Returns the kernel's error of read(2).
    pub fn next_event(&self) -> io::Result<Option<Event>> {
        let mut taken = self.taken();
        if let Some(event) = taken.pop_front() {
            if taken.is_empty() {
                let _ = rustix::io::read(&self.any_taken, &mut [0; 8]);
            }
            return Ok(Some(event));
        }
        self.read_event()
    }

    fn read_event(&self) -> io::Result<Option<Event>> {
        let mut bytes = [0; size_of::<UffdMsg>()];
        match rustix::io::read(&self.fd, &mut bytes) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let message: UffdMsg = zerocopy::transmute!(bytes);
        let [first, second, third] = message.arguments.map(|argument| argument as usize);
        match message.event {
            // Arguments: flags, address, thread id.
            EVENT_PAGEFAULT => Ok(Some(Event::Fault(second))),
            EVENT_REMAP => Ok(Some(Event::Remap { from: first, to: second, bytes: third })),
            EVENT_UNMAP => Ok(Some(Event::Unmap { start: first, end: second })),
            other => Err(io::Error::other(format!("userfaultfd says {other:#x}, which was not asked for"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    const SECOND: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

    /// Makes a new mapping whose pages are absent.
    fn absent(faults: &Userfaultfd, pages: usize) -> Range<usize> {
        let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, pages * PAGE_BYTES);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }.unwrap() as usize;
        faults.discard(at..at + bytes).unwrap();
        at..at + bytes
    }

    /// A thread can fill pages while others unmap memory and nobody handles the events about it. (The thread that
    /// handles events may be waiting for a lock that the filling thread holds.)
    #[test]
    fn pages_are_filled_while_others_are_unmapped_that_nobody_handles() {
        let device = open_device().expect("/dev/userfaultfd takes root: run `make test`, which asks sudo for it");
        // SAFETY: this test passes only memory that it has mapped for this purpose.
        let faults = Arc::new(unsafe { Userfaultfd::new(device.as_fd()) }.unwrap());
        let (stays, leaves) = (absent(&faults, 4), [absent(&faults, 2), absent(&faults, 2)]);
        let unmapping = leaves.clone().map(|pages| {
            // SAFETY: the pages are not touched any more.
            std::thread::spawn(move || unsafe { munmap(pages.start as *mut _, pages.len()) }.unwrap())
        });
        assert!(faults.wait(SECOND), "the kernel tells of what is unmapped");
        let (done, is_done) = channel();
        let (filled, pages) = (Arc::clone(&faults), stays.clone());
        std::thread::spawn(move || {
            let was_absent = filled.is_absent(pages.start);
            filled.fill(pages.start, &[7; 2 * PAGE_BYTES]).unwrap();
            filled.fill_zeros(pages.start + 2 * PAGE_BYTES..pages.end).unwrap();
            done.send(was_absent).unwrap();
        });
        let was_absent = is_done.recv_timeout(Duration::from_secs(20));
        assert_eq!(was_absent, Ok(true), "they are absent, and then filled");
        // SAFETY: mapped, and filled.
        let got = unsafe { std::slice::from_raw_parts(stays.start as *const u8, stays.len()) };
        assert!(
            got[..2 * PAGE_BYTES].iter().all(|byte| *byte == 7) && got[2 * PAGE_BYTES..].iter().all(|byte| *byte == 0)
        );

        let mut told = Vec::new();
        while told.len() < leaves.len() && faults.wait(SECOND) {
            while let Some(event) = faults.next_event().unwrap() {
                let Event::Unmap { start, end } = event else { panic!("{event:?}") };
                told.push(start..end);
            }
        }
        unmapping.into_iter().for_each(|thread| thread.join().unwrap());
        told.sort_by_key(|pages| pages.start);
        let mut left = leaves.to_vec();
        left.sort_by_key(|pages| pages.start);
        assert_eq!(told, left, "whoever handles events gets each");
        assert_eq!(faults.next_event().unwrap(), None);
    }
}
