//! Shortcuts (bodies that go straight from the backend to the client) over every kind of path: each IP version and
//! mixtures of both, with and without intermediates, with and without a router between any two hosts. Every byte must
//! arrive, on one intact connection, and every long body must take the shortcut. A backend *offers* a body if it can
//! send the body to the client. A body is *fetched* if it comes through both agents, and *relayed* if it comes through
//! all tiers.

mod service;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::held::{HEARD, Held};
use service::{ALONE, FILES, Running, needs_root, start_on};
use shunt_lab::{Capture, Expect, Families, Family, Fetch, Host, Lab, LabBuilder, Options, Settings, Tcpdump};
use shunt_testbed::{wait_for, wait_or_fail};

/// Number of files that are long enough to be offered.
const LONG: u64 = 4;

fn with(families: Families) -> Options {
    Options { families, ..Options::steady() }
}

/// Fetches every file over one connection, and compares the bytes.
fn fetch_all(service: &Running<'_>) -> Result<()> {
    let paths: Vec<String> = FILES.iter().map(|(name, _)| format!("/{name}")).collect();
    let fetched = Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths);
    service.whole(&fetched.with_context(|| service.service.explain())?)
}

/// Downloads every file. Asserts that every long body took the shortcut, and that the client's capture shows an intact
/// connection.
fn all_by_shortcut(service: &Running<'_>, clients: Family) -> Result<()> {
    let client = service.lab.client();
    let capture = Tcpdump::start(client, "client0", "tcp")?;
    fetch_all(service)?;
    let capture = Capture::read(capture.stop()?)?;
    capture.check(&Expect::of(client.address_of(clients)?).connections(1)).check()?;
    let shortcuts = service.counted("servers.shortcuts")?;
    ensure!(shortcuts == LONG, "{shortcuts} shortcuts: {}", service.service.explain());
    service.no_fallback()
}

/// Returns all four choices of IP versions for clients and for tiers.
fn families() -> impl Iterator<Item = Families> {
    let both = [Family::V4, Family::V6];
    both.into_iter().flat_map(move |clients| both.map(|tiers| Families { clients, tiers, dual_stack: false }))
}

fn over(builder: impl Fn() -> LabBuilder) -> Result<()> {
    needs_root();
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
    over(Lab::builder)
}

#[test]
fn across_routers_in_either_ip_version_and_mixed() -> Result<()> {
    over(|| Lab::builder().routed())
}

#[test]
fn a_socket_of_both_ip_versions_serves_clients_of_either() -> Result<()> {
    needs_root();
    for clients in [Family::V4, Family::V6] {
        let families = Families { clients, tiers: Family::V4, dual_stack: true };
        start_on(Lab::builder().ipv6(), FILES, with(families), |service| all_by_shortcut(service, clients))
            .with_context(|| format!("{families:?}"))?;
    }
    Ok(())
}

/// Removes the backend's IPv6 addresses, so that its agent can send to clients over IPv4 only.
fn without_ipv6(lab: &Lab, backend: &str) -> Result<()> {
    let mut flush = Command::new("ip");
    flush.args(["-6", "addr", "flush", "dev", "service0", "scope", "global"]);
    lab.host(backend)?.check(flush).map(drop)
}

#[test]
fn a_client_of_an_ip_version_that_no_backend_has_is_relayed() -> Result<()> {
    needs_root();
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
                ensure!(
                    relayed == FILES.len() as u64 && stats.count("servers.shortcuts") == 0,
                    "{}",
                    stats.under("servers")
                );
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
    needs_root();
    let families = Families { clients: Family::V6, tiers: Family::V4, dual_stack: false };
    let lab = Lab::builder().ipv6().backends(2);
    // These settings make the backends offer every long body. Otherwise nginx would ask for offers less often, because
    // the bodies of one backend cannot be handed off, and have to be fetched.
    let settings = Settings { http: &["shunt_alone_length 0", "shunt_mean_length 0"], ..Settings::default() };
    service::start_prepared(
        lab,
        FILES,
        Options { settings, ..with(families) },
        |lab| without_ipv6(lab, "backend1"),
        |service| {
            // nginx alternates between its upstreams, so each backend serves some of the long bodies.
            for _ in 0..4 {
                fetch_all(service)?;
            }
            let stats = service.frontend_stats()?;
            let (shortcuts, fetched) = (stats.count("servers.shortcuts"), stats.count("servers.fetched_family"));
            ensure!(shortcuts + fetched == 4 * LONG && shortcuts > 0 && fetched > 0, "{}", stats.under("servers"));
            let refused = stats.count("frontend.fe_refused_family");
            ensure!(refused == fetched, "{refused} refusals for {fetched} fetches: {}", stats.under("servers"));
            Ok(())
        },
    )
}

/// Runs `ip` commands on a host.
fn ip(host: &Host, commands: &[&str]) -> Result<()> {
    commands.iter().try_for_each(|command| {
        let mut ip = Command::new("ip");
        ip.args(command.split(' '));
        host.check(ip).map(drop)
    })
}

