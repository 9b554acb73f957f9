//! Process that uses a directory of pins (BPF programs and maps, as files in bpffs): the one that holds the lock on it
//! (flock(2)).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::LockType;

/// Returns the process that uses these pins, as far as /proc/locks tells.
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

/// Returns text for an operator: the process id in parentheses, or nothing if it is not known.
pub fn by(process: Option<i32>) -> String {
    process.map(|process| format!(" (process {process})")).unwrap_or_default()
}

/// Returns text for an operator: the process id of the agent that uses these pins, or nothing if no agent does.
pub fn running(pins: Option<&PathBuf>) -> String {
    pins.and_then(|pins| holder(pins)).map(|process| format!("; it runs as process {process}")).unwrap_or_default()
}
