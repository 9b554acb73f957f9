//! Faults while the agent of a holder sends on a TLS connection. A body is whole, or its client sees that it is not.
//! Each record that has come can be decrypted, and no two records have the same key and number. A *store* is the part
//! of an agent that keeps its machine's bodies, and a *holder* is a machine that has a body in its store. A *handoff*
//! lets the holder's agent send a body on the client's connection.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_lab::Host;
use shunt_testbed::wait_at_most;

use super::run;
use crate::client::{Client, Target, Told};
use crate::nonces::opened;
use crate::service::Running;

/// Longest wait. It is longer than the lease of a body: the time for which the store keeps a body that nobody has taken
/// or given back. Until their leases end, such bodies may fill the store.
const LIMIT: Duration = Duration::from_secs(180);
/// Time between killing a process and starting it again. The tests are about this time, so they sleep for all of it.
const GONE: Duration = Duration::from_millis(300);
const LONG: u64 = 64 << 20;

/// Asserts that a body was whole, or that its connection was reset or closed before the body's end.
fn is_honest(ending: Result<()>) -> Result<()> {
    let Err(error) = ending else { return Ok(()) };
    let reset = error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionReset);
    ensure!(reset || error.to_string().starts_with("closed with"), "{error:#}");
    Ok(())
}

/// Calls `what` while a client has a part of a body and reads no more. Asserts that the client then gets the whole
/// body, or that its connection ends.
fn disturb(service: &mut Running<'_>, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    until_handed_off(service)?;
    let opened = opened(service, |service| {
        let target = Target::of(service);
        let (mut client, body) = service.lab.client().run(|| {
            let mut client = Client::connect(&target)?;
            let mut body = client.ask("64m")?;
            client.read(&mut body, LONG - (1 << 20))?;
            Ok::<_, anyhow::Error>((client, body))
        })??;
        what(service)?;
        let ending = client.finish(&target, body, "64m");
        println!("{ending:?}");
        is_honest(ending)?;
        Ok(vec![Told { reset: true, ..client.told()? }])
    })?;
    ensure!(opened[0].generations > 0, "nothing was handed off: {opened:?}");
    Ok(())
}

/// Waits until bodies come whole and bypass the frontend again.
fn until_handed_off(service: &Running<'_>) -> Result<()> {
    let target = Target::of(service);
    wait_at_most(LIMIT, "bodies are whole and bypass the frontend", || {
        let begun = || service.counted("frontend.fe_appended");
        let before = begun()?;
        service.lab.client().run(|| {
            let mut client = Client::connect(&target)?;
            (0..3).try_for_each(|_| client.get(&target, "1m"))
        })??;
        ensure!(begun()? > before, "nothing is handed off");
        Ok(())
    })
}

fn kill_server(service: &mut Running<'_>, host: &Host) -> Result<()> {
    service.service.chain_mut().process(host.name()).context("it has a server")?.signal(Signal::KILL)
}

/// Calls `what` with the backend and then with the frontend, each time in the middle of a body. Asserts that bodies are
/// handed off again afterwards.
fn on_each(service: &mut Running<'_>, what: impl Fn(&mut Running<'_>, &Host) -> Result<()>) -> Result<()> {
    for host in [service.lab.backend(), service.lab.frontend()] {
        let ending = disturb(service, |service| what(service, host));
        ending.with_context(|| format!("{} was disturbed", host.name()))?;
        until_handed_off(service).with_context(|| format!("after {} was disturbed", host.name()))?;
    }
    Ok(())
}

#[test]
fn a_killed_agent_costs_a_tls_connection_and_no_byte() -> Result<()> {
    run(|service| {
        on_each(service, |service, host| {
            service.service.kill_agent(host)?;
            std::thread::sleep(GONE);
            service.service.restart_agent(host)
        })
    })
}

#[test]
fn a_killed_server_costs_a_tls_connection_and_no_byte() -> Result<()> {
    run(|service| {
        on_each(service, |service, host| {
            kill_server(service, host)?;
            std::thread::sleep(GONE);
            service.service.chain_mut().restart(host)
        })
    })
}

#[test]
fn tls_clients_that_leave_in_the_middle_leave_nothing_behind() -> Result<()> {
    run(|service| {
        until_handed_off(service)?;
        let target = Target::of(service);
        service.lab.client().run(|| {
            for turn in 0..40 {
                let mut client = Client::connect(&target)?;
                let mut body = client.ask("64m")?;
                client.read(&mut body, LONG - turn * 400_000)?;
            }
            Ok::<_, anyhow::Error>(())
        })??;
        until_handed_off(service)?;
        wait_at_most(LIMIT, "no handoffs are left", || {
            let left = service.counted("agent.now.handoffs")?;
            ensure!(left == 0, "{left} handoffs are left");
            Ok(())
        })
    })
}
