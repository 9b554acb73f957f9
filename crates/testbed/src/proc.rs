//! Facts about processes from proc(5).

use std::path::Path;

/// Returns the ID of a process or thread, and the fields of its `stat` file from the third on. `directory` is its
/// directory in /proc. The second field is left out: it is a name, which may contain spaces and brackets.
pub(crate) fn stat(directory: &Path) -> Option<(String, Vec<String>)> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    let (name, rest) = stat.rsplit_once(')')?;
    Some((name.split_once(' ')?.0.to_owned(), rest.split_whitespace().map(str::to_owned).collect()))
}

/// Whether a process sleeps until an event: state S of proc_pid_stat(5). A process that only waits for a CPU does not.
#[must_use]
pub fn is_asleep(pid: u32) -> bool {
    let state = stat(&Path::new("/proc").join(pid.to_string())).and_then(|(_, fields)| fields.into_iter().next());
    state.as_deref() == Some("S")
}
