//! userfaultfd(2) for missing pages of this process: absent memory. include/uapi/linux/userfaultfd.h; libc has the
//! system call only.
//!
//! A descriptor made through /dev/userfaultfd (Linux 6.1) serves faults of system calls, too, and needs no privilege but
//! that file; it belongs to the memory of the process that asked for it, so that each process makes its own.
//!
//! Memory and events are handled by system calls of our own (rustix), not libc's: crates/preload interposes those, and
//! calls this with its locks held.
//!
//! While memory is being unmapped or moved the kernel fills no page (EAGAIN), until somebody has read the event about it. So
//! whoever fills pages takes events in, too: the thread that handles them may wait for a lock that the other has.

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

/// Bytes of a page. Shunt runs on x86_64 only.
pub const PAGE_BYTES: usize = 4096;

const UFFDIO: libc::c_ulong = 0xaa;
const API: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMAP: u8 = 0x14;
const EVENT_UNMAP: u8 = 0x16;

/// `_IOWR(UFFDIO, number, T)`.
const fn iowr<T>(number: libc::c_ulong) -> libc::c_ulong {
    3 << 30 | (size_of::<T>() as libc::c_ulong) << 16 | UFFDIO << 8 | number
}

/// `_IOR(UFFDIO, number, T)`.
const fn ior<T>(number: libc::c_ulong) -> libc::c_ulong {
    2 << 30 | (size_of::<T>() as libc::c_ulong) << 16 | UFFDIO << 8 | number
}

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct UffdioZeropage {
    range: UffdioRange,
    mode: u64,
    zeropage: i64,
}

/// `struct uffd_msg`, which is packed in the kernel to be the same for 32 bits.
#[derive(Clone, Copy, FromBytes)]
#[repr(C)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// What the kernel says of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody waits for the page with this address.
    Fault(usize),
    /// mremap(2) has moved memory.
    Remap { from: usize, to: usize, bytes: usize },
    /// It is not mapped any more. Whoever unmapped it goes on when this has been read.
    Unmap { start: usize, end: usize },
}

/// The right to have userfaultfds, for a process and whoever inherits it.
///
/// # Errors
/// The kernel's: no such file before Linux 6.1, or not readable and writable for this user.
pub fn open_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")
}

/// The missing pages of this process.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnFd,
    /// Events that were read by who filled pages.
    taken: Mutex<VecDeque<Event>>,
    /// Readable when there are such.
    any_taken: OwnFd,
}

impl Userfaultfd {
    /// One for the calling process, nonblocking, from the open /dev/userfaultfd.
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// # Safety
    /// Through this value memory of the process loses its contents ([`Self::discard`]) and pages that are absent are
    /// filled. The caller gives it only memory whose owner expects just that.
    pub unsafe fn new(device: BorrowedFd<'_>) -> io::Result<Self> {
        // USERFAULTFD_IOC_NEW is _IO(UFFDIO, 0).
        // SAFETY: takes flags by value and returns a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), UFFDIO << 8, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it for us.
        let fd = OwnFd::new(unsafe { OwnedFd::from_raw_fd(fd) });
        let any_taken = OwnFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let this = Self { fd, taken: Mutex::default(), any_taken };
        let mut api = UffdioApi { api: API, features: FEATURE_EVENT_REMAP | FEATURE_EVENT_UNMAP, ioctls: 0 };
        this.ioctl(iowr::<UffdioApi>(0x3f), &mut api)?;
        Ok(this)
    }

