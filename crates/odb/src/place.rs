//! Where the bytes of a reference are: a range of a segment, or of a file that a program has sent (sendfile(2)).
//!
//! A file is not copied. So before anybody goes by bytes that were read from it, it is compared with what it was when the
//! reference was made ([`Version`]): a body is whole, or visibly not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, OFlags, fcntl_get_seals, fcntl_getfl, fstat, sendfile};
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2};
use rustix::time::{ClockId, clock_gettime};
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a file was, as far as fstat(2) tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Version {
    device: U64,
    inode: U64,
    size: U64,
    modified_ns: U64,
    changed_ns: U64,
    links: U64,
    mode: U32,
    user: U32,
    group: U32,
    zero: U32,
}

/// Time stamps are as coarse as two seconds (vfat). A file that was changed within one of them may change once more and
/// look the same.
const SETTLED_AFTER: Duration = Duration::from_secs(3);

impl Version {
    /// Of an open file. `None`: its bytes are not a file's, or may be made up when they are read (proc(5) has files
    /// without a block): nobody could tell whether they are still the same.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(file: impl AsFd) -> io::Result<Option<Self>> {
        let now = fstat(file)?;
        if FileType::from_raw_mode(now.st_mode) != FileType::RegularFile || now.st_blocks == 0 {
            return Ok(None);
        }
        let nanoseconds =
            |seconds: i64, rest: u64| seconds.wrapping_mul(1_000_000_000).wrapping_add(rest as i64) as u64;
        Ok(Some(Self {
            device: now.st_dev.into(),
            inode: now.st_ino.into(),
            size: u64::try_from(now.st_size).unwrap_or(0).into(),
            modified_ns: nanoseconds(now.st_mtime, now.st_mtime_nsec).into(),
            changed_ns: nanoseconds(now.st_ctime, now.st_ctime_nsec).into(),
            links: now.st_nlink.into(),
            mode: now.st_mode.into(),
            user: now.st_uid.into(),
            group: now.st_gid.into(),
            zero: 0.into(),
        }))
    }

    /// Bytes of the file.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.get()
    }

    /// Whether every change from now on will be seen.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let now_ns = now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec) as u64;
        now_ns.checked_sub(self.changed_ns.get()).is_some_and(|ago| u128::from(ago) > SETTLED_AFTER.as_nanos())
    }

    /// Whether the file that is now `other` still has the bytes that it had as `self`. Its own time of change tells what a
    /// modification time that was set by hand does not (utimensat(2)); but links and permissions may change.
    #[must_use]
    pub fn has_bytes_of(&self, other: &Self) -> bool {
        let bytes = |version: &Self| (version.device, version.inode, version.size, version.modified_ns);
        let rest = |version: &Self| (version.links, version.mode, version.user, version.group);
        bytes(self) == bytes(other) && (self.changed_ns == other.changed_ns || rest(self) != rest(other))
    }
}

/// A file's bytes are not what they were, or cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a file has changed since it was sent")]
pub struct Changed;

/// A file that a program has sent, open to be read, and what it was then.
#[derive(Debug)]
pub struct SentFile {
    descriptor: OwnFd,
    version: Version,
}

impl SentFile {
    /// As it is now.
    ///
    /// # Errors
    /// It is not open for reading alone, is no file that can be kept ([`Version::of`]), or is of a file system that may
    /// have its readers wait for a program (fuse(8)); and the kernel's.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&descriptor)?;
        let reads = flags & (OFlags::RWMODE | OFlags::PATH | OFlags::DIRECT) == OFlags::RDONLY;
        // First, and without asking the file system for anything.
        if !reads || !answers_at_once(&descriptor) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let version = Version::of(&descriptor)?.ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { descriptor: OwnFd::new(descriptor), version })
    }

    /// From the store, which has looked at it.
    #[must_use]
    pub(crate) fn of(descriptor: OwnedFd, version: Version) -> Self {
        Self { descriptor: OwnFd::new(descriptor), version }
    }

    /// What it was.
    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Whether it has the bytes that it had.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        matches!(Version::of(&self.descriptor), Ok(Some(now)) if self.version.has_bytes_of(&now))
    }

    /// Fills `into` with the bytes from `from` on. They count once [`Self::is_unchanged`] has been asked after it.
    ///
    /// # Errors
    /// It is shorter, or cannot be read.
    pub fn read(&self, mut from: u64, mut into: &mut [u8]) -> Result<(), Changed> {
        while !into.is_empty() {
            match pread(&self.descriptor, &mut *into, from) {
                Ok(got @ 1..) => {
                    from += got as u64;
                    into = &mut into[got..];
                }
                Err(Errno::INTR) => {}
                Ok(0) | Err(_) => return Err(Changed),
            }
        }
        Ok(())
    }
}

