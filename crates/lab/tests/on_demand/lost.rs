//! Faults while the agent of a holder sends: a body is whole, or its client sees that it is not. A *store* is the part
//! of an agent that keeps its machine's bodies, and a *holder* is a machine that has a body in its store. A *handoff*
//! lets the holder's agent send a body on the client's connection.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_lab::faults::Client;
use shunt_lab::{Ending, Fetch, Host};
use shunt_testbed::{wait_for, wait_or_fail};

use crate::service::Running;
use crate::{LIMIT, options, paths, run};

/// Time between killing a process and starting it again. The tests are about this time, so they sleep for all of it.
const GONE: Duration = Duration::from_millis(300);

/// Calls `what` while a client has a part of a body and reads no more. Then the client reads on. Returns how its
/// response ends.
pub fn disturb(service: &mut Running<'_>, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<Ending> {
    let server = service.service.chain().server();
    // First waits until bodies are handed off, because otherwise there may be no handoff to disturb.
    until_handed_off(service)?;
    let mut client = Client::connect(service.lab.client(), server, Some(256 << 10))?;
    client.ask("/7m", "7m", 7 << 20);
    client.read_until(1 << 20, LIMIT)?;
    what(service)?;
    client.finish(LIMIT)
}

/// Waits until all files come whole and bodies bypass the frontend again. Programs notice within two seconds that their
/// store has been restarted. Until then, bytes that they write may be lost, and their connections then end.
pub fn until_handed_off(service: &Running<'_>) -> Result<()> {
    wait_or_fail("bodies are handed off", || {
        let begun = || service.counted("frontend.fe_begun");
        let before = begun()?;
        let fetched = Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths(1));
        let Ok(fetched) = fetched else { return Ok(false) };
        service.whole(&fetched)?;
        Ok(begun()? > before)
    })
}

pub fn is_honest(ending: &Ending) -> Result<()> {
    ensure!(matches!(ending, Ending::Whole | Ending::Reset(_) | Ending::Short(_)), "{ending}");
    Ok(())
}

pub fn signal_server(service: &mut Running<'_>, host: &Host, signal: Signal) -> Result<()> {
    service.service.chain_mut().process(host.name()).context("it has a server")?.signal(signal)
}

/// Calls `what` with the backend and then with the frontend, each time in the middle of a body. Asserts that bodies are
/// handed off again afterwards.
fn on_each(service: &mut Running<'_>, what: impl Fn(&mut Running<'_>, &Host) -> Result<()>) -> Result<()> {
    for host in [service.lab.backend(), service.lab.frontend()] {
        let ending = disturb(service, |service| what(service, host));
        is_honest(&ending?).with_context(|| format!("{} was disturbed", host.name()))?;
        until_handed_off(service).with_context(|| format!("after {} was disturbed", host.name()))?;
    }
    Ok(())
}

#[test]
fn a_killed_agent_costs_a_connection_and_no_byte() -> Result<()> {
    run(options(), |service| {
        on_each(service, |service, host| {
            service.service.kill_agent(host)?;
            std::thread::sleep(GONE);
            service.service.restart_agent(host)
        })
    })
}

#[test]
fn a_killed_server_costs_a_connection_and_no_byte() -> Result<()> {
    run(options(), |service| {
        on_each(service, |service, host| {
            signal_server(service, host, Signal::KILL)?;
            std::thread::sleep(GONE);
            service.service.chain_mut().restart(host)
        })
    })
}

#[test]
fn clients_that_leave_in_the_middle_leave_nothing_behind() -> Result<()> {
    run(options(), |service| {
        until_handed_off(service)?;
        let server = service.service.chain().server();
        for turn in 0..40 {
            let mut client = Client::connect(service.lab.client(), server, None)?;
            client.ask("/7m", "7m", 7 << 20);
            client.read_until(turn * 150_000, LIMIT)?;
        }
        until_handed_off(service)?;
        wait_for("no handoffs are left", || Ok(service.counted("agent.now.handoffs")? == 0))
    })
}
