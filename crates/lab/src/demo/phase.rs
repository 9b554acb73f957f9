//! One half of the demo: the service without Shunt, or with it. A *shortcut* is a response whose body bypasses tiers. A
//! body without a shortcut is *relayed* through the tiers as without Shunt, or *fetched* through Shunt's daemons.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::bodies::{Body, fetch_and_compare, long_fetches};
use crate::lab::Lab;
use crate::load::{Background, Cost};
use crate::placement::Placement;
use crate::report::{Progress, number};
use crate::service::{Options, Service, Stats};
use crate::wrk::Wrk;

/// Bodies that wrk asks for: name, and size in bytes.
pub(super) const LOADS: [(&str, u64); 2] = [("64k", 64 << 10), ("1m", 1 << 20)];

/// Duration of each load. Each tier has its own load, which measures this tier alone.
const LOAD_TIME: Duration = Duration::from_secs(2);

/// Bytes at the ports of a tier, and CPU of the tier, per response.
#[derive(Debug, Clone)]
pub(super) struct TierUse {
    pub(super) tier: String,
    pub(super) bytes: f64,
    pub(super) microseconds: f64,
}

#[derive(Debug, Clone)]
pub(super) struct LoadUse {
    pub(super) tiers: Vec<TierUse>,
}

#[derive(Debug)]
pub(super) struct Phase {
    pub(super) name: &'static str,
    pub(super) loads: Vec<LoadUse>,
    /// Everything that was wrong, one sentence each.
    pub(super) faults: Vec<String>,
}

pub(super) fn run_phase(
    lab: &Lab,
    files: &Path,
    bodies: &[Body],
    name: &'static str,
    options: Options,
    progress: &Progress,
) -> Result<Phase> {
    lab.place(&Placement::None)?;
    progress.step(&format!("{name}: starting the servers"));
    let mut service = Service::start(lab, files, options)?;
    let background = Background::settle(lab.cores().measured, Duration::from_millis(300), Duration::from_secs(3))?;

    progress.step(&format!("{name}: curl fetches 1 KiB to 64 MiB over one connection"));
    let start = shunt_stats(&service, options)?;
    let mut faults = fetch_and_compare(lab, service.chain(), bodies)?;
    if let Some(start) = &start {
        faults.extend(wait_for_shortcuts(&service, start, long_fetches(bodies))?);
    }

    let before_loads = shunt_stats(&service, options)?;
    let mut loads = Vec::new();
    for (body, _) in LOADS {
        loads.push(LoadUse { tiers: load_tiers(&service, body, name, &background, progress)? });
    }
    if let (Some(start), Some(end)) = (&before_loads, shunt_stats(&service, options)?) {
        let reasons = long_way(&end, start).filter(|_| !is_a_full_window_now_and_then(&end, start));
        faults.extend(reasons.map(|reasons| format!("under load, bodies passed through the tiers: {reasons}")));
    }
    service.check_running()?;
    let faults: Vec<String> = faults.into_iter().map(|fault| format!("{name}: {fault}")).collect();
    let state = if faults.is_empty() { "every body as expected" } else { "with faults" };
    progress.done(&format!("{name}: {state}"));
    Ok(Phase { name, loads, faults })
}

/// Loads the service once per tier. Each time, this tier is alone on the core whose CPU time is measured.
fn load_tiers(
    service: &Service,
    body: &str,
    name: &str,
    background: &Background,
    progress: &Progress,
) -> Result<Vec<TierUse>> {
    let lab = service.lab();
    let mut uses = Vec::new();
    for tier in lab.tiers() {
        progress.step(&format!("{name}: wrk fetches {body} bodies, {} on a core of its own", tier.name()));
        lab.place(&Placement::Tier(tier.name().to_owned()))?;
        let cost = Cost::of(lab, &Wrk::new(service.chain().url(&format!("/{body}"))).duration(LOAD_TIME));
        let cost = cost.map_err(|error| anyhow!("{body} bodies from {name}: {error:#}{}", service.explain()))?;
        uses.push(TierUse {
            tier: tier.name().to_owned(),
            bytes: cost.tier_bytes(tier.name()),
            microseconds: cost.microseconds(background),
        });
    }
    Ok(uses)
}

