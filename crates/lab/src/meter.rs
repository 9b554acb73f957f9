//! Meters for the cost of a run: one core's busy time, an interface's bytes and packets.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::host::Host;

/// Busy time of a core during a span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuUse {
    pub wall: Duration,
    /// Time that was neither idle nor taken by the hypervisor.
    pub busy: Duration,
    /// Time that the hypervisor gave to others while this core had work, in steps of 10 ms.
    pub steal: Duration,
}

impl CpuUse {
    /// Busy fraction of the time that the core really had, 0 to 1.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        self.busy.as_secs_f64() / self.wall.saturating_sub(self.steal).as_secs_f64().max(1e-9)
    }

    /// Busy time per piece of work, in microseconds.
    #[must_use]
    pub fn microseconds_per(&self, count: u64) -> f64 {
        self.busy.as_secs_f64() * 1e6 / (count.max(1) as f64)
    }
}

/// Measures the busy time of one core.
///
/// A kernel that accounts CPU time by sampling (CONFIG_TICK_CPU_ACCOUNTING) misses short work. But the *idle* time of a
/// tickless core is measured in nanoseconds, without interrupts in the idle loop. Busy time is the wall time less the
/// idle time and the time that the hypervisor gave to others. The idle time comes from `/proc/timer_list`, read on the
/// measured core: the core is then not idle, so its idle time is complete.
#[derive(Debug)]
pub struct CpuMeter {
    core: usize,
    start: Snapshot,
}

#[derive(Debug, Clone, Copy)]
struct Snapshot {
    now_ns: u64,
    idle_ns: u64,
    steal_ns: u64,
}

impl CpuMeter {
    /// Begins to measure `core`.
    ///
    /// # Errors
    /// When /proc does not show the times (that needs root).
    pub fn start(core: usize) -> Result<Self> {
        Ok(Self { core, start: Snapshot::take(core)? })
    }

    /// Use of the core since the start.
    ///
    /// # Errors
    /// When /proc does not show the times.
    pub fn read(&self) -> Result<CpuUse> {
        let end = Snapshot::take(self.core)?;
        Ok(end.since(&self.start))
    }
}

impl Snapshot {
    fn take(core: usize) -> Result<Self> {
        let read = || -> Result<Self> {
            let mut set = CpuSet::new();
            set.set(core);
            sched_setaffinity(None, &set).with_context(|| format!("moving to core {core}"))?;
            let timers = std::fs::read_to_string("/proc/timer_list").context("reading /proc/timer_list")?;
            let stat = std::fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
            let (now_ns, idle_ns) = idle(&timers, core).context("/proc/timer_list shows no idle time")?;
            let steal_ns = steal(&stat, core).context("/proc/stat shows no steal time")?;
            Ok(Self { now_ns, idle_ns, steal_ns })
        };
        std::thread::scope(|scope| scope.spawn(read).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }

    fn since(&self, start: &Self) -> CpuUse {
        let wall = self.now_ns.saturating_sub(start.now_ns);
        let steal = self.steal_ns.saturating_sub(start.steal_ns);
        let busy = wall.saturating_sub(self.idle_ns.saturating_sub(start.idle_ns)).saturating_sub(steal);
        CpuUse {
            wall: Duration::from_nanos(wall),
            busy: Duration::from_nanos(busy),
            steal: Duration::from_nanos(steal),
        }
    }
}

/// Time at which a timer list was made, and a core's idle time until then, including waits for a disk. Both are in
/// nanoseconds.
fn idle(timers: &str, core: usize) -> Option<(u64, u64)> {
    let number = |text: &str| text.trim().trim_end_matches("nsecs").trim().parse::<u64>().ok();
    let now = timers.lines().find_map(|line| line.strip_prefix("now at "))?;
    let heading = format!("cpu: {core}");
    let section =
        timers.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| !line.starts_with("cpu: "));
    let mut idle = None;
    for line in section {
        if let Some((".idle_sleeptime" | ".iowait_sleeptime", value)) =
            line.split_once(':').map(|(name, value)| (name.trim(), value))
        {
            idle = Some(idle.unwrap_or(0) + number(value)?);
        }
    }
    Some((number(now)?, idle?))
}

/// Stolen time of a core in nanoseconds: the eighth number of the core's line, which counts ticks of 10 ms (USER_HZ).
fn steal(stat: &str, core: usize) -> Option<u64> {
    let name = format!("cpu{core}");
    let line = stat.lines().find(|line| line.split_whitespace().next() == Some(&name))?;
    line.split_whitespace().nth(8)?.parse::<u64>().ok().map(|ticks| ticks * 10_000_000)
}

