//! Two thousand shortcuts (bodies that the backend sends straight to the client) at the same time. Their clients do not
//! read for now, so none of them ends.

mod service;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use service::held::{HELD_BYTES, Held};
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options};
use shunt_testbed::{skipped, wait_for};

const CLIENTS: usize = 2000;
/// Number of rounds. In each round, the test asks for as many bodies as are still missing until [`CLIENTS`] handoffs
/// (bodies that the backend sends to clients) are under way.
const ROUNDS: usize = 10;
/// Number of descriptors that one process of the test needs: the backend's agent has a socket and a file for each
/// client, and some other descriptors.
const DESCRIPTORS: u64 = 2 * CLIENTS as u64 + 200;
/// Bound on the frontend agent's memory for each shortcut, in bytes. It includes the shortcut's part of the flow table.
const AGENT_BYTES_EACH: u64 = 8 << 10;

/// Memory and descriptors of one process.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    pss_bytes: u64,
    descriptors: usize,
}

impl Footprint {
    fn of(pid: u32) -> Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let smaps = std::fs::read_to_string(proc.join("smaps_rollup"))?;
        let pss = smaps.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss")?;
        let kib: u64 = pss.trim().trim_end_matches("kB").trim().parse()?;
        Ok(Self { pss_bytes: kib << 10, descriptors: std::fs::read_dir(proc.join("fd"))?.count() })
    }

    fn of_agent(service: &Running<'_>, host: &Host) -> Result<Self> {
        Self::of(service.service.agent(host)?.pid())
    }
}

/// Returns the memory of all BPF hash maps that a process has open, in bytes. In the frontend's agent, nearly all of it
/// is the flow table (entries for clients' connections).
fn map_bytes(pid: u32) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))?.flatten() {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        if field("map_type:") == Some(1) {
            bytes += field("memlock:").unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// Returns the number of memory pages that TCP uses on this machine, for all hosts of the lab together.
fn tcp_pages() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat")?;
    let tcp = text.lines().find(|line| line.starts_with("TCP:")).context("no TCP in sockstat")?;
    Ok(tcp.split("mem ").nth(1).context("no mem")?.trim().parse()?)
}

/// Asks for bodies in [`ROUNDS`] rounds, until [`CLIENTS`] handoffs are under way. More than one round may be needed:
/// while an agent gets no core, servers send bodies through the tiers (`relayed_agent_busy`).
fn hold_all(service: &Running<'_>) -> Result<Vec<Held>> {
    let mut held = Vec::new();
    for _ in 0..ROUNDS {
        for _ in under_way(service)?..CLIENTS {
            held.push(Held::ask(service, "held", "")?);
        }
    }
    Ok(held)
}

/// Returns the number of handoffs under way, once two counts in a row are the same.
fn under_way(service: &Running<'_>) -> Result<usize> {
    let mut before = None;
    wait_for("no more handoffs begin", || {
        let now = service.counted("agent.now.handoffs")? as usize;
        let still = before.replace(now) == Some(now);
        ensure!(still, "handoffs still begin: {now}");
        Ok(Some(now))
    })
}

/// Asserts that [`CLIENTS`] handoffs are under way at once.
fn all_are_held(service: &Running<'_>) -> Result<()> {
    let stats = service.service.all_stats()?;
    let now = service.counted("agent.now.handoffs")?;
    ensure!(now >= CLIENTS as u64, "{now} of {CLIENTS} handoffs are under way: {}", stats.under("servers"));
    Ok(())
}

/// Raises this process's limit of descriptors as far as allowed. Returns whether it is enough for the test.
fn enough_descriptors() -> Result<bool> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    Ok(maximum.is_none_or(|maximum| maximum >= DESCRIPTORS))
}

#[test]
fn two_thousand_shortcuts_at_once() -> Result<()> {
    needs_root();
    if !enough_descriptors()? {
        let why = format!("it takes {DESCRIPTORS} descriptors in a process (ulimit -Hn)");
        skipped("two_thousand_shortcuts_at_once", &why);
        return Ok(());
    }
    start_on(Lab::builder(), &[("held", HELD_BYTES), ("64k", 64 << 10)], Options::steady(), |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let footprints = || -> Result<_> {
            let maps = map_bytes(service.service.agent(frontend)?.pid())?;
            let agents = (Footprint::of_agent(service, frontend)?, Footprint::of_agent(service, backend)?);
            Ok((agents.0, agents.1, maps, tcp_pages()?))
        };
        service.lab.client().run(|| -> Result<()> {
            // Some responses come before the measurement, so that memory which is allocated only once is not counted.
            (0..16).try_for_each(|_| Held::ask(service, "held", "")?.finish(service))?;
            let before = footprints()?;
            let start = Instant::now();
            let held = hold_all(service)?;
            let held_after = start.elapsed();
            wait_for("all handoffs are under way", || all_are_held(service))?;
            let during = footprints()?;
            let each = |now: u64, then: u64| now.saturating_sub(then) / CLIENTS as u64;
            let agent_each = each(during.0.pss_bytes, before.0.pss_bytes);
            eprintln!(
                "{CLIENTS} shortcuts at once after {held_after:?}. Each: frontend's agent {agent_each} bytes, its flow \
                 table {} bytes, backend's agent {} bytes; descriptors: {} -> {} and {} -> {}; TCP's memory: {} KiB each",
                each(during.2, before.2),
                each(during.1.pss_bytes, before.1.pss_bytes),
                before.0.descriptors,
                during.0.descriptors,
                before.1.descriptors,
                during.1.descriptors,
                each(during.3 * 4, before.3 * 4),
            );
            let with_table = agent_each + each(during.2, before.2);
            ensure!(with_table < AGENT_BYTES_EACH, "the frontend's agent takes {with_table} bytes for each");
            held.into_iter().try_for_each(|one| one.finish(service))
        })??;
        let stats = service.frontend_stats()?;
        let aborted = stats.count("servers.aborted");
        ensure!(aborted == 0, "{aborted} handoffs were aborted: {}", stats.under("servers"));
        ensure!(stats.count("frontend.fe_event_lost") == 0, "completions were lost: {}", stats.under("frontend"));
        Ok(())
    })
}
