//! Something between backend and client begins to drop what they send, in mid-payload. All agents are at work, and the
//! frontend hears the client: a response is whole all the same.

mod service;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use service::held::Held;
use service::{Running, may_run, start};
use shunt_lab::{Host, Stats, fetch};

/// Until shortcuts are taken again.
const PATIENCE: Duration = Duration::from_secs(60);
const RELAYED: &str = "servers.relayed_stalled";

fn nft(host: &Host, rule: &str) -> Result<()> {
    let mut command = Command::new("nft");
    command.arg(rule);
    host.check(command).map(drop)
}

/// What comes in to a host, and is like that, is dropped from now on.
fn drop_at(host: &Host, what: &str) -> Result<()> {
    nft(host, "add table ip lab")?;
    nft(host, "add chain ip lab in { type filter hook prerouting priority -300 ; }")?;
    nft(host, &format!("add rule ip lab in {what} drop"))
}

fn link_address(host: &Host) -> Result<String> {
    let mut command = Command::new("ip");
    command.args(["-json", "link", "show", "dev", &host.ports()[0].device]);
    let links: serde_json::Value = serde_json::from_str(&host.check(command)?)?;
    Ok(links[0]["address"].as_str().context("no link address")?.to_owned())
}

/// A shortcut and its connection's next response, and later ones.
fn is_whole(service: &Running<'_>, drops: impl FnOnce(&Running<'_>) -> Result<()>, undo: &Host) -> Result<()> {
    service.still_good()?;
    let held = service.lab.client().run(|| Held::ask(service, "7m", ""))??;
    drops(service)?;
    held.finish_and_ask_again(service, "1k")?;
    let stats = service.frontend_stats()?;
    ensure!((stats.count(RELAYED), stats.count("servers.aborted")) == (1, 0), "{}", stats.under("servers"));
    nft(undo, "delete table ip lab")?;
    until(service, |before, stats| stats.count("servers.shortcuts") > before.count("servers.shortcuts"))
}

fn until(service: &Running<'_>, holds: impl Fn(&Stats, &Stats) -> bool) -> Result<()> {
    let (before, deadline) = (service.frontend_stats()?, Instant::now() + PATIENCE);
    loop {
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/1m"])?;
        service.whole(&fetched)?;
        let stats = service.frontend_stats()?;
        if holds(&before, &stats) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "waited too long: {:#}", stats.0);
    }
}

/// The client's packets pass the frontend, and end at a firewall of the backend.
#[test]
fn a_firewall_that_closes_the_ports_of_acks_costs_the_rest_of_a_shortcut() -> Result<()> {
    if !may_run("a_firewall_that_closes_the_ports_of_acks_costs_the_rest_of_a_shortcut") {
        return Ok(());
    }
    start(0, |service| {
        let backend = service.lab.backend();
        is_whole(service, |_| drop_at(backend, "tcp dport 61000-61063"), backend)
    })
}

/// The backend's packets do not reach the client any more, as where a router takes them for forged.
#[test]
fn a_way_to_the_client_that_closes_costs_the_rest_of_a_shortcut() -> Result<()> {
    if !may_run("a_way_to_the_client_that_closes_costs_the_rest_of_a_shortcut") {
        return Ok(());
    }
    start(0, |service| {
        let (client, backend) = (service.lab.client(), service.lab.backend());
        let from = link_address(backend)?;
        is_whole(service, |_| drop_at(client, &format!("ether saddr {from}")), client)
    })
}
