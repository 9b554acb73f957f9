//! Watchdog: nothing that a lab or a test makes on this machine outlives its process.
//!
//! The *watchdog* is a shell that reads from a pipe, whose writing end the process has open. The read ends when the
//! [`Watchdog`] is dropped, and also when the process ends by a panic, a signal or SIGKILL. The watchdog then kills the
//! processes in the namespaces and control groups of the *lab* (all that this process has made). It removes the
//! namespaces and control groups, the lab's pins and its files. So there is only one procedure for cleaning up, and
//! each lab tests it.
//!
//! When a container or a CI job ends, watchdogs are killed, too. So before a process starts its first watchdog, it
//! removes the labs of dead processes.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Once, OnceLock};

use shunt_sys::cgroup;
use shunt_sys::netns::NAMED;

use crate::bpffs::{BPFFS, mount_bpffs};
use crate::id::{KEPT, LabId, OWNER, owner_mark};

/// Script of the shell. `$1`: common prefix of the lab's namespaces; `$2`: the lab's directory, or nothing to keep it;
/// `$3`: common prefix of the lab's pins; `$4`: common prefix of the lab's control groups. Before the script removes
/// the directory, it unmounts the file systems in it. A file system whose server has ended could not be removed
/// otherwise.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
# A member of no group that is to go.
[ -z "$4" ] || echo $$ > "${4%/*}/cgroup.procs"
read -r _
members() {
    for ns in /run/netns/"$1"*; do
        [ ! -e "$ns" ] || ip netns pids "${ns##*/}" 2>/dev/null
    done
    [ -z "$2" ] || find "$2"* -name cgroup.procs -exec cat {} + 2>/dev/null
}
# Until the last has ended: a process that is killed in a system call may still pin what that call made.
tries=0
while pids=$(members "$1" "$4"); [ -n "$pids" ] && [ $tries -lt 1000 ]; do
    kill -KILL $pids 2>/dev/null
    tries=$((tries + 1))
    sleep 0.02
done
for ns in /run/netns/"$1"*; do
    [ ! -e "$ns" ] || ip netns del "${ns##*/}" 2>/dev/null
done
# Removes the agents' pins: programs and maps go with the last name of them.
[ -z "$3" ] || rm -rf -- "$3"*
[ -z "$4" ] || find "$4"* -depth -type d -exec rmdir {} \; 2>/dev/null
if [ -n "$2" ]; then
    while read -r _ at _; do
        case $at in "$2"/?*) umount -l "$at" ;; esac
    done < /proc/mounts
    rm -rf -- "$2"
fi
"#;

fn script(name: &str, id: &LabId, keep_files: bool) -> Command {
    let dir = id.dir();
    let removed = if keep_files { Path::new("") } else { &dir };
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT, name, &id.namespace_prefix()]).arg(removed).arg(id.pins_prefix());
    shell.args(id.cgroup_prefix()).current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
    shell
}

/// Child process that cleans up after its lab.
#[derive(Debug)]
pub struct Watchdog {
    shell: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Makes the lab's directory and starts the watchdog. Must be called before anything else is made.
    ///
    /// # Errors
    /// When the directory cannot be made or the shell cannot be started.
    pub fn start(id: &LabId, keep_files: bool) -> io::Result<Self> {
        static SWEEP: Once = Once::new();
        SWEEP.call_once(|| {
            let _ = sweep();
        });
        let dir = id.dir();
        std::fs::create_dir(&dir)?;
        std::fs::write(dir.join(OWNER), owner_mark("self").ok_or(io::ErrorKind::NotFound)?)?;
        if keep_files {
            std::fs::write(dir.join(KEPT), "")?;
        }
        let mut shell = script("shunt-lab-watchdog", id, keep_files);
        let mut shell = shell.stdin(Stdio::piped()).process_group(0).spawn()?;
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

/// Returns the id for everything that tests of this process make without a lab. The first call mounts a BPF file
/// system, if root runs the tests and none is mounted. It also starts a watchdog, which removes everything that is left
/// when the process ends.
///
/// # Panics
/// When the watchdog cannot be started, or root cannot mount a BPF file system.
pub fn of_process() -> &'static LabId {
    static OWN: OnceLock<(LabId, Watchdog)> = OnceLock::new();
    let (id, _) = OWN.get_or_init(|| {
        let id = LabId::fresh();
        if rustix::process::geteuid().is_root() {
            mount_bpffs().expect("a BPF file system can be mounted");
        }
        let watchdog = Watchdog::start(&id, false).expect("a watchdog can be started");
        (id, watchdog)
    });
    id
}

/// Returns all labs that have a namespace, a directory, a control group or a pin on this machine.
///
/// # Errors
/// When a directory cannot be read. A directory that does not exist, or that this process may not read, counts as
/// empty.
pub fn labs() -> io::Result<BTreeSet<LabId>> {
    let mut labs = BTreeSet::new();
    let mut places = vec![
        (PathBuf::from(NAMED), LabId::of_namespace as fn(&str) -> Option<LabId>),
        (std::env::temp_dir(), LabId::of_dir),
        (BPFFS.into(), LabId::of_pins),
    ];
    places.extend(cgroup::root().ok().map(|root| (root, LabId::of_cgroup as fn(&str) -> Option<LabId>)));
    for (dir, of) in places {
        match std::fs::read_dir(&dir) {
            Ok(entries) => labs.extend(entries.flatten().filter_map(|entry| of(&entry.file_name().to_string_lossy()))),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(labs)
}

/// Removes everything that labs of dead owners have left, except files that are kept.
///
/// # Errors
/// When the labs cannot be listed or the shell cannot be started.
pub fn sweep() -> io::Result<()> {
    labs()?.iter().filter(|lab| !lab.owner_lives()).try_for_each(|lab| remove(lab, lab.is_kept()))
}

/// Removes everything that labs of dead owners have left, including kept files. Returns these labs.
///
/// # Errors
/// When the labs cannot be listed or the shell cannot be started.
pub fn remove_leftovers() -> io::Result<Vec<LabId>> {
    let dead: Vec<LabId> = labs()?.into_iter().filter(|lab| !lab.owner_lives()).collect();
    dead.iter().try_for_each(|lab| remove(lab, false))?;
    Ok(dead)
}

fn remove(lab: &LabId, keep_files: bool) -> io::Result<()> {
    script("shunt-lab-clean", lab, keep_files).stdin(Stdio::null()).status().map(drop)
}
