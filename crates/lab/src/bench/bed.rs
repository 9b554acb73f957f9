//! A *bed*: the labs in which the cases of one *shape* (number of intermediates, kind of links) are measured. A *lab*
//! is a service's hosts, as network namespaces. The baseline (nginx without Shunt), the service with Shunt ("ours") and
//! each other service have their own lab, all on the same cores. So no part of one service is on the path of another's
//! packets. Labs that are not loaded cost nothing.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::case::Shape;
use crate::chain::Chain;
use crate::fetch::{fetch, file_sha256};
use crate::haproxy::HaproxyChain;
use crate::lab::Lab;
use crate::load::{Background, Cost, RateCost};
use crate::nginx::Heap;
use crate::placement::Placement;
use crate::rate::Rate;
use crate::report::number::size_name;
use crate::service::{Options, Service, Stats};
use crate::tls::tls_authority;
use crate::wrk::Wrk;

/// Sizes of all bodies that cases ask for, in bytes. A response with a body of 0 bytes is only a header.
const SIZES: [u64; 8] = [0, 1 << 10, 3 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Longest time for a busy core to settle, in multiples of [`Plan::background`].
const PATIENCE: u32 = 6;

/// Service that is loaded: one of those that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Baseline,
    Ours,
    /// The baseline with an allocator that gives no memory back to the kernel.
    KeptHeap,
    Haproxy,
}

/// Running labs of one shape, one for each service that is compared.
pub(super) struct Bed<'lab> {
    shape: Shape,
    baseline: Service<'lab>,
    ours: Service<'lab>,
    kept_heap: Service<'lab>,
    /// Lab and chain with HAProxy, present only if a case needs it.
    haproxy: Option<(&'lab Lab, Chain)>,
    background: Background,
}

/// Description of a bed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) shape: Shape,
    pub(super) ours: Options,
    pub(super) haproxy: bool,
    /// Time for which the measured core (which runs the hosts whose CPU is measured) is watched without load. A busy
    /// core is watched for up to [`PATIENCE`] times this time.
    pub(super) background: Duration,
}

impl Plan {
    /// Plan without HAProxy. `ours` are the options of the service with Shunt. The baselines get the same settings, but
    /// neither Shunt nor `shunt run`.
    pub(super) fn of(shape: Shape, ours: Options) -> Self {
        Self { shape, ours, haproxy: false, background: Duration::from_millis(500) }
    }
}

