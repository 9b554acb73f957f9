//! At a limit new responses are relayed, whole and right; below it they are shortcuts again. Who was there goes on.

mod service;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use service::held::{HELD_BYTES, Held};
use service::{Running, may_run, start_on};
use shunt_lab::{Lab, Options, Settings, Stats};

const FILES: &[(&str, u64)] = &[("held", HELD_BYTES), ("64k", 64 << 10)];
const LIMIT: u64 = 10;
/// One that is on its way between server and agent when the limit is reached.
const UNDER_WAY: u64 = 1;

/// Asks for more than the limit one after the other, holds all, and lets them end: how many were shortcuts, and what
/// all agents counted at the end.
fn fill(test: &str, agent: &'static str, check: impl Fn(&Stats) -> Result<()> + Sync) -> Result<()> {
    if !may_run(test) {
        return Ok(());
    }
    start_on(
        Lab::builder(),
        FILES,
        Options { settings: Settings { agent, ..Settings::default() }, ..Options::shunt() },
        |service| {
            service.lab.client().run(|| -> Result<()> {
                let held: Vec<Held> = (0..2 * LIMIT).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
                let shortcuts = service.frontend_stats()?.count("servers.shortcuts");
                ensure!(
                    (LIMIT..=LIMIT + UNDER_WAY).contains(&shortcuts),
                    "{shortcuts} shortcuts with a limit of {LIMIT}"
                );
                held.into_iter().try_for_each(|one| one.finish(service))?;
                check(&service.service.all_stats()?)?;
                until_shortcut(service, shortcuts)
            })??;
            let stats = service.service.all_stats()?;
            ensure!(stats.count("servers.aborted") + stats.count("servers.fetched") == 0, "{:#}", stats.0);
            until_idle(service)
        },
    )
}

fn until_idle(service: &Running<'_>) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let stats = service.service.all_stats()?;
        let left = ["handoffs", "payloads", "bytes", "senders"].map(|what| stats.count(&format!("agent.now.{what}")));
        if left == [0; 4] {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "left: {:#}", stats.0["agent"]);
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The agent hears of a handoff when its worker's turn ends.
fn ask_slowly(service: &Running<'_>) -> Result<Held> {
    let held = Held::ask(service, "held", "")?;
    std::thread::sleep(Duration::from_millis(20));
    Ok(held)
}

fn until_shortcut(service: &Running<'_>, before: u64) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        Held::ask(service, "held", "")?.finish(service)?;
        let stats = service.frontend_stats()?;
        if stats.count("servers.shortcuts") > before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no shortcut though all are over: {:#}", stats.0);
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn reached(stats: &Stats, limit: &str, relayed: &str) -> Result<()> {
    let (limited, relayed) =
        (stats.count(&format!("agent.limited.{limit}")), stats.count(&format!("servers.{relayed}")));
    ensure!(limited == 1, "{limit} was reached {limited} times");
    ensure!((LIMIT - UNDER_WAY..=LIMIT).contains(&relayed), "{relayed} were relayed");
    Ok(())
}

#[test]
fn handoffs_in_all() -> Result<()> {
    fill("handoffs_in_all", "[limits]\nhandoffs = 10", |stats| reached(stats, "handoffs", "relayed_handoffs_limit"))
}

#[test]
fn handoffs_of_one_peer_end_its_offers() -> Result<()> {
    fill("handoffs_of_one_peer_end_its_offers", "[limits]\nhandoffs_per_peer = 10", |stats| {
        reached(stats, "handoffs_per_peer", "relayed_offers_limit")
    })
}

#[test]
fn payloads_in_all() -> Result<()> {
    fill("payloads_in_all", "[limits]\noffers = 10", |stats| reached(stats, "offers", "relayed_offers_limit"))
}

#[test]
fn payloads_for_one_peer() -> Result<()> {
    fill("payloads_for_one_peer", "[limits]\noffers_per_peer = 10", |stats| {
        reached(stats, "offers_per_peer", "relayed_offers_limit")
    })
}

#[test]
fn bytes_for_one_peer() -> Result<()> {
    fill("bytes_for_one_peer", "[limits]\nbytes_per_peer = 2621440", |stats| {
        reached(stats, "bytes_per_peer", "relayed_offers_limit")
    })
}

/// An agent without a descriptor to spare takes no new offers, serves what it has, and comes back.
#[test]
fn descriptors_run_out() -> Result<()> {
    if !may_run("descriptors_run_out") {
        return Ok(());
    }
    start_on(Lab::builder(), FILES, Options::shunt(), |service| {
        let agent = Pid::from_raw(service.service.agent(service.lab.backend())?.pid().cast_signed());
        let few = |current| prlimit(agent, Resource::Nofile, Rlimit { current: Some(current), maximum: Some(20000) });
        service.lab.client().run(|| -> Result<()> {
            let early: Vec<Held> = (0..4).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
            few(40)?;
            std::thread::sleep(Duration::from_millis(300));
            let before = service.frontend_stats()?.count("servers.shortcuts");
            let held: Vec<Held> = (0..LIMIT).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
            let during = service.frontend_stats()?.count("servers.shortcuts");
            ensure!((before, during) == (4, 4), "shortcuts before and during: {before}, {during}");
            early.into_iter().chain(held).try_for_each(|one| one.finish(service))?;
            few(20000)?;
            until_shortcut(service, during)
        })??;
        let backend = service.service.stats(service.lab.backend())?;
        ensure!(backend.count("agent.limited.descriptors") == 1, "{:#}", backend.0["agent"]);
        Ok(())
    })
}
