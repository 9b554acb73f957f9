//! Resources that a machine can run out of: descriptors and memory of an *agent* (Shunt's daemon), local ports, and
//! room in the *flow table* (a BPF map with the frontend's client connections).

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use anyhow::{Context, Result};

use super::bed::Bed;
use crate::flow_table::FlowTable;
use crate::host::Host;

/// Range of local ports that a lab's hosts use (links.rs).
const PORTS: &str = "20000 60999";
const LAST_PORT: u16 = 60999;

/// Limits an agent to as many descriptors as it has open now.
pub(super) fn take_descriptors(bed: &mut Bed<'_>, host: &Host) -> Result<()> {
    let pid = agent_pid(bed, host)?.context("the agent runs")?;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    limit(pid, &format!("--nofile={open}:"))
}

/// Limits an agent to as much memory as it has now.
pub(super) fn take_memory(bed: &mut Bed<'_>, host: &Host) -> Result<()> {
    let pid = agent_pid(bed, host)?.context("the agent runs")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let data = status.lines().find_map(|line| line.strip_prefix("VmData:")).context("no VmData")?;
    let kib: u64 = data.split_whitespace().next().context("no VmData")?.parse()?;
    limit(pid, &format!("--data={}:", kib << 10))
}

/// Removes the limits of an agent. If the agent has ended, starts it, as a supervisor would.
pub(super) fn give_back(bed: &mut Bed<'_>, host: &Host) -> Result<()> {
    match agent_pid(bed, host)? {
        Some(pid) => {
            // Only soft limits were changed. The hard limit says how far the soft one can be raised again.
            let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
            let open_files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).context("no limit")?;
            let most = open_files.split_whitespace().nth(1).context("no hard limit")?;
            limit(pid, &format!("--nofile={most}:"))?;
            limit(pid, "--data=unlimited:")
        }
        None => bed.service.start_agent(host),
    }
}

/// Process ID of a host's agent; `None` if the agent has ended.
fn agent_pid(bed: &mut Bed<'_>, host: &Host) -> Result<Option<u32>> {
    let Some(process) = bed.service.agent_process(host)? else { return Ok(None) };
    Ok(process.try_wait()?.is_none().then(|| process.pid()))
}

/// Sets a soft limit of a process. The kernel enforces soft limits. `what` is an option of prlimit(1).
fn limit(pid: u32, what: &str) -> Result<()> {
    let status = Command::new("prlimit").args(["--pid", &pid.to_string(), what]).status().context("running prlimit")?;
    anyhow::ensure!(status.success(), "prlimit {what} of process {pid} failed");
    Ok(())
}

/// Leaves a host only one port to connect from. That port is in use as long as the returned listener exists.
pub(super) fn take_ports(host: &Host) -> Result<TcpListener> {
    let listener = host.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, LAST_PORT)))?.context("binding a port")?;
    host.sysctls(&[("ipv4/ip_local_port_range", &format!("{LAST_PORT} {LAST_PORT}"))])?;
    Ok(listener)
}

pub(super) fn give_ports(host: &Host) -> Result<()> {
    host.sysctls(&[("ipv4/ip_local_port_range", PORTS)])
}

/// Fills the frontend's flow table with entries that are never removed for their age.
pub(super) fn fill_flow_table(bed: &Bed<'_>) -> Result<()> {
    FlowTable::of(bed.lab())?.fill()
}

pub(super) fn empty_flow_table(bed: &Bed<'_>) -> Result<()> {
    FlowTable::of(bed.lab())?.empty();
    Ok(())
}
