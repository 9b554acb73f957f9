//! Somebody stops: the agent of a frontend. A response is whole all the same, and does not wait for it to come back.

mod service;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use service::held::Held;
use service::{Running, may_run, start};
use shunt_lab::{Host, Stats, fetch};

/// Until everybody has found everybody again, and has counted.
const PATIENCE: Duration = Duration::from_secs(60);

fn signal(service: &mut Running<'_>, host: &Host, signal: Signal) -> Result<()> {
    service.service.agent_process(host)?.context("the host has an agent")?.signal(signal);
    Ok(())
}

/// Asks for a body that is long for its client, whose window is shut after some of it.
fn ask(service: &Running<'_>) -> Result<Held> {
    service.lab.client().run(|| Held::ask(service, "7m", ""))?
}

fn until(service: &Running<'_>, holds: impl Fn(&Stats) -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let stats = service.frontend_stats()?;
        if holds(&stats) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "waited too long: {:#}", stats.0);
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Every response is whole, and in the end one takes the shortcut.
fn recovers(service: &Running<'_>) -> Result<()> {
    let before = service.frontend_stats()?.count("servers.shortcuts");
    until(service, |stats| {
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/1m"]);
        fetched.and_then(|fetched| service.whole(&fetched)).is_ok() && stats.count("servers.shortcuts") > before
    })
}

/// Nobody claims what is handed off in its last moment: the worker does not know yet.
#[test]
fn a_handoff_that_a_stopped_agent_never_reads_goes_on_without_it() -> Result<()> {
    if !may_run("a_handoff_that_a_stopped_agent_never_reads_goes_on_without_it") {
        return Ok(());
    }
    start(0, |service| {
        let frontend = service.lab.frontend();
        service.still_good()?;
        signal(service, frontend, Signal::STOP)?;
        let held = [ask(service)?, ask(service)?];
        held.into_iter().try_for_each(|one| one.finish(service))?;
        signal(service, frontend, Signal::CONT)?;
        // It reads of them now, and passes none on.
        until(service, |stats| {
            (stats.count("agent.handoffs_unknown"), stats.count("servers.relayed_stopped")) == (2, 2)
        })?;
        recovers(service)
    })
}

/// Payloads on their way need no agent, until their backend is lost as well: then the worker has to find that out.
#[test]
fn a_payload_whose_backend_is_lost_while_the_agent_is_stopped_goes_on() -> Result<()> {
    if !may_run("a_payload_whose_backend_is_lost_while_the_agent_is_stopped_goes_on") {
        return Ok(());
    }
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let held = ask(service)?;
        signal(service, frontend, Signal::STOP)?;
        service.service.kill_agent(backend)?;
        service.service.start_agent(backend)?; // which silences the old one's senders
        held.finish(service)?;
        signal(service, frontend, Signal::CONT)?;
        until(service, |stats| stats.count("servers.relayed_stopped") == 1)?;
        recovers(service)
    })
}

/// The same for an agent that is gone, and does not come back.
#[test]
fn a_handoff_of_an_agent_that_is_killed_goes_on_without_it() -> Result<()> {
    if !may_run("a_handoff_of_an_agent_that_is_killed_goes_on_without_it") {
        return Ok(());
    }
    start(0, |service| {
        let frontend = service.lab.frontend();
        signal(service, frontend, Signal::STOP)?;
        let held = ask(service)?;
        service.service.kill_agent(frontend)?;
        held.finish(service)?;
        service.service.restart_agent(frontend)?;
        recovers(service)
    })
}
