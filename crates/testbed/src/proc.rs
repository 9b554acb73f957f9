//! What proc(5) tells of processes.

use std::path::Path;

/// A process's or thread's number, and the fields of its `stat` from the third on: the second is a name, of any letters.
pub(crate) fn stat(directory: &Path) -> Option<(String, Vec<String>)> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    let (name, rest) = stat.rsplit_once(')')?;
    Some((name.split_once(' ')?.0.to_owned(), rest.split_whitespace().map(str::to_owned).collect()))
}

/// Whether a process waits for something, and not for a core: state S of proc_pid_stat(5).
#[must_use]
pub fn is_asleep(pid: u32) -> bool {
    let state = stat(&Path::new("/proc").join(pid.to_string())).and_then(|(_, fields)| fields.into_iter().next());
    state.as_deref() == Some("S")
}