    /// In a child of fork(2): it is of the parent's memory, which the child shall not change.
    ///
    /// # Safety
    /// In this process it is not used again, nor dropped.
    pub unsafe fn close_parents(&self) {
        // SAFETY: the caller's promise.
        unsafe { (self.fd.close_for_good(), self.any_taken.close_for_good()) };
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: every caller pairs a request with the struct that it reads and writes.
        match unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes whole pages absent: whoever touches them waits until they are filled. What they held is lost.
    ///
    /// # Errors
    /// Where the memory is anything but private, anonymous, unlocked and mapped, or registered elsewhere. Then it may
    /// have lost its contents, but reads as ordinary memory.
    pub fn discard(&self, pages: Range<usize>) -> io::Result<()> {
        // MADV_FREE is refused for files and shared memory, whose pages MADV_DONTNEED would leave in the cache: they
        // would be back, not missing. Locked memory is refused by both.
        Self::advise(&pages, Advice::LinuxFree)?;
        // Registered first, so that nobody who touches a page from here on finds zeros in it.
        self.register(pages.clone())?;
        self.empty(pages)
    }

    /// Registers private anonymous memory: from here on pages that are missing are ours to fill.
    ///
    /// # Errors
    /// The kernel's.
    pub fn register(&self, pages: Range<usize>) -> io::Result<()> {
        let range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        let mut register = UffdioRegister { range, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        self.ioctl(iowr::<UffdioRegister>(0x00), &mut register)
    }

    /// Takes their contents from pages that are registered: they are missing.
    ///
    /// # Errors
    /// The kernel's, of locked memory.
    pub fn empty(&self, pages: Range<usize>) -> io::Result<()> {
        Self::advise(&pages, Advice::LinuxDontNeed)
    }

    fn advise(pages: &Range<usize>, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is memory whose contents the owner has given up (see `new`).
        Ok(unsafe { madvise(pages.start as *mut std::ffi::c_void, pages.len(), advice) }?)
    }

    /// Whether the page at `at` is registered here and absent now, whatever has happened to the address space since.
    #[must_use]
    pub fn is_absent(&self, at: usize) -> bool {
        // The kernel looks at the page before it reads the source, and nothing is mapped at the source.
        const NOWHERE: u64 = 1 << 16;
        loop {
            let mut copy = UffdioCopy { dst: at as u64, src: NOWHERE, len: PAGE_BYTES as u64, mode: 0, copy: 0 };
            match self.ioctl(iowr::<UffdioCopy>(0x03), &mut copy).map_err(|error| error.raw_os_error()) {
                Err(Some(libc::EAGAIN)) => self.let_change(),
                outcome => return outcome == Err(Some(libc::EFAULT)),
            }
        }
    }

    /// Ordinary memory again: pages that are absent read as zeros.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unregister(&self, pages: Range<usize>) -> io::Result<()> {
        let mut range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        self.ioctl(ior::<UffdioRange>(0x01), &mut range)
    }

    /// Fills absent pages from `at` on with `bytes`, a multiple of [`PAGE_BYTES`], and lets those go on that wait for them.
    /// A page that is there already stays as it is.
    ///
    /// # Errors
    /// The kernel's: the memory is not registered any more.
    pub fn fill(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        // As much at a time as lies in one mapping: the kernel says ENOENT for more, also where all of it is registered.
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

    /// Fills absent pages with zeros, as [`Self::fill`] does.
    ///
    /// # Errors
    /// The kernel's.
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

    /// How far a copy to `at` got that failed: the kernel stops at a page that is there (EEXIST) and where the address space
    /// changes under it (EAGAIN), and says how many bytes it did.
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

    /// Has those go on that unmap or move memory: they wait until the event about it has been read.
    fn let_change(&self) {
        let mut taken = self.taken();
        let before = taken.len();
        while let Ok(Some(event)) = self.read_event() {
            taken.push_back(event);
        }
        if taken.len() > before {
            let _ = rustix::io::write(&self.any_taken, &1u64.to_ne_bytes());
        } else {
            // They are not so far that there is an event, or were told and have not run yet.
            rustix::thread::sched_yield();
        }
    }

    fn taken(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.taken.lock()
    }

    /// Lets those go on that wait for pages; a page that is still absent faults again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wake(&self, pages: Range<usize>) -> io::Result<()> {
        let mut range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        self.ioctl(ior::<UffdioRange>(0x02), &mut range)
    }

    /// Waits for an event. False: none came in time.
    #[must_use]
    pub fn wait(&self, patience: Timespec) -> bool {
        let mut wanted = [PollFd::new(&self.fd, PollFlags::IN), PollFd::new(&self.any_taken, PollFlags::IN)];
        poll(&mut wanted, Some(&patience)) != Ok(0)
    }

    /// The next event; `None` when there is none.
    ///
    /// # Errors
    /// The kernel's.
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
            // flags, address, thread
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

    /// Pages of a mapping of their own, absent.
    fn absent(faults: &Userfaultfd, pages: usize) -> Range<usize> {
        let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, pages * PAGE_BYTES);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }.unwrap() as usize;
        faults.discard(at..at + bytes).unwrap();
        at..at + bytes
    }

    /// Whoever handles events may wait for a lock that a thread holds while it fills pages.
    #[test]
    fn pages_are_filled_while_others_are_unmapped_that_nobody_handles() {
        let Ok(device) = open_device() else {
            let reason = "it takes /dev/userfaultfd, readable and writable";
            let _ = io::Write::write_fmt(
                &mut io::stderr(),
                format_args!("SKIPPED pages_are_filled_while_others_are_unmapped: {reason}\n"),
            );
            return;
        };
        // SAFETY: only memory that this test has mapped for it.
        let faults = Arc::new(unsafe { Userfaultfd::new(device.as_fd()) }.unwrap());
        let (stays, leaves) = (absent(&faults, 4), [absent(&faults, 2), absent(&faults, 2)]);
        let unmapping = leaves.clone().map(|pages| {
            // SAFETY: memory that nobody touches any more.
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
