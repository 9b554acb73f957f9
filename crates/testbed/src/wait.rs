//! Waits for conditions. Each wait has a deadline for busy machines, and none has a fixed length.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::proc::stat;

/// Deadline for conditions that hold within a second or so on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Time between the first two checks. Each following pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Waits until `holds` returns true.
///
/// # Panics
/// When it has not within [`PATIENCE`]. `what` says what should hold by then.
#[track_caller]
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let held = eventually(|| if holds() { Ok(()) } else { Err(()) });
    assert!(held.is_ok(), "not within {PATIENCE:?}: {what}");
}

/// Calls `look` until it succeeds. Returns what it found. For conditions that find something, or say why they do not
/// hold; others wait by [`wait_for`].
///
/// # Errors
/// Returns the error of the last call, once [`PATIENCE`] has passed.
pub fn eventually<T, E>(look: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    within(PATIENCE, look)
}

/// Calls `look` until it succeeds, for at most `time`: for conditions that may rightly never hold.
///
/// # Errors
/// Returns the error of the last call, once that time has passed.
pub fn within<T, E>(time: Duration, mut look: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let (deadline, mut pause) = (Instant::now() + time, FIRST_PAUSE);
    loop {
        let found = look();
        if found.is_ok() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(pause);
        pause = LONGEST_PAUSE.min(2 * pause);
    }
}

/// Waits until a process that was sent SIGSTOP has stopped: its other threads continue until one of them has taken the
/// signal. A process that ends meanwhile counts as stopped.
///
/// # Errors
/// When it has not stopped within [`PATIENCE`].
pub fn until_stopped(pid: u32) -> std::io::Result<()> {
    let process = Path::new("/proc").join(pid.to_string());
    eventually(|| is_stopped(&process))
}

/// Waits like [`until_stopped`], for all processes of a group.
///
/// # Errors
/// When one of them has not stopped within [`PATIENCE`].
pub fn until_group_stopped(group: u32) -> std::io::Result<()> {
    let group = group.to_string();
    // The process group is field 5 of proc_pid_stat(5).
    let is_member = |process: &PathBuf| stat(process).is_some_and(|(_, fields)| fields.get(2) == Some(&group));
    eventually(|| entries(Path::new("/proc")).filter(is_member).try_for_each(|process| is_stopped(&process)))
}

fn is_stopped(process: &Path) -> std::io::Result<()> {
    for (thread, fields) in entries(&process.join("task")).filter_map(|thread| stat(&thread)) {
        let state = fields.first().map_or("", String::as_str);
        // Stopped (T), traced (t), ended (Z and X).
        if !matches!(state, "T" | "t" | "Z" | "X") {
            let process = process.display();
            return Err(std::io::Error::other(format!("thread {thread} of {process} is {state}, not stopped")));
        }
    }
    Ok(())
}

/// Entries of a directory; none where it does not exist any more.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_or_group_has_stopped_when_its_state_says_so() {
        let mut command = std::process::Command::new("sleep");
        let mut sleeps =
            std::os::unix::process::CommandExt::process_group(&mut command, 0).arg("1000").spawn().unwrap();
        let process = Path::new("/proc").join(sleeps.id().to_string());
        assert!(is_stopped(&process).is_err());
        let pid = rustix::process::Pid::from_child(&sleeps);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        until_stopped(sleeps.id()).unwrap();
        until_group_stopped(sleeps.id()).unwrap();
        assert_eq!(stat(&process).unwrap().1[0], "T");
        sleeps.kill().unwrap();
        sleeps.wait().unwrap();
        until_stopped(sleeps.id()).unwrap();
    }

    #[test]
    fn waits_until_it_holds() {
        let mut looks = 0;
        wait_for("the third look", || {
            looks += 1;
            looks > 2
        });
        assert_eq!(looks, 3);
    }

    #[test]
    fn looks_again_until_it_succeeds() {
        let mut looks = 0;
        let found = eventually(|| {
            looks += 1;
            if looks > 2 { Ok(looks) } else { Err(()) }
        });
        assert_eq!(found, Ok(3));
    }
}
