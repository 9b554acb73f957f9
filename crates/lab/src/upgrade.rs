//! nginx's own procedure to replace its running program and modules, on a host of the lab.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shunt_testbed::{PATIENCE, wait_or_fail};

use crate::chain::Chain;
use crate::host::Host;

/// nginx's processes on a host, of one kind, such as `master` or `worker`. An empty `kind` means every kind.
fn servers(host: &Host, kind: &str) -> Result<Vec<Pid>> {
    let of_kind = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|command| String::from_utf8_lossy(&command).starts_with(&format!("nginx: {kind}")))
    };
    Ok(host.pids()?.into_iter().filter(of_kind).filter_map(Pid::from_raw).collect())
}

/// Sends a signal to nginx's processes of one kind on a host.
///
/// # Errors
/// When /proc cannot be read.
pub(crate) fn signal_servers(host: &Host, kind: &str, signal: Signal) -> Result<()> {
    for pid in servers(host, kind)? {
        // The process may have ended meanwhile, so errors are ignored.
        let _ = kill_process(pid, signal);
    }
    Ok(())
}

/// Waits until a host's nginx has a worker. It listens before it names its processes and before it blocks the signals
/// that it waits for (ngx_init_cycle, ngx_master_process_cycle): until then its processes would not be found.
fn until_it_has_a_worker(host: &Host) -> Result<()> {
    wait_or_fail("nginx has its worker", || Ok(!servers(host, "worker")?.is_empty()))
}

/// Restarts a host's nginx as a daemon. nginx ignores SIGUSR2 as long as its parent is the process that started it
/// (ngx_signal_handler).
///
/// # Errors
/// When nginx does not start.
pub fn daemonize(chain: &mut Chain, host: &Host) -> Result<()> {
    let server = chain.process(host.name()).context("the host has a server")?;
    let mut command = Command::new(server.program());
    command.args(server.arguments().map(|argument| argument.replace("daemon off", "daemon on")));
    until_it_has_a_worker(host)?;
    end_servers(host)?;
    let mut launched = host.spawn(command)?;
    let status = launched.wait(PATIENCE)?;
    ensure!(status.success(), "nginx does not become a daemon: {}", launched.log());
    until_it_has_a_worker(host)
}

/// Upgrades nginx as nginx.org describes it ("Upgrading Executable on the Fly"): the old master starts a new one, and
/// is then told to end when its last request has ended.
///
/// # Errors
/// When the new nginx does not start.
pub fn upgrade(host: &Host) -> Result<()> {
    let old = servers(host, "master")?;
    ensure!(old.len() == 1, "{} nginx masters before the upgrade", old.len());
    kill_process(old[0], Signal::USR2).context("telling nginx to upgrade")?;
    wait_or_fail("a second nginx has its worker", || {
        Ok(servers(host, "master")?.len() == 2 && servers(host, "worker")?.len() == 2)
    })?;
    kill_process(old[0], Signal::QUIT).context("telling the old nginx to end")
}

/// Waits until only one nginx is left on a host, because the old one has ended after its last request.
///
/// # Errors
/// When the old nginx does not end.
pub fn until_upgraded(host: &Host) -> Result<()> {
    wait_or_fail("the old nginx has ended", || Ok(servers(host, "master")?.len() == 1))
}

/// Ends every nginx of a host, old and new.
///
/// # Errors
/// When they do not end.
pub fn end_servers(host: &Host) -> Result<()> {
    signal_servers(host, "master", Signal::TERM)?;
    wait_or_fail("nginx has ended", || Ok(servers(host, "")?.is_empty()))
}
