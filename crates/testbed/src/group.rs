//! A control group of a test's own.

use std::fs;
use std::path::PathBuf;

use crate::of_process;

/// The calling process is in it while this lives. Not for two tests of a process at a time.
#[derive(Debug)]
pub struct Group {
    pub path: PathBuf,
    before: PathBuf,
}

impl Group {
    /// Makes one, and moves the process there.
    ///
    /// # Panics
    /// There is no cgroup of version 2, or the process may not make one.
    #[must_use]
    pub fn enter(name: &str) -> Self {
        let root = shunt_sys::cgroup::root().unwrap();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap().to_owned();
        // The watchdog starts before the process enters the group.
        let path = of_process().cgroup(&root, name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("cgroup.procs"), "0").unwrap();
        Self { path, before: root.join(own) }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.before.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.path);
    }
}
