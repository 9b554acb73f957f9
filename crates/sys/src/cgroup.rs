//! Control groups, version 2 (cgroups(7)).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::statfs;

/// Type of a cgroup v2 file system, from linux/magic.h.
const CGROUP2_SUPER_MAGIC: i64 = 0x6367_7270;

/// Returns the directory where the hierarchy of control groups is mounted.
///
/// # Errors
/// Returns the kernel's error of reading /proc/self/mounts, or an error where no hierarchy is mounted.
pub fn root() -> io::Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mut roots = fields.filter(|fields| fields.get(2) == Some(&"cgroup2")).map(|fields| PathBuf::from(fields[1]));
    roots.next().ok_or_else(|| {
        io::Error::other(
            "no cgroup v2 hierarchy is mounted: run `mount -t cgroup2 none /sys/fs/cgroup`, or boot with cgroup v2",
        )
    })
}

/// Returns the directory that `cgroup` of an agent's configuration names, or the [`root`] if it names none.
///
/// # Errors
/// Returns a sentence for the operator where the directory is in no cgroup v2 hierarchy, and the errors of [`root`].
pub fn chosen(named: Option<&Path>) -> io::Result<PathBuf> {
    let directory = named.map_or_else(root, |path| Ok(path.into()))?;
    if statfs(&directory).is_ok_and(|found| found.f_type == CGROUP2_SUPER_MAGIC) {
        return Ok(directory);
    }
    let path = directory.display();
    Err(io::Error::other(format!(
        "{path} is no directory of a cgroup v2 hierarchy: name the one that the servers are below"
    )))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_file_system_is_refused_in_a_sentence() {
        for path in ["/proc", "/sys/fs/cgroup/nothing-here"] {
            let error = chosen(Some(Path::new(path))).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{path} is no directory of a cgroup v2 hierarchy: name")), "{error}");
        }
        let found = chosen(None).unwrap();
        assert_eq!(chosen(Some(&found)).unwrap(), found);
    }
}
