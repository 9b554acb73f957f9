//! A load, and what it cost. The *measured core* runs the hosts whose CPU time is measured.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::lab::Lab;
use crate::meter::{ByteMeter, Bytes, CpuMeter, CpuUse};
use crate::rate::Rate;
use crate::wrk::{Wrk, WrkReport};

/// Cost of a closed-loop load (each connection waits for an answer before it asks again): time of the measured core,
/// and bytes on every tier's ports.
#[derive(Debug, Clone)]
pub struct Cost {
    pub report: WrkReport,
    pub cpu: CpuUse,
    /// Bytes and packets by the tier's name, summed over the tier's ports.
    pub bytes: BTreeMap<String, Bytes>,
}

impl Cost {
    /// Runs the load from the lab's first client, with the lab's present placement.
    ///
    /// # Errors
    /// When wrk fails, or an answer was an error: a broken service is not measured.
    pub fn of(lab: &Lab, load: &Wrk) -> Result<Self> {
        let meters = lab.tiers().map(|tier| Ok((tier.name(), ByteMeter::start(tier)?))).collect::<Result<Vec<_>>>()?;
        let cpu = CpuMeter::start(lab.cores().measured)?;
        let report = load.run(lab.client())?;
        let cpu = cpu.read()?;
        let WrkReport { socket_errors, status_errors, requests, .. } = report;
        ensure!(
            report.errors() == 0,
            "wrk got {requests} answers, {socket_errors} broken or late connections and {status_errors} error statuses"
        );
        ensure!(report.requests > 0, "no response came");
        let bytes = meters.iter().map(|(tier, meter)| Ok(((*tier).to_owned(), meter.total()?)));
        Ok(Self { cpu, bytes: bytes.collect::<Result<_>>()?, report })
    }

    /// Microseconds of the measured core per response, less what the core does without a load.
    #[must_use]
    pub fn microseconds(&self, background: &Background) -> f64 {
        background.without(&self.cpu) / self.report.requests as f64
    }

    /// Bytes in and out of a tier's ports, per response.
    #[must_use]
    pub fn tier_bytes(&self, tier: &str) -> f64 {
        self.bytes.get(tier).map_or(0, Bytes::total_bytes) as f64 / self.report.requests as f64
    }

    /// Responses per second if the load had the measured core to itself.
    #[must_use]
    pub fn responses_per_core_second(&self, background: &Background) -> f64 {
        1e6 / self.microseconds(background)
    }
}

/// Cost of a load at a constant rate: time of the measured core.
#[derive(Debug, Clone, Copy)]
pub struct RateCost {
    cpu: CpuUse,
    /// Number of responses, including the warm-up.
    responses: f64,
}

impl RateCost {
    /// Runs the load from the lab's first client, with the lab's present placement.
    ///
    /// # Errors
    /// When an answer was an error, or did not come.
    pub fn of(lab: &Lab, load: &Rate) -> Result<Self> {
        let cpu = CpuMeter::start(lab.cores().measured)?;
        let report = load.run(lab.client())?;
        let cpu = cpu.read()?;
        report.check()?;
        Ok(Self { cpu, responses: load.requests() })
    }

    /// Microseconds of the measured core per response, less what the core does without a load.
    #[must_use]
    pub fn microseconds(&self, background: &Background) -> f64 {
        background.without(&self.cpu) / self.responses
    }
}

/// Largest background with which figures can be trusted, as a fraction of the core.
const QUIET: f64 = 0.05;

/// Fraction of the measured core that is busy without a load, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Background(pub f64);

impl Background {
    /// Measures for `time` how busy the core is.
    ///
    /// # Errors
    /// When /proc does not show the times.
    pub fn measure(core: usize, time: Duration) -> Result<Self> {
        let meter = CpuMeter::start(core)?;
        std::thread::sleep(time);
        Ok(Self(meter.read()?.fraction()))
    }

    /// Waits until the core is quiet, for about `limit` at most. Each measurement takes `time`. Returns the last
    /// measured background. Waiting is needed because other work that competes with a load cannot be subtracted.
    ///
    /// # Errors
    /// When /proc does not show the times.
    pub fn settle(core: usize, time: Duration, limit: Duration) -> Result<Self> {
        let deadline = Instant::now() + limit;
        loop {
            let background = Self::measure(core, time)?;
            if background.is_quiet() || Instant::now() > deadline {
                return Ok(background);
            }
        }
    }

    /// Microseconds of a core's work during a load, less the work that the core does without a load.
    fn without(self, cpu: &CpuUse) -> f64 {
        // At most QUIET is subtracted. A background above QUIET is due to another load, which gets less of the core
        // while ours runs.
        let idle_work = cpu.wall.mul_f64(self.0.min(QUIET));
        cpu.busy.saturating_sub(idle_work).as_secs_f64() * 1e6
    }

    /// Whether figures that are measured with this background can be trusted.
    #[must_use]
    pub fn is_quiet(self) -> bool {
        self.0 <= QUIET
    }
}
