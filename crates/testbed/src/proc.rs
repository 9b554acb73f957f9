//! Facts about processes from proc(5).

use std::path::Path;

/// ID of a process or thread, and the fields of its `stat` file from the third on. The second is a name of any
/// characters.
pub(crate) fn stat(directory: &Path) -> Option<(String, Vec<String>)> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    let (name, rest) = stat.rsplit_once(')')?;
    Some((name.split_once(' ')?.0.to_owned(), rest.split_whitespace().map(str::to_owned).collect()))
}

/// Whether a process waits for an event, and not for a core: state S of proc_pid_stat(5).
#[must_use]
pub fn is_asleep(pid: u32) -> bool {
    let state = stat(&Path::new("/proc").join(pid.to_string())).and_then(|(_, fields)| fields.into_iter().next());
    state.as_deref() == Some("S")
}
