//! Finds out which bytes of a file are in memory (the page cache), without waiting for the disk, by preadv2(2) with
//! RWF_NOWAIT.
//!
//! File systems whose readers may wait for a program or for another machine (fuse(8), NFS) do not tell. Neither do file
//! systems that are memory themselves (tmpfs(5)).

use std::io::IoSliceMut;
use std::os::fd::AsFd;

use std::time::{Duration, Instant};

use rustix::fs::{FsWord, fstatfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::identity::FileIdentity;

/// Largest distance between two samples, in bytes. The kernel reads ahead in pieces of this size.
pub(crate) const STRIDE_BYTES: usize = 128 << 10;
/// Largest range that one call examines, in bytes.
const MOST_BYTES: usize = 1 << 20;

/// f_type of file systems that are nothing but memory: tmpfs, ramfs, hugetlbfs (linux/magic.h).
const MEMORY: [FsWord; 3] = [0x0102_1994, 0x8584_58f6, 0x958_458f6];

/// Time for which bytes that were found in memory count as being there without another look. A page that has just been
/// read is among the last that the kernel takes back. So a file that many clients ask for is examined once in that
/// time, and not once for each client.
const FOUND_FOR: Duration = Duration::from_millis(10);
/// Number of files that are remembered. The low bits of a file's inode number are its index in [`Found`]. A power of
/// two.
const FOUND: usize = 256;

/// Ranges of files that were found in memory a moment ago.
#[derive(Debug)]
pub(crate) struct Found(Vec<Option<Range>>);

#[derive(Clone, Copy, Debug)]
struct Range {
    file: FileIdentity,
    from: u64,
    to: u64,
    at: Instant,
}

impl Default for Found {
    fn default() -> Self {
        Self(vec![None; FOUND])
    }
}

impl Found {
    pub(crate) fn note(&mut self, file: FileIdentity, from: u64, bytes: usize, now: Instant) {
        self.0[Self::place(&file)] = Some(Range { file, from, to: from + bytes as u64, at: now });
    }

    /// Number of bytes of a file, from `from` on, that were found in memory a moment ago.
    pub(crate) fn bytes_from(&self, file: &FileIdentity, from: u64, now: Instant) -> usize {
        let Some(range) = &self.0[Self::place(file)] else { return 0 };
        let is_it = range.file == *file && range.from <= from && now.duration_since(range.at) < FOUND_FOR;
        if is_it { usize::try_from(range.to.saturating_sub(from)).unwrap_or(0) } else { 0 }
    }

    fn place(file: &FileIdentity) -> usize {
        file.inode as usize & (FOUND - 1)
    }
}

/// The file system does not tell what is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Untold;

/// Number of bytes in memory from `at` on, at most `most`. 0: the first byte is not in memory. A sample stands for its
/// neighbours, because to examine each page would cost as much as to copy it.
///
/// # Errors
/// [`Untold`] if the file system does not tell.
pub(crate) fn bytes_from(file: impl AsFd, at: u64, most: usize) -> Result<usize, Untold> {
    let most = most.min(MOST_BYTES);
    let mut known = 0;
    if !is_here(&file, at)? {
        return Ok(0);
    }
    while known < most {
        let next = (known + STRIDE_BYTES).min(most);
        if !is_here(&file, at + next as u64 - 1)? {
            break;
        }
        known = next;
    }
    Ok(known)
}

fn is_here(file: impl AsFd, at: u64) -> Result<bool, Untold> {
    let mut byte = [0];
    match read(file, &mut [IoSliceMut::new(&mut byte)], at) {
        Ok(_) => Ok(true), // 0 bytes, too: at the end of the file nobody waits for a disk
        Err(Errno::AGAIN) => Ok(false),
        Err(_) => Err(Untold),
    }
}

/// Reads bytes that are in memory: at least one, or none at the end of the file.
///
/// # Errors
/// EAGAIN if the first byte is not in memory, EOPNOTSUPP if the file system does not tell.
pub(crate) fn read(file: impl AsFd, slices: &mut [IoSliceMut<'_>], at: u64) -> Result<usize, Errno> {
    loop {
        match preadv2(&file, slices, at, ReadWriteFlags::NOWAIT) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Whether a file's file system is memory. The call may wait for the file system.
pub(crate) fn is_of_memory(file: impl AsFd) -> bool {
    fstatfs(file).is_ok_and(|system| MEMORY.contains(&system.f_type))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn bytes_that_were_just_written_are_here_up_to_the_end_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 300 << 10]).unwrap();
        let Ok(here) = bytes_from(&file, 0, 300 << 10) else {
            return assert!(is_of_memory(&file), "a file system that tells nothing");
        };
        assert_eq!(here, 300 << 10);
        assert_eq!(bytes_from(&file, 1000, 5), Ok(5));
        assert_eq!(bytes_from(&file, 0, 9 << 20), Ok(MOST_BYTES), "so much at once");
    }

    #[test]
    fn bytes_found_in_memory_count_as_there_for_a_moment() {
        let (mut found, now) = (Found::default(), Instant::now());
        let file = FileIdentity { device: 1, inode: 7, size: 1 << 20, mtime_ns: 1, ctime_ns: 1 };
        assert_eq!(found.bytes_from(&file, 0, now), 0);
        found.note(file, 1000, 500, now);
        let known = |file: &FileIdentity, from, after| found.bytes_from(file, from, now + after);
        let soon = FOUND_FOR / 2;
        assert_eq!([1000, 1499].map(|from| known(&file, from, soon)), [500, 1]);
        assert_eq!([999, 1500, u64::MAX].map(|from| known(&file, from, soon)), [0, 0, 0]);
        assert_eq!(known(&file, 1000, FOUND_FOR), 0, "some time ago");
        assert_eq!(known(&FileIdentity { ctime_ns: 2, ..file }, 1000, soon), 0, "written to");
        assert_eq!(known(&FileIdentity { inode: 7 + FOUND as u64, ..file }, 1000, soon), 0, "another file");
    }

    #[test]
    fn memory_does_not_tell_but_is_known() {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&memory, b"x").unwrap();
        assert!(matches!(bytes_from(&memory, 0, 1), Err(Untold) | Ok(1)));
        assert!(is_of_memory(&memory));
        assert!(!is_of_memory(std::fs::File::open("/proc/version").unwrap()));
    }
}
