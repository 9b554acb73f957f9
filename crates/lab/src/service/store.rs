//! On-demand buffers in a lab: the hosts' programs run under `shunt run`. A body that such a program writes goes into
//! the *store* of its host's agent (Shunt's daemon), and the next program gets a reference to it in place of the bytes.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::shunt_program;
use crate::host::Host;

/// Options of `shunt run`.
#[derive(Debug, Clone, Copy, Default)]
pub struct OnDemand {
    /// Whether the programs' buffers begin inside a page, and not at its start.
    pub unaligned: bool,
    /// Whether a program is ended if it takes the preloaded library's locks out of order.
    pub checks_locks: bool,
}

/// Socket of a host's store, at which the host's programs find it.
fn socket(host: &Host) -> PathBuf {
    host.dir().join("store.sock")
}

/// The `[store]` section for the configuration of the host's agent.
pub(super) fn section(host: &Host) -> String {
    format!("[store]\nsocket = \"{}\"\nusers = [\"www-data\", \"nobody\"]\n", socket(host).display())
}

impl OnDemand {
    /// Options for tests: the order of locks is checked.
    pub const CHECKED: Self = Self { unaligned: false, checks_locks: true };

    /// Command that starts a program on a host under `shunt run` of this source. The program's name and arguments have
    /// to be appended.
    ///
    /// # Errors
    /// When `shunt` was not built.
    pub fn command(self, host: &Host) -> Result<Command> {
        Ok(self.launcher(host, &shunt_program()?))
    }

    /// Command that starts a program on a host under `shunt run`. `program` is the path of `shunt`. The started
    /// program's name and arguments have to be appended.
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
