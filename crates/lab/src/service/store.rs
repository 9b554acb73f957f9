//! On-demand buffers in a lab: each host's agent has a store, and programs run under `shunt run`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::shunt_program;
use crate::host::Host;

/// How programs run under `shunt run`.
#[derive(Debug, Clone, Copy, Default)]
pub struct OnDemand {
    /// Their buffers begin elsewhere than at a page.
    pub unaligned: bool,
    /// A program ends that takes the library's locks out of their order.
    pub checks_locks: bool,
}

/// Where a host's programs find its store.
fn socket(host: &Host) -> PathBuf {
    host.dir().join("store.sock")
}

/// What the host's agent is told.
pub(super) fn section(host: &Host) -> String {
    format!("[store]\nsocket = \"{}\"\nusers = [\"www-data\", \"nobody\"]\n", socket(host).display())
}

impl OnDemand {
    /// As in tests.
    pub const CHECKED: Self = Self { unaligned: false, checks_locks: true };

    /// The same, with the program that was built.
    ///
    /// # Errors
    /// When it is not.
    pub fn command(self, host: &Host) -> Result<Command> {
        Ok(self.launcher(host, &shunt_program()?))
    }

    /// What starts a program on a host: its name and arguments follow.
    pub(super) fn launcher(self, host: &Host, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("run").arg("--store").arg(socket(host));
        if self.unaligned {
            command.arg("--unaligned");
        }
        if self.checks_locks {
            command.arg("--check-locks");
        }
        command.arg("--");
        command
    }
}
