//! What proc(5) tells of processes.

use std::path::Path;

/// A process's or thread's number, and the fields of its `stat` from the third on: the second is a name, of any letters.
pub(crate) fn stat(directory: &Path) -> Option<(String, Vec<String>)> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    let (name, rest) = stat.rsplit_once(')')?;
    Some((name.split_once(' ')?.0.to_owned(), rest.split_whitespace().map(str::to_owned).collect()))
}
