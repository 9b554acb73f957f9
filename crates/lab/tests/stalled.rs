//! A host begins to drop packets between backend and client in the middle of a shortcut (a body that the backend sends
//! straight to the client). All agents run, and the client's packets reach the frontend. The response must be whole all
//! the same.

mod service;

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use service::held::{HEARD, Held};
use service::{FILES, Running, needs_root, start, start_on};
use shunt_lab::{Host, Lab, Link, Options};

const RELAYED: &str = "servers.relayed_stalled";

fn nft(host: &Host, rule: &str) -> Result<()> {
    let mut command = Command::new("nft");
    command.arg(rule);
    host.check(command).map(drop)
}

/// Has a host drop incoming packets that match an nft expression.
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

/// Has a host drop packets in the middle of a shortcut. Asserts that this response and the next one on its connection
/// are whole. Then the packets pass again, and shortcuts must be taken again.
fn is_whole(service: &Running<'_>, host: &Host, what: &str) -> Result<()> {
    // On a busy machine an agent may have lost its session, because it got no processor for a second.
    service.good_again()?;
    let mut held = service.lab.client().run(|| Held::ask(service, "7m", ""))??;
    held.read_some(HEARD)?;
    drop_at(host, what)?;
    held.finish_and_ask_again(service, "1k")?;
    let stats = service.frontend_stats()?;
    ensure!((stats.count(RELAYED), stats.count("servers.aborted")) == (1, 0), "{}", stats.under("servers"));
    nft(host, "delete table ip lab")?;
    service.good_again()
}

fn with_closed_ports(service: &Running<'_>) -> Result<()> {
    is_whole(service, service.lab.backend(), "tcp dport 61000-61063")
}

/// The client's packets reach the frontend, which passes ACKs on to the backend. A firewall on the backend drops them.
#[test]
fn a_firewall_that_closes_the_ports_of_acks_costs_the_rest_of_a_shortcut() -> Result<()> {
    needs_root();
    start(0, |service| with_closed_ports(service))
}

/// A firewall on the backend drops the ACKs of a client whose RTT is 100 ms.
#[test]
fn a_client_far_away_has_time_to_answer() -> Result<()> {
    needs_root();
    let far = Lab::builder().client_link(Link::wan(Duration::from_millis(50)));
    start_on(far, FILES, Options::shunt(), |service| with_closed_ports(service))
}

/// The backend's packets do not reach the client any more, as with a router that takes them for forged.
#[test]
fn a_way_to_the_client_that_closes_costs_the_rest_of_a_shortcut() -> Result<()> {
    needs_root();
    start(0, |service| {
        let from = link_address(service.lab.backend())?;
        is_whole(service, service.lab.client(), &format!("ether saddr {from}"))
    })
}
