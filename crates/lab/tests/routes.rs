//! Shortcuts over every kind of way: both IP versions, mixed, with and without intermediates, with and without a router
//! between any two hosts. Every byte arrives, every long body by the shortcut, on one whole connection.

mod service;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::{ALONE, FILES, Running, may_run, start_on};
use shunt_lab::{Capture, Expect, Families, Family, Fetch, Lab, LabBuilder, Options, Settings, Tcpdump, file_sha256};

/// Files that are offered.
const LONG: u64 = 4;

fn with(families: Families) -> Options {
    Options { families, ..Options::shunt() }
}

/// Every file over one connection, compared.
fn fetch_all(service: &Running<'_>) -> Result<()> {
    let paths: Vec<String> = FILES.iter().map(|(name, _)| format!("/{name}")).collect();
    for one in Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths)? {
        ensure!(one.status == 200, "{}: status {}", one.path, one.status);
        ensure!(one.sha256 == file_sha256(service.files.join(&one.path[1..]))?, "{}: other bytes", one.path);
    }
    Ok(())
}

/// The same, by shortcuts alone; the connection is whole, as the client sees it.
fn all_by_shortcut(service: &Running<'_>, clients: Family) -> Result<()> {
    let client = service.lab.client();
    let capture = Tcpdump::start(client, "client0", "tcp")?;
    fetch_all(service)?;
    let capture = Capture::read(capture.stop()?)?;
    capture.check(&Expect::of(client.address_of(clients)?).connections(1)).check()?;
    let shortcuts = service.frontend_stats()?.count("servers.shortcuts");
    ensure!(shortcuts == LONG, "{shortcuts} shortcuts: {}", service.service.explain());
    service.no_fallback()
}

/// All four mixtures of IP versions.
fn families() -> impl Iterator<Item = Families> {
    let both = [Family::V4, Family::V6];
    both.into_iter().flat_map(move |clients| both.map(|tiers| Families { clients, tiers, dual_stack: false }))
}

fn over(test: &str, builder: impl Fn() -> LabBuilder) -> Result<()> {
    if !may_run(test) {
        return Ok(());
    }
    for intermediates in 0..=1 {
        for families in families() {
            let lab = builder().ipv6().intermediates(intermediates);
            start_on(lab, FILES, with(families), |service| all_by_shortcut(service, families.clients))
                .with_context(|| format!("{intermediates} intermediates, {families:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn on_one_bridge_in_either_ip_version_and_mixed() -> Result<()> {
    over("on_one_bridge_in_either_ip_version_and_mixed", Lab::builder)
}

#[test]
fn across_routers_in_either_ip_version_and_mixed() -> Result<()> {
    over("across_routers_in_either_ip_version_and_mixed", || Lab::builder().routed())
}

#[test]
fn a_socket_of_both_ip_versions_serves_clients_of_either() -> Result<()> {
    if !may_run("a_socket_of_both_ip_versions_serves_clients_of_either") {
        return Ok(());
    }
    for clients in [Family::V4, Family::V6] {
        let families = Families { clients, tiers: Family::V4, dual_stack: true };
        start_on(Lab::builder().ipv6(), FILES, with(families), |service| all_by_shortcut(service, clients))
            .with_context(|| format!("{families:?}"))?;
    }
    Ok(())
}

/// The backend speaks IPv4 alone, and its agent finds no other address.
fn without_ipv6(lab: &Lab, backend: &str) -> Result<()> {
    let mut flush = Command::new("ip");
    flush.args(["-6", "addr", "flush", "dev", "service0", "scope", "global"]);
    lab.host(backend)?.check(flush).map(drop)
}

#[test]
fn a_client_of_an_ip_version_that_no_backend_has_is_relayed() -> Result<()> {
    if !may_run("a_client_of_an_ip_version_that_no_backend_has_is_relayed") {
        return Ok(());
    }
    for dual_stack in [false, true] {
        let families = Families { clients: Family::V6, tiers: Family::V4, dual_stack };
        let lab = Lab::builder().ipv6();
        service::start_prepared(
            lab,
            FILES,
            with(families),
            |lab| without_ipv6(lab, "backend"),
            |service| {
                fetch_all(service)?;
                let stats = service.frontend_stats()?;
                let relayed = stats.count("servers.relayed_family");
                ensure!(relayed == FILES.len() as u64 && stats.count("servers.shortcuts") == 0, "{:#}", stats.0);
                ensure!(
                    service.service.stats(service.lab.backend())?.count("servers.offers") == 0,
                    "a body was offered"
                );
                Ok(())
            },
        )?;
    }
    Ok(())
}

#[test]
fn where_only_some_backends_have_the_clients_ip_version_the_others_bodies_are_fetched() -> Result<()> {
    if !may_run("where_only_some_backends_have_the_clients_ip_version_the_others_bodies_are_fetched") {
        return Ok(());
    }
    let families = Families { clients: Family::V6, tiers: Family::V4, dual_stack: false };
    let lab = Lab::builder().ipv6().backends(2);
    // What is fetched says nothing of what its connection brings: every long body is to be offered.
    let settings = Settings { http: ALONE, ..Settings::default() };
    service::start_prepared(
        lab,
        FILES,
        Options { settings, ..with(families) },
        |lab| without_ipv6(lab, "backend1"),
        |service| {
            // nginx takes turns between its upstreams: over so many rounds each backend has had each file.
            for _ in 0..4 {
                fetch_all(service)?;
            }
            let stats = service.frontend_stats()?;
            let (shortcuts, fetched) = (stats.count("servers.shortcuts"), stats.count("servers.fetched_begin"));
            ensure!(shortcuts + fetched == 4 * LONG && shortcuts > 0 && fetched > 0, "{:#}", stats.0);
            let refused = stats.count("frontend.fe_refused_family");
            ensure!(refused == fetched, "{refused} refusals for {fetched} fetches: {:#}", stats.0);
            Ok(())
        },
    )
}
