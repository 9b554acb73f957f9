//! Captures a port's packets to a file, by tcpdump.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use shunt_testbed::{PATIENCE, is_asleep};

use crate::host::Host;
use crate::process::Process;

/// A running capture.
#[derive(Debug)]
pub struct Tcpdump {
    process: Process,
    file: PathBuf,
}

impl Tcpdump {
    /// Captures packets that cross `device` of `host` and match `filter` (pcap-filter(7)). The file keeps the first 128
    /// bytes of each packet, which have the headers. Returns when the capture has begun.
    ///
    /// # Errors
    /// When tcpdump does not start to listen.
    pub fn start(host: &Host, device: &str, filter: &str) -> Result<Self> {
        Self::start_with(host, device, filter, "128")
    }

    /// Captures like [`Self::start`], with whole packets.
    ///
    /// # Errors
    /// When tcpdump does not start to listen.
    pub fn start_whole(host: &Host, device: &str, filter: &str) -> Result<Self> {
        Self::start_with(host, device, filter, "0")
    }

    fn start_with(host: &Host, device: &str, filter: &str, snap_bytes: &str) -> Result<Self> {
        let file = tempfile::Builder::new().prefix("capture-").suffix(".pcap").tempfile_in(host.dir())?;
        let file = file.into_temp_path().keep().context("keeping the capture's file")?;
        let mut tcpdump = Command::new("tcpdump");
        // The buffer has 64 MiB. `--immediate-mode` lets the kernel deliver each packet when it arrives, so that no
        // packet is left in a block of the buffer at the end.
        tcpdump.args(["-i", device, "-s", snap_bytes, "-B", "65536", "--immediate-mode", "-n", "-Z", "root", "-w"]);
        tcpdump.arg(&file).arg(filter);
        let mut process = host.spawn(tcpdump)?;
        let deadline = Instant::now() + PATIENCE;
        while !process.log().contains("listening on") {
            process.check_running()?;
            if Instant::now() > deadline {
                bail!("{} does not begin to listen", process.name());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { process, file })
    }

    /// Ends the capture when all packets so far are in its file. Returns the file's path.
    ///
    /// # Errors
    /// When packets were lost, or tcpdump failed.
    pub fn stop(self) -> Result<PathBuf> {
        wait_until_idle(self.process.pid())?;
        let log = self.process.log_path().to_owned();
        let status = self.process.stop_with(Signal::INT)?;
        let log = std::fs::read_to_string(log)?;
        let dropped = log.lines().find_map(|line| line.strip_suffix(" packets dropped by kernel")).unwrap_or("0");
        if !status.success() || dropped != "0" {
            bail!("tcpdump lost packets or failed ({status}):\n{log}");
        }
        Ok(self.file)
    }

    /// Path of the file to which the packets are written.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }
}

/// Waits until a process has slept for 60 ms without a break, for [`PATIENCE`] at most. Such a sleep shows that tcpdump
/// has caught up. It is not enough that the process uses no CPU time: a process that waits for a core uses none either,
/// and may still have packets to read.
fn wait_until_idle(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/schedstat");
    let used = || std::fs::read_to_string(&path).with_context(|| format!("reading {path}"));
    let deadline = Instant::now() + PATIENCE;
    let (mut last, mut quiet) = (used()?, 0);
    while quiet < 3 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        let now = used()?;
        quiet = if now == last && is_asleep(pid) { quiet + 1 } else { 0 };
        last = now;
    }
    Ok(())
}
