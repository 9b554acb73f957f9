//! The file system that BPF objects are pinned in, which not every machine mounts when it starts.

use std::io;
use std::process::Command;

/// Where BPF objects are pinned.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Mounts a BPF file system at [`BPFFS`], where none is.
///
/// # Errors
/// When the mounts cannot be read, or mount(8) fails: it needs root.
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
