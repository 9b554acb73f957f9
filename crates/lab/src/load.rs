//! A load together with what it cost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::lab::Lab;
use crate::meter::{ByteMeter, Bytes, CpuMeter, CpuUse};
use crate::rate::Rate;
use crate::wrk::{Wrk, WrkReport};

/// What a closed-loop load cost the measured core and every tier's ports.
#[derive(Debug, Clone)]
pub struct Cost {
    pub report: WrkReport,
    pub cpu: CpuUse,
    /// By tier, all its ports.
    pub bytes: BTreeMap<String, Bytes>,
}

impl Cost {
    /// Runs the load from the lab's first client, with the lab placed as it is.
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
            "beside {requests} answers wrk saw {socket_errors} broken or late connections and {status_errors} error statuses"
        );
        ensure!(report.requests > 0, "no answer came");
        let bytes = meters.iter().map(|(tier, meter)| Ok(((*tier).to_owned(), meter.total()?)));
        Ok(Self { cpu, bytes: bytes.collect::<Result<_>>()?, report })
    }

    /// Microseconds of the measured core for one response, less what the core does when there is no load.
    #[must_use]
    pub fn microseconds(&self, background: &Background) -> f64 {
        background.without(&self.cpu) / self.report.requests as f64
    }

    /// Bytes in and out of a tier's ports for one response.
    #[must_use]
    pub fn tier_bytes(&self, tier: &str) -> f64 {
        self.bytes.get(tier).map_or(0, Bytes::total_bytes) as f64 / self.report.requests as f64
    }

    /// Responses a second if the measured core were all the load's.
    #[must_use]
    pub fn responses_per_core_second(&self, background: &Background) -> f64 {
        1e6 / self.microseconds(background)
    }
}

/// What a load at a constant rate cost the measured core.
#[derive(Debug, Clone, Copy)]
pub struct RateCost {
    cpu: CpuUse,
    /// Responses, the warm-up's too.
    responses: f64,
}

impl RateCost {
    /// Runs the load from the lab's first client, with the lab placed as it is.
    ///
    /// # Errors
    /// When an answer was an error or none.
    pub fn of(lab: &Lab, load: &Rate) -> Result<Self> {
        let cpu = CpuMeter::start(lab.cores().measured)?;
        let report = load.run(lab.client())?;
        let cpu = cpu.read()?;
        report.check()?;
        Ok(Self { cpu, responses: load.requests() })
    }

    /// See [`Cost::microseconds`].
    #[must_use]
    pub fn microseconds(&self, background: &Background) -> f64 {
        background.without(&self.cpu) / self.responses
    }
}

/// The most that may be going on beside a measurement.
const QUIET: f64 = 0.05;

/// The part of the measured core that is busy without a load, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Background(pub f64);

impl Background {
    /// Watches the core for a while.
    ///
    /// # Errors
    /// When /proc does not show the times.
    pub fn measure(core: usize, time: Duration) -> Result<Self> {
        let meter = CpuMeter::start(core)?;
        std::thread::sleep(time);
        Ok(Self(meter.read()?.fraction()))
    }

    /// Waits until the core is quiet, for at most `limit`, and returns what it was at last. Work of others that
    /// competes with a load cannot be subtracted, only avoided.
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

    /// Microseconds of what a core did beside a load, less what it does without one.
    fn without(self, cpu: &CpuUse) -> f64 {
        // Beyond that it is another load, which does not go on as before beside ours.
        let idle_work = cpu.wall.mul_f64(self.0.min(QUIET));
        cpu.busy.saturating_sub(idle_work).as_secs_f64() * 1e6
    }

    /// Whether figures that are measured beside it are worth something.
    #[must_use]
    pub fn is_quiet(self) -> bool {
        self.0 <= QUIET
    }
}
