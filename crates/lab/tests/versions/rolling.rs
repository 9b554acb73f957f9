//! A service is upgraded machine by machine as docs/shuntd.md describes it ("Upgrading and removing"), and then goes
//! back to the old version, while clients download all the time. A body takes the *shortcut* if the backend sends it
//! straight to the client.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shunt_lab::{Host, Lab, Options, Release, Releases, ReleasesOf, Role, Settings, install_module, upgrade};
use shunt_testbed::{PATIENCE, wait_or_fail};

use crate::load::{Clients, FILES, Load};
use crate::service::{ALONE, Running, needs_root, start_on};
use crate::{NO_AGENT, Target, no_errors_but};

/// Number of clients.
const CLIENTS: usize = 2;

fn options(from: ReleasesOf) -> Options {
    let settings = Settings { tls: Some(""), http: ALONE, agent: "drain = \"30s\"\n", ..Settings::default() };
    Options { releases: Some(from), settings, ..Options::shunt() }
}

/// Replaces a machine's agent. The old one ends when the bodies that it sends have ended. Then an agent of the version
/// `release` starts.
pub fn upgrade_agent(service: &mut Running<'_>, host: &Host, release: Release) -> Result<()> {
    service.service.set_agent_release(host, release)?;
    let agent = service.service.agent_process(host)?.context("it has an agent")?;
    let pid = Pid::from_raw(agent.pid().cast_signed()).context("a process has a number")?;
    kill_process(pid, Signal::TERM)?;
    let status = agent.wait(PATIENCE)?;
    ensure!(status.success(), "{}: {status}:\n{}", host.name(), agent.log());
    service.service.restart_agent(host)
}

/// Replaces nginx and its module: the old workers end with their last responses.
fn upgrade_server(host: &Host, release: Release) -> Result<()> {
    install_module(host, release)?;
    upgrade::upgrade(host)?;
    upgrade::until_upgraded(host)
}

fn shortcuts(service: &Running<'_>) -> Result<u64> {
    Ok(service.frontend_stats()?.count("servers.shortcuts"))
}

/// Waits until bodies of the load take the shortcut from every backend.
fn until_shortcuts(service: &Running<'_>, load: &Load, when: &str) -> Result<()> {
    let from = |host: &Host| Ok::<_, anyhow::Error>(service.service.stats(host)?.count("agent.claims"));
    let backends: Vec<&Host> = service.lab.hosts_of(Role::Backend).collect();
    let before: Vec<u64> = backends.iter().map(|host| from(host)).collect::<Result<_>>()?;
    let (shortcuts_before, whole_before) = (shortcuts(service)?, load.whole.load(Ordering::Relaxed));
    wait_or_fail(&format!("shortcuts from every backend {when}"), || {
        ensure!(!load.over.load(Ordering::Relaxed), "a client has failed");
        let grown = backends.iter().zip(&before).map(|(host, before)| Ok(from(host)? > *before));
        let all_send = grown.collect::<Result<Vec<_>>>()?.into_iter().all(|grows| grows);
        let whole = load.whole.load(Ordering::Relaxed);
        Ok(all_send && shortcuts(service)? > shortcuts_before && whole > whole_before)
    })
}

fn upgrade_all(service: &mut Running<'_>, load: &Load, release: Release) -> Result<()> {
    let lab = service.lab;
    for host in lab.hosts_of(Role::Backend).chain([lab.frontend()]) {
        upgrade_agent(service, host, release).with_context(|| format!("{}: its agent to {release:?}", host.name()))?;
        until_shortcuts(service, load, &format!("once {} has the agent of {release:?}", host.name()))?;
        upgrade_server(host, release).with_context(|| format!("{}: its nginx to {release:?}", host.name()))?;
        until_shortcuts(service, load, &format!("once {} has the module of {release:?}", host.name()))?;
    }
    Ok(())
}

/// Upgrades all machines to this version while clients download, and then takes all back to the version `from`.
fn there_and_back(service: &mut Running<'_>, from: Release, clients: Clients) -> Result<()> {
    let (lab, load) = (service.lab, Load::default());
    for host in lab.tiers() {
        upgrade::daemonize(service.service.chain_mut(), host)?;
    }
    let target = Target::of(service);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| load.run(&target, clients))).collect();
        let steps = until_shortcuts(service, &load, "before the upgrade")
            .and_then(|()| upgrade_all(service, &load, Release::This))
            .and_then(|()| upgrade_all(service, &load, from));
        load.over.store(true, Ordering::Relaxed);
        let ends = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a client has panicked"))?);
        ends.collect::<Result<Vec<()>>>().and(steps)
    })?;
    no_errors_but(service, &[NO_AGENT])?;
    for host in lab.tiers() {
        upgrade::end_servers(host)?;
        service.service.chain_mut().restart(host)?;
    }
    Ok(())
}

fn costs_no_response(from: ReleasesOf, clients: Clients) -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, options(from), |service| {
        let release = from(service.lab.frontend()).agent;
        there_and_back(service, release, clients).with_context(|| service.service.explain())
    })
}

#[test]
fn a_rolling_upgrade_and_the_way_back_cost_no_response() -> Result<()> {
    costs_no_response(|_| Releases::all(Release::Older), Clients::Plain)
}

#[test]
fn a_rolling_upgrade_and_the_way_back_cost_no_response_over_tls() -> Result<()> {
    costs_no_response(|_| Releases::all(Release::Older), Clients::Tls)
}

#[test]
fn a_rolling_upgrade_between_two_layouts_costs_no_response() -> Result<()> {
    costs_no_response(|_| Releases::all(Release::OtherLayout), Clients::Plain)
}

#[test]
fn a_rolling_upgrade_between_two_layouts_costs_no_response_over_tls() -> Result<()> {
    costs_no_response(|_| Releases::all(Release::OtherLayout), Clients::Tls)
}
