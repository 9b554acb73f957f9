//! Nothing of a lab outlives its process.
//!
//! A shell, the *watchdog*, waits for the end of a pipe whose other end the lab holds. That end comes when the lab is
//! dropped, and also when its process ends by a panic, a signal or SIGKILL; the watchdog then kills what runs in the
//! lab's namespaces, deletes them and removes the lab's files. So there is one way to clean up, and each lab tests it.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use shunt_sys::cgroup;
use shunt_sys::netns::NAMED;

/// Every namespace of every lab begins with this.
const PREFIX: &str = "shunt-";

/// `$1`: the namespaces' common prefix; `$2`: the lab's directory, or nothing to keep it; `$3`: its pins' common prefix;
/// `$4`: its control groups'. A file system in the lab's directory whose server has ended can only be taken away.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
read -r _
for ns in /run/netns/"$1"*; do
    [ -e "$ns" ] || continue
    for try in 1 2 3 4 5 6 7 8 9 10; do
        pids=$(ip netns pids "${ns##*/}" 2>/dev/null)
        [ -n "$pids" ] || break
        kill -KILL $pids 2>/dev/null
        sleep 0.01
    done
    ip netns del "${ns##*/}" 2>/dev/null
done
# What the agents pinned: programs and maps go with the last name of them.
[ -z "$3" ] || rm -rf -- "$3"*
[ -z "$4" ] || rmdir -- "$4"*
if [ -n "$2" ]; then
    while read -r _ at _; do
        case $at in "$2"/?*) umount -l "$at" ;; esac
    done < /proc/mounts
    rm -rf -- "$2"
fi
"#;

/// Names one lab: the owner's process number and a count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabId(String);

impl LabId {
    /// One that no lab has; what a dead process of the same number left may still have its name.
    pub(crate) fn fresh() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let id = Self(format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
            if !id.dir().exists() {
                return id;
            }
        }
    }

    /// `NUMBER.COUNT`, as it stands in names.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id within the name of a namespace, if a lab made that.
    fn of_namespace(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix(PREFIX)?.split_once('-')?.0)
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (pid, count) = text.split_once('.')?;
        let _: (u32, u32) = (pid.parse().ok()?, count.parse().ok()?);
        Some(Self(text.to_owned()))
    }

    /// What the names of this lab's namespaces begin with.
    pub(crate) fn namespace_prefix(&self) -> String {
        format!("{PREFIX}{}-", self.0)
    }

    /// The lab's directory.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        std::env::temp_dir().join(format!("{PREFIX}lab-{}", self.0))
    }

    /// What the paths of this lab's pinned BPF objects begin with, a directory for each agent.
    /// That file system allows no dot in a name.
    pub(crate) fn pins_prefix(&self) -> String {
        format!("/sys/fs/bpf/{PREFIX}lab-{}-", self.0.replace('.', "-"))
    }

    /// The control group of one host, below where the hierarchy is mounted.
    pub(crate) fn cgroup(&self, root: &Path, host: &str) -> PathBuf {
        root.join(format!("{PREFIX}lab-{}-{host}", self.0))
    }

    /// What the paths of this lab's control groups begin with.
    fn cgroup_prefix(&self) -> Option<PathBuf> {
        cgroup::root().ok().map(|root| self.cgroup(&root, ""))
    }

    fn of_dir(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix(PREFIX)?.strip_prefix("lab-")?)
    }

    /// Whether the process that made the lab still runs; a later process of the same number does not count.
    #[must_use]
    pub fn owner_lives(&self) -> bool {
        let pid = self.0.split('.').next().unwrap_or_default();
        let running = owner_mark(pid);
        // Without the file the lab is being built or removed.
        running.is_some_and(|mark| std::fs::read_to_string(self.dir().join(OWNER)).map_or(true, |made| made == mark))
    }
}

impl std::fmt::Display for LabId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The file in a lab's directory that tells its owner from a later process of the same number.
const OWNER: &str = "owner";

/// A process's number and start time (field 22 of proc_pid_stat(5)).
fn owner_mark(pid: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let start = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    Some(format!("{pid} {start}\n"))
}

/// The child that cleans up after its lab.
#[derive(Debug)]
pub(crate) struct Watchdog {
    shell: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Makes the lab's directory and starts the watchdog: before anything else is made.
    pub(crate) fn start(id: &LabId, keep_files: bool) -> Result<Self> {
        let dir = id.dir();
        std::fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
        let mark = owner_mark(&std::process::id().to_string()).context("reading /proc/self/stat")?;
        std::fs::write(dir.join(OWNER), mark).with_context(|| format!("writing into {}", dir.display()))?;
        let kept = if keep_files { Path::new("") } else { &dir };
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "shunt-lab-watchdog", &id.namespace_prefix()])
            .arg(kept)
            .arg(id.pins_prefix())
            .args(id.cgroup_prefix())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("starting the lab's watchdog")?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.shell.wait();
    }
}

/// The labs that have a namespace or a directory on this machine.
///
/// # Errors
/// When a directory cannot be read.
pub fn labs() -> Result<BTreeSet<LabId>> {
    let mut labs = BTreeSet::new();
    for (dir, of) in [
        (PathBuf::from(NAMED), LabId::of_namespace as fn(&str) -> Option<LabId>),
        (std::env::temp_dir(), LabId::of_dir),
    ] {
        match std::fs::read_dir(&dir) {
            Ok(entries) => labs.extend(entries.flatten().filter_map(|entry| of(&entry.file_name().to_string_lossy()))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("reading {}", dir.display())),
        }
    }
    Ok(labs)
}

/// Removes what labs of dead owners left, kept files included, and returns which those were.
///
/// # Errors
/// When the labs cannot be listed or the shell cannot be started.
pub fn remove_leftovers() -> Result<Vec<LabId>> {
    let dead: Vec<LabId> = labs()?.into_iter().filter(|lab| !lab.owner_lives()).collect();
    for lab in &dead {
        Command::new("sh")
            .args(["-c", SCRIPT, "shunt-lab-clean", &lab.namespace_prefix()])
            .arg(lab.dir())
            .arg(lab.pins_prefix())
            .args(lab.cgroup_prefix())
            .stdin(Stdio::null())
            .status()
            .context("starting sh")?;
    }
    Ok(dead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_back_from_names() {
        let id = LabId::fresh();
        assert_eq!(LabId::of_namespace(&format!("{}fe", id.namespace_prefix())), Some(id.clone()));
        let dir = id.dir();
        assert_eq!(LabId::of_dir(&dir.file_name().unwrap().to_string_lossy()), Some(id));
    }

    #[test]
    fn foreign_names_are_no_labs() {
        for name in ["shunt-", "shunt-fe", "shunt-x.1-fe", "other-1.2-fe", "shunt-12-fe"] {
            assert_eq!(LabId::of_namespace(name), None, "{name}");
        }
    }

    #[test]
    fn a_dead_owner_is_told_from_a_live_one() {
        assert!(LabId::fresh().owner_lives());
        assert!(!LabId::parse("4194305.0").unwrap().owner_lives());
    }
}
