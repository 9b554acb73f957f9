//! The file system in which BPF objects are pinned. Not every machine mounts it at boot.

use std::io;
use std::process::Command;

/// Directory in which BPF objects are pinned.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Mounts a BPF file system at [`BPFFS`], if none is mounted there.
///
/// # Errors
/// When the list of mounts cannot be read, or mount(8) fails. Mounting needs root.
pub fn mount_bpffs() -> io::Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    if mounts.lines().any(|line| line.split(' ').nth(1) == Some(BPFFS)) {
        return Ok(());
    }
    let status = Command::new("mount").args(["-t", "bpf", "bpf", BPFFS]).status()?;
    if !status.success() {
        return Err(io::Error::other(format!("`mount -t bpf bpf {BPFFS}` failed: {status}")));
    }
    Ok(())
}
