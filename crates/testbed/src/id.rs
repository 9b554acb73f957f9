//! Names of everything that a lab (hosts as network namespaces) or a test makes on this machine: namespaces,
//! directories, pins of BPF objects, control groups. From each name one can tell which process made the thing.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use shunt_sys::cgroup;

use crate::bpffs::BPFFS;
use crate::proc::stat;

/// Prefix of every name.
const PREFIX: &str = "shunt-";

/// File in a lab's directory. It has the [`owner_mark`] of the lab's owner, which tells the owner from a later process
/// with the same process ID.
pub(crate) const OWNER: &str = "owner";

/// Empty file in a lab's directory. It says that the lab's files are kept after its end.
pub(crate) const KEPT: &str = "kept";

/// Identity of one lab: the process ID of its owner (the process that made the lab), and a count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabId(String);

impl LabId {
    /// Returns an id that no lab has. Skips ids whose directory a dead process with the same process ID has left.
    #[must_use]
    pub fn fresh() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let id = Self(format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
            if !id.dir().exists() {
                return id;
            }
        }
    }

    /// The id as names contain it, `PID.COUNT`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Parses `PID.COUNT`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (pid, count) = text.split_once('.')?;
        let _: (u32, u32) = (pid.parse().ok()?, count.parse().ok()?);
        Some(Self(text.to_owned()))
    }

    /// Beginning of the names of this lab's network namespaces.
    #[must_use]
    pub fn namespace_prefix(&self) -> String {
        format!("{PREFIX}{}-", self.0)
    }

    /// Path of the lab's directory.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        std::env::temp_dir().join(format!("{PREFIX}lab-{}", self.0))
    }

    /// Beginning of the paths of the directories in which this lab's agents pin BPF objects. The id's dot becomes a
    /// hyphen, because a BPF file system allows no dot in a name.
    #[must_use]
    pub fn pins_prefix(&self) -> String {
        format!("{BPFFS}/{PREFIX}lab-{}-", self.0.replace('.', "-"))
    }

    /// Path of the control group of one of the lab's hosts, below `root`, the mount point of the hierarchy.
    #[must_use]
    pub fn cgroup(&self, root: &Path, host: &str) -> PathBuf {
        root.join(format!("{PREFIX}lab-{}-{host}", self.0))
    }

    /// Beginning of the paths of this lab's control groups. `None` if there is no cgroup v2 hierarchy.
    pub(crate) fn cgroup_prefix(&self) -> Option<PathBuf> {
        cgroup::root().ok().map(|root| self.cgroup(&root, ""))
    }

    /// Returns the id in the name of a network namespace, or `None` if no lab made the namespace.
    pub(crate) fn of_namespace(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix(PREFIX)?.split_once('-')?.0)
    }

    pub(crate) fn of_dir(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix(PREFIX)?.strip_prefix("lab-")?)
    }

    pub(crate) fn of_cgroup(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix(PREFIX)?.strip_prefix("lab-")?.split_once('-')?.0)
    }

    pub(crate) fn of_pins(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix(PREFIX)?.strip_prefix("lab-")?.splitn(3, '-');
        let (pid, count) = (parts.next()?, parts.next()?);
        parts.next()?;
        Self::parse(&format!("{pid}.{count}"))
    }

    /// Whether the process that made the lab still runs. A later process with the same process ID does not count, as
    /// long as the lab's directory exists.
    #[must_use]
    pub fn owner_lives(&self) -> bool {
        let pid = self.0.split('.').next().unwrap_or_default();
        let running = owner_mark(pid);
        // If the file is missing, the lab is being built or removed, and the process is taken for the owner.
        running.is_some_and(|mark| std::fs::read_to_string(self.dir().join(OWNER)).map_or(true, |made| made == mark))
    }

    /// Whether the lab's files are kept after its end.
    pub(crate) fn is_kept(&self) -> bool {
        self.dir().join(KEPT).exists()
    }
}

impl std::fmt::Display for LabId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the process ID and the start time of a process as a line of text (fields 1 and 22 of proc_pid_stat(5)).
pub(crate) fn owner_mark(pid: &str) -> Option<String> {
    let (number, fields) = stat(&Path::new("/proc").join(pid))?;
    Some(format!("{number} {}\n", fields.get(19)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_back_from_names() {
        let id = LabId::fresh();
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(LabId::of_namespace(&format!("{}fe", id.namespace_prefix())), Some(id.clone()));
        assert_eq!(LabId::of_dir(&name(&id.dir())), Some(id.clone()));
        assert_eq!(LabId::of_cgroup(&name(&id.cgroup(Path::new("/"), "fe"))), Some(id.clone()));
        assert_eq!(LabId::of_pins(&name(Path::new(&(id.pins_prefix() + "fe-1")))), Some(id));
    }

    #[test]
    fn foreign_names_are_no_labs() {
        for name in ["shunt-", "shunt-fe", "shunt-x.1-fe", "other-1.2-fe", "shunt-12-fe", "shunt-lab-1-fe", "shunt"] {
            assert_eq!(LabId::of_namespace(name), None, "{name}");
            assert_eq!(LabId::of_cgroup(name), None, "{name}");
            assert_eq!(LabId::of_pins(name), None, "{name}");
        }
    }

    #[test]
    fn a_dead_owner_is_told_from_a_live_one() {
        assert!(LabId::fresh().owner_lives());
        assert!(!LabId::parse("4194305.0").unwrap().owner_lives());
    }
}
