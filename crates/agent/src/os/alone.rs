//! Lock on a directory of pins (BPF programs and maps, as files in bpffs; flock(2)), which an agent holds for as long
//! as it lives: one agent at a time uses the directory.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use shunt_handoff::pins;

use crate::os::holder::holder;
use crate::steering::SteerError;

/// Time that an agent may take to end after it is told to.
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

    /// Tells the agent that uses these pins to end at once, and then takes the lock as [`Self::with`] does.
    ///
    /// # Errors
    /// Returns the errors of [`Self::with`], and [`SteerError::Running`] if that agent has not ended.
    pub fn after_stopping(pins: &Path) -> Result<Self, SteerError> {
        let deadline = Instant::now() + PATIENCE;
        let mut told = 0;
        loop {
            match Self::with(pins) {
                // The first signal makes the agent drain, and the second ends the drain.
                Err(SteerError::Running { by: Some(process), .. }) if told < 2 => {
                    tell_to_end(pins, process)
                        .map_err(|error| SteerError::Host { what: "stopping an agent", error })?;
                    told += 1;
                }
                Err(SteerError::Running { .. }) if Instant::now() < deadline => {}
                other => return other,
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Sends SIGTERM to a process, if it still holds the lock.
fn tell_to_end(pins: &Path, process: i32) -> io::Result<()> {
    let Some(pid) = Pid::from_raw(process) else { return Ok(()) };
    let Ok(agent) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    if holder(pins) == Some(process) { Ok(pidfd_send_signal(agent, Signal::TERM)?) } else { Ok(()) }
}