/// Bytes and packets that crossed a port. On [`crate::Wire::Tso`] a packet is up to 64 KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    pub rx_bytes: u64,
    pub rx_packets: u64,
    pub tx_bytes: u64,
    pub tx_packets: u64,
    /// Packets dropped while receiving or sending.
    pub dropped: u64,
}

impl Bytes {
    fn read(host: &Host, device: &str) -> Result<Self> {
        let of = |counter: &str| host.sysfs_number(&format!("class/net/{device}/statistics/{counter}"));
        Ok(Self {
            rx_bytes: of("rx_bytes")?,
            rx_packets: of("rx_packets")?,
            tx_bytes: of("tx_bytes")?,
            tx_packets: of("tx_packets")?,
            dropped: of("rx_dropped")? + of("tx_dropped")?,
        })
    }

    fn since(self, start: Self) -> Self {
        Self {
            rx_bytes: self.rx_bytes - start.rx_bytes,
            rx_packets: self.rx_packets - start.rx_packets,
            tx_bytes: self.tx_bytes - start.tx_bytes,
            tx_packets: self.tx_packets - start.tx_packets,
            dropped: self.dropped - start.dropped,
        }
    }

    /// Bytes in both directions.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.rx_bytes + self.tx_bytes
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            rx_bytes: self.rx_bytes + other.rx_bytes,
            rx_packets: self.rx_packets + other.rx_packets,
            tx_bytes: self.tx_bytes + other.tx_bytes,
            tx_packets: self.tx_packets + other.tx_packets,
            dropped: self.dropped + other.dropped,
        }
    }
}

/// Meter for the ports of a host.
#[derive(Debug)]
pub struct ByteMeter<'a> {
    host: &'a Host,
    start: BTreeMap<String, Bytes>,
}

impl<'a> ByteMeter<'a> {
    /// Begins to measure every port of `host`.
    ///
    /// # Errors
    /// When sysfs does not show the counters.
    pub fn start(host: &'a Host) -> Result<Self> {
        Ok(Self { host, start: Self::counters(host)? })
    }

    /// Bytes and packets of each port since the start, by device.
    ///
    /// # Errors
    /// When sysfs does not show the counters.
    pub fn read(&self) -> Result<BTreeMap<String, Bytes>> {
        let mut counters = Self::counters(self.host)?;
        for (device, bytes) in &mut counters {
            *bytes = bytes.since(self.start.get(device).copied().unwrap_or_default());
        }
        Ok(counters)
    }

    /// Sum over the host's ports since the start.
    ///
    /// # Errors
    /// When sysfs does not show the counters.
    pub fn total(&self) -> Result<Bytes> {
        Ok(self.read()?.into_values().fold(Bytes::default(), std::ops::Add::add))
    }

    fn counters(host: &Host) -> Result<BTreeMap<String, Bytes>> {
        host.ports().iter().map(|port| Ok((port.device.clone(), Bytes::read(host, &port.device)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_the_asked_core() {
        let timers = "Timer List Version: v0.10\nnow at 1000 nsecs\n\ncpu: 0\n  .idle_sleeptime : 5 nsecs\n  \
                      .iowait_sleeptime: 1 nsecs\ncpu: 1\n  .idle_sleeptime : 700 nsecs\n  .iowait_sleeptime: 30 nsecs\n";
        assert_eq!(idle(timers, 0), Some((1000, 6)));
        assert_eq!(idle(timers, 1), Some((1000, 730)));
        assert_eq!(idle(timers, 2), None);
    }

    #[test]
    fn steal_is_the_eighth_number() {
        let stat = "cpu  1 2 3 4 5 6 7 99 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu10 1 2 3 4 5 6 7 9 0 0\n";
        assert_eq!(steal(stat, 0), Some(80_000_000));
        assert_eq!(steal(stat, 1), None);
    }

    #[test]
    fn busy_time_is_neither_idle_nor_stolen() {
        let start = Snapshot { now_ns: 0, idle_ns: 0, steal_ns: 0 };
        let end = Snapshot { now_ns: 1000, idle_ns: 300, steal_ns: 100 };
        let used = end.since(&start);
        assert_eq!((used.busy.as_nanos(), used.steal.as_nanos()), (600, 100));
        assert!((used.fraction() - 600.0 / 900.0).abs() < 1e-9);
    }
}
