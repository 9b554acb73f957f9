//! Finds the process that uses a directory of pins (BPF programs and maps, as files in bpffs). It is the agent that
//! holds the lock on that directory (flock(2)).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use procfs::LockType;

/// Returns the id of the process that uses these pins, as far as /proc/locks tells.
pub fn holder(pins: &Path) -> Option<i32> {
    let inode = std::fs::metadata(pins).ok()?.ino();
    let device = std::fs::metadata(pins).ok()?.dev();
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    let locks = procfs::locks().ok()?;
    let found = locks
        .into_iter()
        .find(|lock| lock.lock_type == LockType::FLock && lock.inode == inode && (lock.devmaj, lock.devmin) == device);
    found?.pid.filter(|pid| *pid > 0)
}
