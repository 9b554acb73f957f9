//! Waits for conditions: each has a deadline for machines that are busy with other things, and none a fixed length.

use std::time::{Duration, Instant};

/// Deadline for conditions that hold within a second or so on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks until `look` succeeds, and returns what it found.
///
/// # Errors
/// That of the last look, once [`PATIENCE`] has passed.
pub fn eventually<T, E>(mut look: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = look();
        if found.is_ok() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Waits until a process that was sent SIGSTOP has stopped: its other threads go on until one of them has taken the signal.
/// One that ends meanwhile counts as stopped.
///
/// # Errors
/// It has not within [`PATIENCE`].
pub fn until_stopped(pid: u32) -> std::io::Result<()> {
    eventually(|| {
        let running = threads(pid).into_iter().find(|(_, state)| !matches!(state, 'T' | 't' | 'Z' | 'X'));
        running.map_or(Ok(()), |(thread, state)| {
            Err(std::io::Error::other(format!("thread {thread} of process {pid} is {state:?}, not stopped")))
        })
    })
}

/// A process's threads, and the state of each (proc(5), `stat`).
fn threads(pid: u32) -> Vec<(String, char)> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let state = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let state = stat.rsplit(") ").next()?.chars().next()?;
        Some((entry.file_name().to_string_lossy().into_owned(), state))
    };
    entries.filter_map(state).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_stopped_when_its_state_says_so() {
        let mut sleeps = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&sleeps);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        until_stopped(sleeps.id()).unwrap();
        assert!(threads(sleeps.id()).iter().all(|(_, state)| *state == 'T'));
        sleeps.kill().unwrap();
        sleeps.wait().unwrap();
        until_stopped(sleeps.id()).unwrap();
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
