//! A server or a load that runs in a host.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use shunt_testbed::PATIENCE;

/// Number of lines that are shown of a log's end: enough for a panic with its place, or an error with its causes.
const LOG_END_LINES: usize = 12;

/// A child process in its own process group. Dropping it kills the whole group.
#[derive(Debug)]
pub struct Process {
    name: String,
    /// Command with which the child was started, to start it again.
    command: Command,
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    pub(crate) fn start(
        name: String,
        log: PathBuf,
        spawn: impl FnOnce(&mut Command) -> Result<std::io::Result<Child>>,
        mut command: Command,
    ) -> Result<Self> {
        // The child gets its own group, so that Ctrl-C at a terminal reaches only the lab. The lab ends its children in
        // order.
        command.process_group(0);
        let child = spawn(&mut command)?.with_context(|| format!("starting {command:?} as {name}"))?;
        Ok(Self { name, command, child, log, ended: None })
    }

    /// Names of the program and the host, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn program(&self) -> &OsStr {
        self.command.get_program()
    }

    pub(crate) fn arguments(&self) -> impl Iterator<Item = String> {
        self.command.get_args().map(|argument| argument.to_string_lossy().into_owned())
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// File to which the process writes its output.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Everything that the process has written to its output so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Last lines of the process's log, indented.
    pub(crate) fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_END_LINES)..].iter().map(|line| format!("  {line}\n")).collect()
    }

    /// Exit status of the process; `None` while it runs.
    ///
    /// # Errors
    /// Returns the error of waitpid(2).
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits until the process ends by itself.
    ///
    /// # Errors
    /// When the process does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} still runs after {limit:?}", self.name);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Fails with the end of the log if the process has ended.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        if let Some(status) = self.try_wait()? {
            bail!("{} ended ({status}); its log ends:\n{}", self.name, self.log_end());
        }
        Ok(())
    }

    /// Sends a signal to the process group. After SIGSTOP, waits until the whole group has stopped.
    ///
    /// # Errors
    /// When the group does not stop.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        // After the leader has been reaped, the group's number may belong to another group.
        if self.ended.is_none()
            && let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process_group(group, signal);
            if signal == Signal::STOP {
                shunt_testbed::until_group_stopped(self.child.id())?;
            }
        }
        Ok(())
    }

    /// Kills the process if it has not ended, and starts it again. Its log continues.
    pub(crate) fn start_again(
        &mut self,
        spawn: impl FnOnce(&mut Command) -> Result<std::io::Result<Child>>,
    ) -> Result<()> {
        if self.ended.is_none() {
            self.kill()?;
        }
        self.child = spawn(&mut self.command)?.with_context(|| format!("starting {} again", self.name))?;
        self.ended = None;
        Ok(())
    }

    /// Asks the process to end (SIGTERM) and waits. Kills it if it has not ended after 5 seconds.
    ///
    /// # Errors
    /// Returns the error of waitpid(2).
    pub fn stop(self) -> Result<ExitStatus> {
        self.stop_with(Signal::TERM)
    }

    /// Stops the process like [`Self::stop`], with another signal: on SIGQUIT nginx finishes its requests, on SIGINT
    /// tcpdump finishes its file.
    ///
    /// # Errors
    /// Returns the error of waitpid(2).
    pub fn stop_with(mut self, signal: Signal) -> Result<ExitStatus> {
        self.signal(signal)?;
        if let Ok(status) = self.wait(Duration::from_secs(5)) {
            return Ok(status);
        }
        self.kill()
    }

    fn kill(&mut self) -> Result<ExitStatus> {
        self.try_wait()?;
        self.signal(Signal::KILL)?;
        self.wait(PATIENCE)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = self.kill();
        }
    }
}
