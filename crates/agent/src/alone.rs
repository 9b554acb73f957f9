//! One agent works with a directory of pinned maps at a time: it holds a lock on it (flock(2)) for as long as it lives.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use procfs::LockType;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use shunt_handoff::pins;

use crate::config::Config;
use crate::detach;
use crate::steer::SteerError;

/// How long an agent may take to end when it is told to twice.
const PATIENCE: Duration = Duration::from_secs(10);

/// No other agent works with these pins.
#[derive(Debug)]
pub struct Alone(#[expect(dead_code, reason = "its descriptor is the lock")] File);

impl Alone {
    /// Makes the directory where it is missing, and keeps it for this process alone.
    ///
    /// # Errors
    /// [`SteerError::Running`], or the kernel's.
    pub fn with(pins: &Path) -> Result<Self, SteerError> {
        pins::prepare(pins)?;
        let host = |what| move |error| SteerError::Host { what, error };
        // Whoever can open it could lock it.
        let is_private = std::fs::set_permissions(pins, Permissions::from_mode(0o700));
        is_private.map_err(host(
            "making `pins` private (start the agent as root, or with the capabilities of docs/shuntd.md)",
        ))?;
        let directory = File::open(pins).map_err(host("opening `pins`"))?;
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self(directory)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(SteerError::Running { pins: pins.into(), by: holder(pins) }),
            Err(errno) => Err(host("locking `pins`")(errno.into())),
        }
    }

    /// The same, after the agent that works with them was told to end at once.
    ///
    /// # Errors
    /// As [`Self::with`], where it has not ended.
    pub fn after_stopping(pins: &Path) -> Result<Self, SteerError> {
        let deadline = Instant::now() + PATIENCE;
        let mut told = 0;
        loop {
            match Self::with(pins) {
                // The first signal makes it drain, the second ends that.
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

/// SIGTERM, if the process still is who holds the lock.
fn tell_to_end(pins: &Path, process: i32) -> io::Result<()> {
    let Some(pid) = Pid::from_raw(process) else { return Ok(()) };
    let Ok(agent) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    if holder(pins) == Some(process) { Ok(pidfd_send_signal(agent, Signal::TERM)?) } else { Ok(()) }
}

/// A start that has not worked yet. Where nothing was pinned before, it takes back what it has put into the kernel.
pub(crate) struct Beginning<'config> {
    config: &'config Config,
    takes_back: bool,
}

impl<'config> Beginning<'config> {
    /// The start of an agent that is alone with its pins.
    pub(crate) fn of(config: &'config Config) -> Self {
        let is_first = std::fs::read_dir(&config.pins).is_ok_and(|mut pinned| pinned.next().is_none());
        Self { config, takes_back: is_first }
    }

    pub(crate) fn has_worked(mut self) {
        self.takes_back = false;
    }
}

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        if self.takes_back
            && let Err(error) = detach::everything(self.config)
        {
            tracing::warn!(%error, "what this start has put into the kernel stays: run `shuntd --detach`");
        }
    }
}

/// The process that works with these pins, as far as the kernel tells.
pub fn holder(pins: &Path) -> Option<i32> {
    let inode = std::fs::metadata(pins).ok()?.ino();
    let device = std::fs::metadata(pins).ok()?.dev();
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    let locks = procfs::locks().ok()?;
    let found = locks
        .into_iter()
        .find(|lock| lock.lock_type == LockType::FLock && lock.inode == inode && (lock.devmaj, lock.devmin) == device);
    found?.pid.filter(|pid| *pid > 0)
}

/// For an operator.
pub fn by(process: Option<i32>) -> String {
    process.map(|process| format!(" (process {process})")).unwrap_or_default()
}

/// Whether the agent of these pins runs, and as which process.
pub fn running(pins: Option<&PathBuf>) -> String {
    pins.and_then(|pins| holder(pins)).map(|process| format!("; it runs as process {process}")).unwrap_or_default()
}