impl AsFd for SentFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Whether the kernel itself has the file's bytes, or gets them from a disk: such file systems say what is in memory
/// without waiting (preadv2(2), RWF_NOWAIT). So does memory itself (tmpfs), but not by that.
pub(crate) fn answers_at_once(file: impl AsFd) -> bool {
    let mut byte = [0];
    let read = preadv2(&file, &mut [io::IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::NOWAIT);
    matches!(read, Ok(_) | Err(Errno::AGAIN)) || fcntl_get_seals(file).is_ok()
}

/// Where some bytes are. As long as the store keeps them there ([`crate::store::Store::pin`]), any number of copies of this
/// may be read.
#[derive(Clone, Debug)]
pub struct Place {
    source: Source,
    from: u64,
    length: u64,
}

#[derive(Clone, Debug)]
enum Source {
    Segment(Arc<SharedMemory>),
    File(Arc<SentFile>),
}

impl Place {
    /// A range of a segment, inside it.
    pub(crate) fn of_segment(memory: &Arc<SharedMemory>, from: u64, length: u64) -> Self {
        Self { source: Source::Segment(Arc::clone(memory)), from, length }
    }

    /// A range of a file.
    pub(crate) fn of_file(file: &Arc<SentFile>, from: u64, length: u64) -> Self {
        Self { source: Source::File(Arc::clone(file)), from, length }
    }

    /// The first byte, in the file that [`Self::as_fd`] is open to.
    #[must_use]
    pub fn from(&self) -> u64 {
        self.from
    }

    /// How many there are.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills `into` with the bytes from byte `at` of the range on. They count once [`Self::is_unchanged`] has been asked
    /// after it.
    ///
    /// # Errors
    /// As [`SentFile::read`].
    ///
    /// # Panics
    /// Beyond the range.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Changed> {
        assert!(at <= self.length && into.len() as u64 <= self.length - at);
        match &self.source {
            // It lies in memory that is mapped: see `Reader::find`.
            Source::Segment(memory) => memory.read((self.from + at) as usize, into),
            Source::File(file) => file.read(self.from + at, into)?,
        }
        Ok(())
    }

    /// Gives a socket some of the file that [`Self::as_fd`] is open to, from `from` on: how many bytes it took. A segment's are
    /// copied, because their place is used again; of a file the kernel sends the pages themselves. They were right when
    /// [`Self::is_unchanged`] has been asked after it. 0: they have changed before.
    ///
    /// # Errors
    /// The kernel's: `WouldBlock` where it takes nothing.
    ///
    /// # Panics
    /// Beyond a segment.
    pub fn send(&self, mut from: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        match &self.source {
            Source::Segment(memory) => memory.send(usize::try_from(from).map_err(io::Error::other)?, bytes, socket),
            Source::File(file) if file.is_unchanged() => Ok(sendfile(socket, file, Some(&mut from), bytes)?),
            Source::File(_) => Ok(0),
        }
    }

    /// Whether what has been read until now, by whatever way, is what the reference stands for.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        match &self.source {
            Source::Segment(_) => true,
            Source::File(file) => file.is_unchanged(),
        }
    }
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Segment(memory) => memory.as_fd(),
            Source::File(file) => file.as_fd(),
        }
    }
}
