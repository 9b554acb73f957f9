//! Waits for conditions. A wait ends as soon as its condition holds. Its deadline is long enough for busy machines.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::proc::stat;

/// Deadline for conditions that hold within a second or so on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Time between the first two checks. Each following pause is twice as long as the one before, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Result of one check of a condition: whether the condition holds (`bool`), what the check found (`Option`), or why
/// the condition does not hold (`Result`).
pub trait Check {
    /// Value that a check returns when the condition holds.
    type Found;

    /// Returns the value, if the condition holds.
    ///
    /// # Errors
    /// Returns why the condition does not hold, as far as the check says.
    fn found(self) -> Result<Self::Found>;
}

impl Check for () {
    type Found = ();

    fn found(self) -> Result<()> {
        Ok(())
    }
}

impl Check for bool {
    type Found = ();

    fn found(self) -> Result<()> {
        if self { Ok(()) } else { Err(anyhow!("it does not hold")) }
    }
}

impl<T> Check for Option<T> {
    type Found = T;

    fn found(self) -> Result<T> {
        self.ok_or_else(|| anyhow!("nothing is found"))
    }
}

impl<C: Check> Check for Result<C> {
    type Found = C::Found;

    fn found(self) -> Result<C::Found> {
        self.and_then(Check::found)
    }
}

/// Waits until `check` says that a condition holds. Returns what the check found.
///
/// # Errors
/// When the condition does not hold within [`PATIENCE`]. The error has `what`, which names the condition, and the last
/// check's reason.
pub fn wait_for<C: Check>(what: &str, check: impl FnMut() -> C) -> Result<C::Found> {
    wait_at_most(PATIENCE, what, check)
}

/// Waits like [`wait_for`], but an error of the check ends the wait at once. For checks that compare bodies: a later
/// check that succeeds must not hide a wrong body.
///
/// # Errors
/// Returns the check's error, or that of [`wait_for`].
pub fn wait_or_fail(what: &str, mut check: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_for(what, || match check() {
        Ok(holds) => holds.then_some(Ok(())),
        Err(error) => Some(Err(error)),
    })?
}

/// Waits like [`wait_for`], for at most `time`. For conditions that may never hold.
///
/// # Errors
/// When the condition does not hold within that time.
pub fn wait_at_most<C: Check>(time: Duration, what: &str, mut check: impl FnMut() -> C) -> Result<C::Found> {
    let (deadline, mut pause) = (Instant::now() + time, FIRST_PAUSE);
    loop {
        let found = check().found();
        if found.is_ok() || Instant::now() > deadline {
            return found.map_err(|why| why.context(format!("not within {time:?}: {what}")));
        }
        std::thread::sleep(pause);
        pause = LONGEST_PAUSE.min(2 * pause);
    }
}

/// Waits until all threads of a process that was sent SIGSTOP have stopped. The threads run on until one of them
/// handles the signal. A process that ends meanwhile counts as stopped.
///
/// # Errors
/// When the process has not stopped within [`PATIENCE`].
pub fn until_stopped(pid: u32) -> Result<()> {
    let process = Path::new("/proc").join(pid.to_string());
    wait_for(&format!("process {pid} has stopped"), || is_stopped(&process))
}

/// Waits like [`until_stopped`], for all processes of a process group.
///
/// # Errors
/// When one of them has not stopped within [`PATIENCE`].
pub fn until_group_stopped(group: u32) -> Result<()> {
    let (what, group) = (format!("process group {group} has stopped"), group.to_string());
    // The process group is field 5 of proc_pid_stat(5).
    let is_member = |process: &PathBuf| stat(process).is_some_and(|(_, fields)| fields.get(2) == Some(&group));
    wait_for(&what, || entries(Path::new("/proc")).filter(is_member).try_for_each(|process| is_stopped(&process)))
}

fn is_stopped(process: &Path) -> Result<()> {
    for (thread, fields) in entries(&process.join("task")).filter_map(|thread| stat(&thread)) {
        let state = fields.first().map_or("", String::as_str);
        // States of proc_pid_stat(5): stopped (T), traced (t), ended (Z and X).
        if !matches!(state, "T" | "t" | "Z" | "X") {
            let process = process.display();
            return Err(anyhow!("thread {thread} of {process} is {state}, not stopped"));
        }
    }
    Ok(())
}

/// Returns the paths of a directory's entries; none where the directory does not exist any more.
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
    fn a_wait_ends_when_the_condition_holds() {
        let mut checks = 0;
        let held = wait_for("the third check", || {
            checks += 1;
            checks > 2
        });
        assert!(held.is_ok() && checks == 3, "{checks} checks: {held:?}");
    }

    #[test]
    fn a_wait_returns_what_the_check_found() {
        let mut checks = 0;
        let found = wait_for("the third check", || {
            checks += 1;
            (checks > 2).then_some(checks)
        });
        assert_eq!(found.unwrap(), 3);
    }

    #[test]
    fn a_wait_that_ends_in_vain_says_for_what_and_why() {
        let time = Duration::from_millis(1);
        let vain = wait_at_most::<Result<bool>>(time, "the answer", || Err(anyhow!("no connection")));
        assert_eq!(format!("{:#}", vain.unwrap_err()), "not within 1ms: the answer: no connection");
    }
}
