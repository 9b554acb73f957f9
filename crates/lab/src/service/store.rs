//! On-demand buffers in a lab: each host's store, and programs under `shunt run`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::host::{Family, Host};
use crate::process::Process;

/// The port that stores listen at.
const PORT: u16 = 4600;

/// How programs run under `shunt run`.
#[derive(Debug, Clone, Copy, Default)]
pub struct OnDemand {
    /// malloc stays as it is: buffers begin anywhere in a page.
    pub unaligned: bool,
}

/// The buffer store of one host.
#[derive(Debug)]
pub(super) struct Store(Process);

/// Where a host's programs find it.
fn socket(host: &Host) -> PathBuf {
    host.dir().join("store.sock")
}

impl Store {
    pub(super) fn start(host: &Host, program: &Path) -> Result<Self> {
        let listen = std::net::SocketAddr::new(host.service_address_of(Family::V4)?, PORT);
        let mut command = Command::new(program);
        command.arg("store").arg("--socket").arg(socket(host)).args(["--listen", &listen.to_string()]);
        command.arg("--cgroup").arg(host.cgroup());
        host.serve(command, listen).map(Self)
    }

    pub(super) fn check_running(&mut self) -> Result<()> {
        self.0.check_running()
    }
}

impl OnDemand {
    /// What starts a program on a host: its name and arguments follow.
    pub(super) fn launcher(self, host: &Host, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("run").arg("--store").arg(socket(host));
        if self.unaligned {
            command.arg("--keep-malloc");
        }
        command.arg("--");
        command
    }
}
