//! Identity of a file in one state: which file it is, and when it last changed (inode(7)). The same identity means the
//! same bytes, with one exception: if the file is written to again within one tick of its file system's clock, the
//! times stay the same.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Statx, StatxFlags, makedev, statx};
use rustix::io::Errno;

/// One state of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last write (mtime), which the file's owner may set to any time.
    pub mtime_ns: i64,
    /// Time of the last change (ctime), which nobody can set.
    pub ctime_ns: i64,
}

impl FileIdentity {
    /// Makes the identity from the result of stat(2).
    pub fn of(meta: &Metadata) -> Self {
        let ns = |seconds: i64, rest: i64| seconds.wrapping_mul(1_000_000_000).wrapping_add(rest);
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Returns the file's identity as far as the kernel knows it, without asking a program (fuse(8)) or another machine
    /// (NFS).
    ///
    /// # Errors
    /// Returns the kernel's error of statx(2).
    pub fn at_hand(file: impl AsFd) -> Result<Self, Errno> {
        Self::ask(file, AtFlags::STATX_DONT_SYNC)
    }

    /// Returns the file's identity. May wait for a program or for another machine.
    ///
    /// # Errors
    /// Returns the kernel's error of statx(2).
    pub fn now(file: impl AsFd) -> Result<Self, Errno> {
        Self::ask(file, AtFlags::STATX_SYNC_AS_STAT)
    }

    fn ask(file: impl AsFd, sync: AtFlags) -> Result<Self, Errno> {
        let found: Statx = statx(file, c"", AtFlags::EMPTY_PATH | sync, StatxFlags::BASIC_STATS)?;
        let ns = |time: rustix::fs::StatxTimestamp| {
            time.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.into())
        };
        Ok(Self {
            device: makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            size: found.stx_size,
            mtime_ns: ns(found.stx_mtime),
            ctime_ns: ns(found.stx_ctime),
        })
    }

    /// Whether the file has been in this state for longer than `age`.
    pub fn is_older_than(&self, age: Duration, now: SystemTime) -> bool {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
        now.saturating_sub(self.mtime_ns.max(self.ctime_ns)) > age.as_nanos() as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn identity(file: &std::fs::File) -> FileIdentity {
        FileIdentity::of(&file.metadata().unwrap())
    }

    #[test]
    fn all_ways_to_ask_find_the_same() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"x").unwrap();
        let found = identity(&file);
        assert_eq!((FileIdentity::now(&file), FileIdentity::at_hand(&file)), (Ok(found), Ok(found)));
    }

    #[test]
    fn bytes_in_place_are_another_state_though_the_time_of_writing_is_set_back() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before").unwrap();
        let (before, written) = (identity(&file), file.metadata().unwrap().modified().unwrap());
        shunt_testbed::wait_for("the time of change has gone on", || {
            std::os::unix::fs::FileExt::write_all_at(&file, b"beyond", 0).unwrap();
            file.set_modified(written).unwrap();
            identity(&file) != before
        })
        .unwrap();
        assert_eq!(FileIdentity { ctime_ns: before.ctime_ns, ..identity(&file) }, before);
    }

    #[test]
    fn a_files_age_counts_from_the_later_of_its_times() {
        let second = Duration::from_secs(1);
        let now = SystemTime::UNIX_EPOCH + 100 * second;
        let at = |mtime: i64, ctime: i64| FileIdentity {
            device: 1,
            inode: 1,
            size: 1,
            mtime_ns: mtime * 1_000_000_000,
            ctime_ns: ctime * 1_000_000_000,
        };
        assert!(at(90, 96).is_older_than(3 * second, now));
        assert!(!at(90, 98).is_older_than(3 * second, now));
        assert!(!at(98, 90).is_older_than(3 * second, now));
        assert!(!at(200, 90).is_older_than(3 * second, now), "a time to come");
    }
}