/// Runs these `ip` commands on frontend and backend before anything starts. Asserts that every long body then takes the
/// shortcut. With `cut`, the frontend's service interface is cut off.
fn by_shortcut_with_routes(frontend: &[&str], backend: &[&str], cut: bool) -> Result<()> {
    needs_root();
    let prepare = |lab: &Lab| {
        ip(lab.backend(), backend)?;
        ip(lab.frontend(), frontend)?;
        if cut { lab.cut(lab.frontend(), "service0") } else { Ok(()) }
    };
    service::start_prepared(Lab::builder(), FILES, Options::shunt(), prepare, |service| {
        all_by_shortcut(service, Family::V4)
    })
}

#[test]
fn acks_leave_by_the_routes_port_wherever_the_source_address_is() -> Result<()> {
    let commands = ["addr add 10.77.1.200/32 dev lo", "route replace 10.77.1.0/24 dev service0 src 10.77.1.200"];
    let back = ["route add 10.77.1.200/32 via 10.77.1.1"];
    by_shortcut_with_routes(&commands, &back, false)
}

#[test]
fn acks_leave_by_one_of_several_paths() -> Result<()> {
    let commands = ["route add 10.77.1.101/32 src 10.77.1.1 nexthop dev service0 nexthop dev client0"];
    by_shortcut_with_routes(&commands, &[], false)
}

#[test]
fn acks_leave_as_policy_rules_say() -> Result<()> {
    // The frontend's interface in the service network, which has the ACKs' source address, is cut off.
    let back = ["route add 10.77.1.1/32 via 10.77.0.1 dev service0 onlink"];
    let commands = [
        "route add blackhole 10.77.1.101/32",
        "route add 10.77.1.101/32 dev client0 src 10.77.1.1 table 77",
        "rule add to 10.77.1.101 lookup 77",
    ];
    by_shortcut_with_routes(&commands, &back, true)
}

#[test]
fn a_download_goes_on_when_its_acks_leave_by_another_uplink() -> Result<()> {
    needs_root();
    let settings = Settings { http: ALONE, ..Settings::default() };
    start_on(Lab::builder(), FILES, Options { settings, ..Options::shunt() }, |service| {
        let (lab, frontend) = (service.lab, service.lab.frontend());
        let mut held = lab.client().run(|| Held::ask(service, "7m", ""))??;
        held.read_some(HEARD)?;
        let begun = service.counted("frontend.fe_begun")?;
        ensure!(begun == 1, "{begun} handoffs have begun");
        ip(frontend, &["route add 10.77.1.101/32 dev client0 src 10.77.1.1"])?;
        lab.cut(frontend, "service0")?;
        wait_for("the agent has heard of it", || Ok(service.counted("agent.routes_changed")? == 1))?;
        lab.client().run(|| held.finish(service))??;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.shortcuts") == 1, "not by the shortcut: {:#}", stats.0);
        // The route goes back to the first uplink, this time with no response under way.
        lab.join(frontend, "service0")?;
        ip(frontend, &["route del 10.77.1.101/32 dev client0 src 10.77.1.1"])?;
        wait_for("the agent has heard of that", || Ok(service.counted("agent.routes_changed")? == 2))?;
        service.service.wait_for_agents()?;
        service.good_again()
    })
}

#[test]
fn without_a_route_to_a_backends_senders_its_bodies_are_relayed() -> Result<()> {
    needs_root();
    let settings = Settings { agent_backend: "addresses = [\"10.77.1.250\"]\n", ..Settings::default() };
    let prepare = |lab: &Lab| {
        ip(lab.backend(), &["addr add 10.77.1.250/32 dev lo"])?;
        ip(lab.frontend(), &["route add unreachable 10.77.1.250/32"])
    };
    let options = Options { settings, ..Options::shunt() };
    service::start_prepared(Lab::builder(), FILES, options, prepare, |service| {
        let frontend = service.lab.frontend();
        fetch_all(service)?;
        let (stats, backend) = (service.frontend_stats()?, service.service.stats(service.lab.backend())?);
        ensure!(stats.count("agent.routes_lost") == 1 && stats.count("servers.fetched") == 0, "{:#}", stats.0);
        ensure!(backend.count("servers.relayed_offers_limit") == LONG, "{:#}", backend.0);
        wait_for("the log says once that there is no route", || {
            let log = service.service.agent(frontend)?.log();
            let is_it = |line: &&str| line.contains("WARN") && line.contains("no route to a backend");
            let said = log.lines().filter(is_it).count();
            ensure!(said == 1, "said {said} times:\n{log}");
            Ok(())
        })?;
        ip(frontend, &["route replace 10.77.1.250/32 via 10.77.1.101"])?;
        wait_for("there is a route", || Ok(service.counted("agent.routes_changed")? == 1))?;
        // The frontend's servers may hear of the route a moment later.
        wait_or_fail("a shortcut", || {
            fetch_all(service)?;
            Ok(service.counted("servers.shortcuts")? > 0)
        })?;
        service.still_good()
    })
}
