//! Processes of a service: their kind, their memory, their descriptors.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::host::Host;
use crate::sockets::TcpSocket;

/// Resources of one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProcessUse {
    pub host: String,
    pub kind: &'static str,
    pub pid: i32,
    /// Resident memory without mapped files, in KiB (RssAnon of proc_pid_status(5)).
    pub memory_kib: u64,
    /// Number of descriptors, without those of connections between tiers: nginx keeps a pool of such connections, whose
    /// size changes.
    pub descriptors: u64,
}

impl ProcessUse {
    /// Resources of the service's processes on a host.
    ///
    /// # Errors
    /// When the host cannot be asked.
    pub fn of_host(host: &Host) -> Result<Vec<Self>> {
        let pooled: HashSet<u64> =
            host.tcp_sockets()?.iter().filter(|socket| is_between_tiers(socket)).map(|socket| socket.inode).collect();
        let of = |pid: i32| {
            let directory = format!("/proc/{pid}");
            let directory = Path::new(&directory);
            let (kind, memory_kib) = (kind_of(directory)?, memory_kib(directory)?);
            let descriptors = descriptors(directory, &pooled);
            Some(Self { host: host.name().to_owned(), kind, pid, memory_kib, descriptors })
        };
        Ok(host.pids()?.into_iter().filter_map(of).collect())
    }
}

/// Whether a socket is a connection from one tier's server to the next tier's, which nginx keeps open.
pub(super) fn is_between_tiers(socket: &TcpSocket) -> bool {
    let is_tier = |end: &SocketAddr| match end.ip() {
        IpAddr::V4(ip) => ip.octets()[..3] == [10, 77, 1],
        IpAddr::V6(ip) => ip.segments()[..4] == [0xfd77, 0, 0, 1],
    };
    let ends = [socket.local, socket.remote];
    ends.iter().all(is_tier) && ends.iter().any(|end| end.port() == 80)
}

/// Kind of a process; `None` if it is no part of the service, or has ended.
fn kind_of(process: &Path) -> Option<&'static str> {
    let command = std::fs::read(process.join("cmdline")).ok()?;
    let command = String::from_utf8_lossy(&command);
    let kinds = [("nginx: master", "nginx master"), ("nginx: worker", "nginx worker"), ("shuntd", "shuntd")];
    kinds.into_iter().find(|(part, _)| command.contains(part)).map(|(_, kind)| kind)
}

fn memory_kib(process: &Path) -> Option<u64> {
    let status = std::fs::read_to_string(process.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn descriptors(process: &Path, pooled: &HashSet<u64>) -> u64 {
    let links = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let counted = links.filter(|link| {
        let target = std::fs::read_link(link.path()).unwrap_or_default();
        let inode = target.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        inode.is_none_or(|inode| !pooled.contains(&inode))
    });
    counted.count() as u64
}
