//! A control group for one test.

use std::fs;
use std::path::PathBuf;

use crate::of_process;

/// Control group in which the calling process is while this value exists. Two tests in one process must not have a
/// [`Group`] at the same time.
#[derive(Debug)]
pub struct Group {
    pub path: PathBuf,
    before: PathBuf,
}

impl Group {
    /// Makes a control group, and moves the process into it.
    ///
    /// # Panics
    /// When there is no cgroup v2, or the process may not make a group.
    #[must_use]
    pub fn enter(name: &str) -> Self {
        let root = shunt_sys::cgroup::root().unwrap();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap().to_owned();
        // `of_process` starts the watchdog, which removes what tests leave. It does so before this process enters the
        // group, so that the watchdog is not in the group.
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
