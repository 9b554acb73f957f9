//! Place of a reference's bytes: a range of a segment, or of a file that a program has sent (sendfile(2)). A *segment*
//! is memory of the store into which one program writes. A *reference* names bytes of a payload, a body. The *store*
//! has the payloads of a machine's programs.
//!
//! A file is not copied. So after its bytes were read, and before they are used, the file is compared with its state at
//! the time when the reference was made ([`Version`]). A body is therefore either whole, or visibly cut off.

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

/// State of a file, as far as fstat(2) tells.
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

/// Time since a file's last change after which it counts as settled. Time stamps can be as coarse as two seconds
/// (vfat), so a file that changes twice within that time may have the same stamps after both changes.
const SETTLED_AFTER: Duration = Duration::from_secs(3);

impl Version {
    /// Reads the state of an open file. `None`: it is no regular file, or its bytes may be made up when they are read
    /// (proc(5) has files without blocks). Then nothing tells whether the bytes are still the same.
    ///
    /// # Errors
    /// Returns the kernel's error of fstat(2).
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

    /// Size of the file in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.get()
    }

    /// Whether every change of the file from now on will change its state, too.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let now_ns = now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec) as u64;
        now_ns.checked_sub(self.changed_ns.get()).is_some_and(|ago| u128::from(ago) > SETTLED_AFTER.as_nanos())
    }

    /// Whether a file whose state is now `other` still has the bytes that it had in the state `self`. A modification
    /// time can be set by hand (utimensat(2)), but then the time of the inode's change tells. A later change of the
    /// inode is accepted if the links, permissions or owner differ, because such a difference explains the change.
    #[must_use]
    pub fn has_bytes_of(&self, other: &Self) -> bool {
        let bytes = |version: &Self| (version.device, version.inode, version.size, version.modified_ns);
        let rest = |version: &Self| (version.links, version.mode, version.user, version.group);
        bytes(self) == bytes(other) && (self.changed_ns == other.changed_ns || rest(self) != rest(other))
    }
}

/// The bytes of a file are not what they were, or cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a file has changed since it was sent")]
pub struct Changed;

/// A file that a program has sent, open for reading, with its state at that time.
#[derive(Debug)]
pub struct SentFile {
    descriptor: OwnFd,
    version: Version,
}

impl SentFile {
    /// Takes an open file with its present state.
    ///
    /// # Errors
    /// `Unsupported` if the descriptor is not read-only, if it is open with O_DIRECT or O_PATH, or if [`Version::of`]
    /// finds no state. Also `Unsupported` if the file system may make readers wait for a program (fuse(8)). Otherwise
    /// the kernel's error of fcntl(2) or fstat(2).
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&descriptor)?;
        let reads = flags & (OFlags::RWMODE | OFlags::PATH | OFlags::DIRECT) == OFlags::RDONLY;
        // Checked before the file's state is read: this check never waits for a program that serves the file system
        // (fuse(8)), and fstat(2) may.
        if !reads || !answers_at_once(&descriptor) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let version = Version::of(&descriptor)?.ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { descriptor: OwnFd::new(descriptor), version })
    }

    /// Takes a file from the store, which has checked it.
    #[must_use]
    pub(crate) fn of(descriptor: OwnedFd, version: Version) -> Self {
        Self { descriptor: OwnFd::new(descriptor), version }
    }

    /// State of the file when it was sent.
    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Whether the file still has the bytes that it had when it was sent.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        matches!(Version::of(&self.descriptor), Ok(Some(now)) if self.version.has_bytes_of(&now))
    }

    /// Fills `into` with the bytes from `from` on. They are valid if [`Self::is_unchanged`] returns true afterwards.
    ///
    /// # Errors
    /// [`Changed`] if the file is shorter, or cannot be read.
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

/// Whether the kernel itself has the file's bytes, or reads them from a disk. Such file systems tell without waiting
/// which bytes are in memory (preadv2(2), RWF_NOWAIT). tmpfs does not support that flag, but is in memory; it is
/// recognised by its support of seals (fcntl(2), F_GET_SEALS).
pub(crate) fn answers_at_once(file: impl AsFd) -> bool {
    let mut byte = [0];
    let read = preadv2(&file, &mut [io::IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::NOWAIT);
    matches!(read, Ok(_) | Err(Errno::AGAIN)) || fcntl_get_seals(file).is_ok()
}

/// Place of some bytes. A copy of this value can be used as long as the store keeps the bytes there
/// ([`crate::store::Store::pin`]).
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
    /// Makes the place of a range of a segment. The range has to be inside the segment.
    pub(crate) fn of_segment(memory: &Arc<SharedMemory>, from: u64, length: u64) -> Self {
        Self { source: Source::Segment(Arc::clone(memory)), from, length }
    }

    /// Makes the place of a range of a file.
    pub(crate) fn of_file(file: &Arc<SentFile>, from: u64, length: u64) -> Self {
        Self { source: Source::File(Arc::clone(file)), from, length }
    }

    /// Offset at which the range begins, in the segment or file whose descriptor [`Self::as_fd`] returns.
    #[must_use]
    pub fn from(&self) -> u64 {
        self.from
    }

    /// Number of bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills `into` with the bytes from byte `at` of the range on. They are valid if [`Self::is_unchanged`] returns
    /// true afterwards.
    ///
    /// # Errors
    /// [`Changed`] if the file is shorter, or cannot be read.
    ///
    /// # Panics
    /// Panics if the bytes are not inside the range.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Changed> {
        assert!(at <= self.length && into.len() as u64 <= self.length - at);
        match &self.source {
            // The range is inside the mapped memory, as `Reader::find` has checked.
            Source::Segment(memory) => memory.read((self.from + at) as usize, into),
            Source::File(file) => file.read(self.from + at, into)?,
        }
        Ok(())
    }

    /// Sends bytes on a socket, from offset `from` of the file that [`Self::as_fd`] returns. Returns how many the
    /// socket took; 0: the file had changed before. Bytes of a segment are copied, because their pages are used again.
    /// The kernel sends a file's pages themselves; they were valid if [`Self::is_unchanged`] returns true
    /// afterwards.
    ///
    /// # Errors
    /// Returns the kernel's error of send(2) or sendfile(2): `WouldBlock` if the socket takes nothing.
    ///
    /// # Panics
    /// Panics if the bytes are outside the segment.
    pub fn send(&self, mut from: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        match &self.source {
            Source::Segment(memory) => memory.send(usize::try_from(from).map_err(io::Error::other)?, bytes, socket),
            Source::File(file) if file.is_unchanged() => Ok(sendfile(socket, file, Some(&mut from), bytes)?),
            Source::File(_) => Ok(0),
        }
    }

    /// Whether all bytes that were read until now, by any method, are those that the reference stands for.
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
