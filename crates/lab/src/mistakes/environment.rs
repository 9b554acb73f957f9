//! Mistakes with processes and files: agents (Shunt's daemons) that do not run or run twice, sockets, ports, limits of
//! the system.

use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::text::{set, swap};
use super::{Bodies, Mistake, Teller};
use crate::host::Role::{Backend, Frontend};
use crate::lab::Lab;
use crate::process::Process;

/// Ports from which a backend sends bodies to clients: the default of `ports` in shuntd's configuration. The name of a
/// frontend decides which of them is used for its clients.
const SENDER_PORTS: RangeInclusive<u16> = 61000..=61063;

pub(super) fn rows() -> Vec<Mistake> {
    [agents(), files()].concat()
}

/// Mistakes with an agent's process: it does not run, or runs twice.
fn agents() -> Vec<Mistake> {
    vec![
        Mistake::new("agent-ended", "the frontend's agent does not run")
            .after(|running| running.service.kill_agent(running.lab.frontend()))
            .told(Teller::Server(Frontend), &["agent.sock"]),
        Mistake::new("detached", "`shuntd --detach` while the agent runs")
            .after(|running| {
                let frontend = running.lab.frontend();
                running.shuntd(frontend, str::to_owned, &["--detach"])?;
                running.wait_for_others()
            })
            .bodies(Bodies::Shortcut)
            .told(Teller::Agent(Frontend), &["shuntd: ", "stop it first"]),
        Mistake::new("detached-by-another", "`shuntd --detach` with another configuration for the same interface")
            .after(|running| {
                let frontend = running.lab.frontend();
                running.shuntd(frontend, another, &["--detach"])?;
                running.wait_for_others()
            })
            .bodies(Bodies::Shortcut),
        Mistake::new("second-agent", "a second agent is started on the same interface")
            .after(|running| {
                let frontend = running.lab.frontend();
                running.shuntd(frontend, another, &[])?;
                running.wait_for_others()
            })
            .bodies(Bodies::Shortcut)
            .told(Teller::Agent(Frontend), &["client0"]),
        Mistake::new("same-agent-twice", "the agent is started a second time")
            .after(|running| {
                let frontend = running.lab.frontend();
                running.shuntd(frontend, str::to_owned, &[])?;
                running.wait_for_others()
            })
            .bodies(Bodies::Shortcut)
            .told(Teller::Agent(Frontend), &["shuntd: ", "agent"]),
    ]
}

/// Mistakes with files and descriptors.
fn files() -> Vec<Mistake> {
    vec![
        Mistake::new("few-descriptors", "RLIMIT_NOFILE of the backend's agent is 48")
            .after(|running| {
                let backend = running.lab.backend();
                running.service.kill_agent(backend)?;
                // prlimit is started through a symbolic link `shuntd`, so that the log of the program counts as an
                // agent's log.
                let program = backend.dir().join("shuntd");
                std::os::unix::fs::symlink("/usr/bin/prlimit", &program).context("naming prlimit")?;
                let mut command = Command::new(program);
                command.arg("--nofile=48:48").arg(crate::service::shuntd_program()?);
                command.arg("--config").arg(backend.dir().join("shuntd.toml")).env("NO_COLOR", "1");
                running.others.push(backend.spawn(command)?);
                running.service.wait_for_agents()
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Backend), &["LimitNOFILE", "limit=48"]),
        Mistake::new("file-replaced", "files are replaced by others of the same bytes while clients download")
            .during(|running| {
                let files = running.lab.dir().join("files");
                for entry in std::fs::read_dir(&files)? {
                    let (old, new) = (entry?.path(), files.join("new"));
                    std::fs::copy(&old, &new)?;
                    std::fs::rename(&new, &old)?;
                }
                Ok(())
            })
            .bodies(Bodies::Shortcut),
    ]
}

/// Configuration of a second agent beside the first, with another socket, another address, and another directory of
/// pinned BPF maps.
fn another(text: &str) -> String {
    let text = swap(text, "agent.sock", "another.sock");
    let text = swap(&text, "10.77.1.1:7440", "10.77.1.1:7450");
    let pins = super::text::value(&text, "pins").to_owned() + "-another";
    set(&text, "pins", &format!("\"{pins}\""))
}

impl super::Running<'_> {
    /// Waits until each process beside the service has ended. Fails if one still runs after 60 seconds, because it
    /// should have been refused.
    fn wait_for_others(&mut self) -> Result<()> {
        for other in &mut self.others {
            let ended = other.wait(std::time::Duration::from_secs(60));
            ensure!(ended.is_ok(), "the agent runs in place of ending with an error:\n{}", other.log());
        }
        Ok(())
    }
}

/// Lets every user reach the agents' sockets.
pub(super) fn open_way(lab: &Lab) -> Result<()> {
    for host in lab.tiers() {
        for directory in host.dir().ancestors().take_while(|directory| directory.starts_with(lab.dir())) {
            let mode = std::fs::metadata(directory)?.permissions().mode() | 0o011;
            std::fs::set_permissions(directory, PermissionsExt::from_mode(mode))?;
        }
    }
    Ok(())
}

/// Starts, on the backend, a program that listens at all ports from which the backend sends bodies to clients.
pub(super) fn take_sender_ports(lab: &Lab) -> Result<Vec<Process>> {
    let (first, last) = (SENDER_PORTS.start(), SENDER_PORTS.end());
    let script = format!(
        "import socket, time\nall = [socket.create_server(('', port)) for port in range({first}, {last} + 1)]\ntime.sleep(3600)\n"
    );
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", &script]);
    Ok(vec![lab.backend().serve(command, ([0, 0, 0, 0], *last).into())?])
}