fn shunt_stats(service: &Service, options: Options) -> Result<Option<Stats>> {
    options.shunt.then(|| service.all_stats()).transpose()
}

/// Waits until as many shortcuts are counted as are wanted, 2 s at most. A shortcut is counted when the frontend has
/// seen the client's last acknowledgment, which is soon after curl ends. Returns what was wrong.
fn wait_for_shortcuts(service: &Service, start: &Stats, wanted: u64) -> Result<Vec<String>> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let now = service.all_stats()?;
        let taken = now.count("servers.shortcuts") - start.count("servers.shortcuts");
        if taken == wanted {
            return Ok(Vec::new());
        }
        if Instant::now() > deadline {
            let why = long_way(&now, start).unwrap_or_else(|| "no counter gives a reason".to_owned());
            return Ok(vec![format!("{taken} of {wanted} long bodies took the shortcut: {why}")]);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Counters of long bodies that were relayed or fetched, or whose shortcut was refused: each counter's name says the
/// reason, and its value is the growth from `start` to `end`.
fn long_ways(end: &Stats, start: &Stats) -> BTreeMap<String, u64> {
    let counts = |name: &str| {
        name != "relayed_too_small"
            && ["relayed_", "fetched_", "fetch", "refused_"].iter().any(|prefix| name.starts_with(prefix))
    };
    end.grown(start, "servers.").into_iter().filter(|(name, _)| counts(name)).collect()
}

/// Text for people with the counters of [`long_ways`]; `None` if all long bodies took the shortcut.
fn long_way(end: &Stats, start: &Stats) -> Option<String> {
    let ways = long_ways(end, start).into_iter();
    let reasons: Vec<String> = ways.map(|(name, count)| format!("{name} {}", number::count(count))).collect();
    (!reasons.is_empty()).then(|| reasons.join(", "))
}

/// Returns whether every long body without a shortcut was fetched for one reason (`fetched_unsent`): its header could
/// not leave at once, because the client's window was full. Under load this is to be expected of at most one body for
/// each 1,000 shortcuts; more give `false`.
fn is_a_full_window_now_and_then(end: &Stats, start: &Stats) -> bool {
    let of = |counts: &BTreeMap<String, u64>, name: &str| counts.get(name).copied().unwrap_or(0);
    let (ways, all) = (long_ways(end, start), end.grown(start, "servers."));
    let unsent = of(&ways, "fetched_unsent");
    let is_unsent =
        |(name, count): (&String, &u64)| ["fetched", "fetched_unsent"].contains(&&name[..]) && *count == unsent;
    ways.iter().all(is_unsent) && unsent * 1000 <= of(&all, "shortcuts")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_full_window_now_and_then_is_no_fault() {
        let of = |servers: serde_json::Value| Stats(json!({ "servers": servers }));
        let start = of(json!({"shortcuts": 0, "fetched": 0}));
        let good = of(json!({"shortcuts": 2000, "fetched": 1, "fetched_unsent": 1}));
        assert!(is_a_full_window_now_and_then(&good, &start));
        for bad in [
            json!({"shortcuts": 900, "fetched": 1, "fetched_unsent": 1}),
            json!({"shortcuts": 2000, "fetched": 2, "fetched_unsent": 1}),
            json!({"shortcuts": 2000, "fetched": 2, "fetched_unsent": 1, "fetched_refused": 1}),
            json!({"shortcuts": 2000, "fetched": 1, "fetched_unsent": 1, "relayed_no_peer": 1}),
        ] {
            assert!(!is_a_full_window_now_and_then(&of(bad), &start));
        }
    }

    #[test]
    fn the_long_way_is_told_from_the_right_way() {
        let of = |servers: serde_json::Value| Stats(json!({ "servers": servers }));
        let start = of(json!({"shortcuts": 1, "fetched": 0, "relayed_too_small": 0}));
        let good = of(json!({"shortcuts": 9, "fetched": 0, "relayed_too_small": 4, "offers": 8, "aborted": 1}));
        assert_eq!(long_way(&good, &start), None);
        let bad = of(json!({"shortcuts": 1, "fetched": 2, "fetched_unsent": 2, "relayed_no_peer": 1}));
        assert_eq!(long_way(&bad, &start).unwrap(), "fetched 2, fetched_unsent 2, relayed_no_peer 1");
    }
}
