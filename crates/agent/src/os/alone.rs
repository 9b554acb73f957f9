//! Lock (flock(2)) on a directory of pins, which are BPF programs and maps as files in bpffs. An agent holds the lock
//! for as long as it lives, so only one agent at a time uses the directory.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use shunt_handoff::pins;
use shunt_host::holder::holder;

use crate::steering::SteerError;

/// Time that an agent may take to end after it is told to, and then again after it is killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Proof that no other agent uses these pins.
#[derive(Debug)]
pub struct Alone(#[expect(dead_code, reason = "the lock is held as long as this descriptor is open")] File);

impl Alone {
    /// Makes the directory if it is missing, and locks it for this process.
    ///
    /// # Errors
    /// Returns [`SteerError::Running`] if another agent has the lock, or the kernel's error.
    pub fn with(pins: &Path) -> Result<Self, SteerError> {
        pins::prepare(pins)?;
        let host = |what| move |error| SteerError::Host { what, error };
        // Only its owner may open the directory, because a process that can open it could lock it.
        let is_private = std::fs::set_permissions(pins, Permissions::from_mode(0o700));
        is_private.map_err(host(
            "making `pins` private (start the agent as root, or with the capabilities that docs/shuntd.md lists)",
        ))?;
        let directory = File::open(pins).map_err(host("opening `pins`"))?;
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self(directory)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(SteerError::Running { pins: pins.into(), by: holder(pins) }),
            Err(errno) => Err(host("locking `pins`")(errno.into())),
        }
    }

    /// Tells the agent that uses these pins to end at once, and then takes the lock as [`Self::with`] does. Kills an
    /// agent that does not end, for example because it is stopped.
    ///
    /// # Errors
    /// Returns the errors of [`Self::with`], and [`SteerError::Stays`] if that agent has not ended.
    pub fn after_stopping(pins: &Path) -> Result<Self, SteerError> {
        // The first SIGTERM makes the agent drain, and the second ends the drain.
        let told = [Signal::TERM, Signal::TERM];
        Self::after(&told, pins, PATIENCE).or_else(|error| match error {
            SteerError::Stays { process: Some(process), .. } => {
                tracing::warn!(process, "the agent does not end after SIGTERM, and is killed");
                Self::after(&[Signal::KILL], pins, PATIENCE)
            }
            other => Err(other),
        })
    }

    /// Sends these signals, one after the other, to the agent that uses these pins. Waits until that agent has ended,
    /// for `patience` at most, and takes the lock.
    fn after(signals: &[Signal], pins: &Path, patience: Duration) -> Result<Self, SteerError> {
        let deadline = Instant::now() + patience;
        let mut signals = signals.iter();
        loop {
            match Self::with(pins) {
                Err(SteerError::Running { by, .. }) => {
                    if Instant::now() >= deadline {
                        return Err(SteerError::Stays { process: by, pins: pins.into() });
                    }
                    if let Some((process, signal)) = by.zip(signals.next()) {
                        send(*signal, pins, process)
                            .map_err(|error| SteerError::Host { what: "stopping an agent", error })?;
                    }
                }
                other => return other,
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Sends a signal to a process, if it still holds the lock.
fn send(signal: Signal, pins: &Path, process: i32) -> io::Result<()> {
    let Some(pid) = Pid::from_raw(process) else { return Ok(()) };
    let Ok(agent) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    if holder(pins) == Some(process) { Ok(pidfd_send_signal(agent, signal)?) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Signal, kill_process};

    use super::*;

    #[test]
    fn an_agent_that_is_stopped_is_killed_after_a_while() {
        shunt_testbed::needs_root();
        let pins = Path::new("/sys/fs/bpf").join(format!("shunt-alone-{}", std::process::id()));
        std::fs::create_dir(&pins).unwrap();
        let mut agent = Command::new("flock").args(["--no-fork"]).arg(&pins).args(["sleep", "600"]).spawn().unwrap();
        let process = agent.id().cast_signed();
        shunt_testbed::wait_for("the agent has the lock", || holder(&pins) == Some(process)).unwrap();
        kill_process(Pid::from_child(&agent), Signal::STOP).unwrap();
        shunt_testbed::until_stopped(agent.id()).unwrap();
        let stays = Alone::after(&[Signal::TERM], &pins, Duration::from_millis(300)).unwrap_err();
        assert!(stays.to_string().contains(&format!("end it by `kill -KILL {process}`")), "{stays}");
        let ended = Alone::after(&[Signal::KILL], &pins, PATIENCE);
        agent.wait().unwrap();
        std::fs::remove_dir(&pins).unwrap();
        ended.unwrap();
    }
}