/// Builds the labs, checks that every service serves the right bytes, and calls `work` with the bed.
pub(super) fn with_bed<T>(plan: Plan, work: impl FnOnce(&mut Bed<'_>) -> Result<T>) -> Result<T> {
    let lab = || Lab::builder().intermediates(plan.shape.intermediates).wire(plan.shape.wire).build();
    let (baseline_lab, ours_lab, kept_heap_lab) = (lab()?, lab()?, lab()?);
    let haproxy_lab = plan.haproxy.then(lab).transpose()?;
    let files = baseline_lab.files(&SIZES.map(|size| (size_name(size), size)))?;
    let plain = Options { settings: plan.ours.settings, ..Options::plain() };
    let mut bed = Bed {
        shape: plan.shape,
        baseline: Service::start(&baseline_lab, &files, plain).context("the baseline")?,
        ours: Service::start(&ours_lab, &files, plan.ours).context("ours")?,
        kept_heap: Service::start(&kept_heap_lab, &files, Options { heap: Heap::Kept, ..plain })
            .context("the baseline with a kept heap")?,
        haproxy: None,
        background: Background::default(),
    };
    if let Some(lab) = &haproxy_lab {
        bed.haproxy = Some((lab, HaproxyChain::new(&files).start(lab)?));
    }
    bed.check_bodies(&files)?;
    if plan.ours.settings.tls.is_some() {
        bed.check_bodies_on_tls(&files)?;
    }
    bed.place(&Placement::WholeService)?;
    bed.background = Background::settle(baseline_lab.cores().measured, plan.background, plan.background * PATIENCE)?;
    work(&mut bed)
}

impl Bed<'_> {
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    pub(super) fn background(&self) -> Background {
        self.background
    }

    pub(super) fn has_haproxy(&self) -> bool {
        self.haproxy.is_some()
    }

    fn side(&self, side: Side) -> Option<(&Lab, &Chain)> {
        match side {
            Side::Baseline => Some((self.baseline.lab(), self.baseline.chain())),
            Side::Ours => Some((self.ours.lab(), self.ours.chain())),
            Side::KeptHeap => Some((self.kept_heap.lab(), self.kept_heap.chain())),
            Side::Haproxy => self.haproxy.as_ref().map(|(lab, chain)| (*lab, chain)),
        }
    }

    /// Sides that exist in this bed.
    fn sides(&self) -> impl Iterator<Item = (Side, &Lab, &Chain)> {
        let all = [Side::Baseline, Side::Ours, Side::KeptHeap, Side::Haproxy].into_iter();
        all.filter_map(|side| self.side(side).map(|(lab, chain)| (side, lab, chain)))
    }

    /// Assigns the hosts of every lab to the same cores, as `placement` says.
    pub(super) fn place(&self, placement: &Placement) -> Result<()> {
        self.sides().try_for_each(|(_, lab, _)| lab.place(placement))
    }

    /// Lab and servers of one side.
    pub(super) fn target(&self, side: Side) -> Result<(&Lab, &Chain)> {
        self.side(side).with_context(|| format!("no {side:?} in this bed"))
    }

    /// Loads one side through all its tiers with `connections` connections, for `time` in whole seconds.
    pub(super) fn load(&self, side: Side, size: u64, connections: u32, time: Duration) -> Result<Cost> {
        let (_, chain) = self.target(side)?;
        let url = chain.url(&format!("/{}", size_name(size)));
        self.load_with(side, Wrk::new(url).connections(connections).duration(time))
    }

    /// Loads one side with this run of wrk.
    pub(super) fn load_with(&self, side: Side, load: Wrk) -> Result<Cost> {
        let (lab, _) = self.target(side)?;
        Cost::of(lab, &load).map_err(|error| {
            let counters = if side == Side::Ours { self.ours.explain() } else { String::new() };
            anyhow!("{side:?}: {error:#}{counters}")
        })
    }

    /// Loads one side at a constant rate for `time` after a warm-up; returns microseconds of the measured core per
    /// response.
    pub(super) fn load_at_rate(&self, side: Side, size: u64, per_second: f64, time: Duration) -> Result<f64> {
        let (lab, chain) = self.target(side)?;
        let load = Rate::new(chain.server(), format!("/{}", size_name(size)), per_second).duration(time);
        let cost = RateCost::of(lab, &load).with_context(|| format!("{side:?}"))?;
        Ok(cost.microseconds(&self.background))
    }

    /// Loads the backend of [`Side::KeptHeap`] directly, not through the proxies before it.
    pub(super) fn load_direct(&self, size: u64, time: Duration) -> Result<Cost> {
        let (lab, chain) = self.target(Side::KeptHeap)?;
        Cost::of(lab, &Wrk::new(chain.direct_url(&format!("/{}", size_name(size)))).duration(time))
    }

    /// Sum of the counters of the agents (Shunt's daemons) of our side; `None` if one does not answer. Without agents,
    /// as when plain nginx is compared with itself, the sum is empty.
    pub(super) fn stats(&self) -> Option<Stats> {
        self.ours.all_stats().ok()
    }

    /// Fetches every body through every service and compares it: a benchmark with wrong bytes is worth nothing.
    fn check_bodies(&self, files: &Path) -> Result<()> {
        let paths = SIZES.map(|size| format!("/{}", size_name(size)));
        for (side, lab, chain) in self.sides() {
            for fetched in fetch(lab.client(), chain.server(), &paths).with_context(|| format!("{side:?}"))? {
                let (path, status) = (&fetched.path, fetched.status);
                let expected = file_sha256(files.join(path.trim_start_matches('/')))?;
                ensure!(status == 200, "{side:?}: {path} was answered with {status}");
                ensure!(fetched.sha256 == expected, "{side:?}: the body of {path} differs from its file");
            }
        }
        Ok(())
    }

    /// Fetches and compares every body on TLS, over one connection of curl.
    fn check_bodies_on_tls(&self, files: &Path) -> Result<()> {
        for (side, lab, chain) in self.sides() {
            let directory = tempfile::tempdir()?;
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--http1.1", "--tlsv1.3", "--cacert"]);
            curl.arg(tls_authority(lab.frontend()));
            for name in SIZES.map(size_name) {
                curl.arg("--output").arg(directory.path().join(&name)).arg(chain.tls_url(&format!("/{name}")));
            }
            lab.client().check(curl).with_context(|| format!("{side:?}"))?;
            for name in SIZES.map(size_name) {
                let same = file_sha256(directory.path().join(&name))? == file_sha256(files.join(&name))?;
                ensure!(same, "{side:?}: the body of /{name} on TLS differs from its file");
            }
        }
        Ok(())
    }

    pub(super) fn check_running(&mut self) -> Result<()> {
        self.baseline.check_running()?;
        self.ours.check_running()?;
        self.kept_heap.check_running()?;
        self.haproxy.as_mut().map_or(Ok(()), |(_, chain)| chain.check_running())
    }
}
