//! Control groups, version 2 (cgroups(7)).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the directory where the hierarchy of control groups is mounted.
///
/// # Errors
/// Returns the kernel's error of reading /proc/self/mounts, or an error where no hierarchy is mounted.
pub fn root() -> io::Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mut roots = fields.filter(|fields| fields.get(2) == Some(&"cgroup2")).map(|fields| PathBuf::from(fields[1]));
    roots.next().ok_or_else(|| {
        io::Error::other("no cgroup v2 hierarchy is mounted: run `mount -t cgroup2 none /sys/fs/cgroup`")
    })
}

/// Makes the process of `command` start in the control group whose directory is `group`.
///
/// # Errors
/// Returns the kernel's error of open(2): there is no such group, or this process may not change it.
pub fn start_in(command: &mut Command, group: &Path) -> io::Result<()> {
    let members: File = OpenOptions::new().write(true).open(group.join("cgroup.procs"))?;
    // SAFETY: between fork and exec the closure makes one write(2), which is async-signal-safe, and allocates nothing.
    // In cgroup.procs, "0" means the writing process.
    unsafe { command.pre_exec(move || (&members).write_all(b"0")) };
    Ok(())
}
