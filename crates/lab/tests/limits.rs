//! Limits of an agent: while one is reached, new responses are relayed (sent through the tiers), and are whole and
//! right. Below the limit, they take shortcuts again (from the backend straight to the client). Responses under way
//! continue. An *offer* is a body that a backend holds ready for a shortcut. A *handoff* lets the backend send the
//! body. A *fetched* body comes through both agents. A *parked* socket of a backend waits for the next body of its
//! client's connection.

mod service;

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::net::{RecvFlags, SendFlags, sockopt};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use service::held::{HELD_BYTES, Held};
use service::{Running, connect_to_agent, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Settings, Stats, fetch};
use shunt_testbed::{PATIENCE, wait_for, wait_or_fail};
use shunt_wire::local::Channel;
use zerocopy::IntoBytes;

const FILES: &[(&str, u64)] = &[("held", HELD_BYTES), ("64k", 64 << 10), ("7m", 7 << 20)];
const LIMIT: u64 = 10;
/// Number of descriptors that a backend's agent may have. The parked sockets of [`CONNECTIONS`] connections alone would
/// need more.
const DESCRIPTORS: u64 = 1000;
const CONNECTIONS: u64 = 1500;
/// Number of descriptors that is less than what an agent keeps free, but enough for the bodies under way and for the
/// test's questions to the agent.
const FEW_DESCRIPTORS: u64 = 60;
/// Greatest number of handoffs above the limit. The server may not have told the agent of these when the limit is
/// reached.
const UNDER_WAY: u64 = 1;
const FETCHES: usize = 2;

fn with_limits(limits: &'static str, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    needs_root();
    let settings = Settings { agent: limits, ..Settings::default() };
    start_on(Lab::builder(), FILES, Options { settings, ..Options::steady() }, test)
}

/// Asks for twice as many bodies as the limit, one after the other, while none of them ends. Then lets all end. Asserts
/// that as many bodies as the limit allows (up to [`UNDER_WAY`] more) took shortcuts. Also asserts that the limit was
/// reached once, and that the other bodies were relayed because of this limit.
fn fill(limits: &'static str, limit: &str, relayed: &str) -> Result<()> {
    with_limits(limits, |service| {
        service.lab.client().run(|| -> Result<()> {
            let held: Vec<Held> = (0..2 * LIMIT).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
            let shortcuts = service.counted("servers.shortcuts")?;
            ensure!((LIMIT..=LIMIT + UNDER_WAY).contains(&shortcuts), "{shortcuts} shortcuts with a limit of {LIMIT}");
            held.into_iter().try_for_each(|one| one.finish(service))?;
            reached(&service.service.all_stats()?, limit, relayed)?;
            until_shortcut(service, shortcuts)
        })??;
        let stats = service.service.all_stats()?;
        ensure!(stats.count("servers.aborted") + stats.count("servers.fetched") == 0, "{}", stats.under("servers"));
        until_idle(service)
    })
}

fn until_idle(service: &Running<'_>) -> Result<()> {
    wait_for("nothing is left", || {
        let stats = service.service.all_stats()?;
        let left = ["handoffs", "payloads", "bytes", "senders"].map(|what| stats.count(&format!("agent.now.{what}")));
        ensure!(left == [0; 4], "left: {}", stats.under("agent"));
        Ok(())
    })
}

/// Asks for a body, and waits until both agents know all handoffs: nginx's worker tells its agent of handoffs only at
/// the end of a pass of the worker's event loop, and that agent the backend's. All bodies that were asked for earlier
/// must still be under way.
fn ask_slowly(service: &Running<'_>) -> Result<Held> {
    let held = Held::ask(service, "held", "")?;
    wait_for("the agents know each handoff", || {
        let stats = service.service.all_stats()?;
        let [begun, known, claimed] =
            ["servers.shortcuts", "agent.now.handoffs", "agent.now.payloads"].map(|name| stats.count(name));
        ensure!(begun == known && begun == claimed, "{begun} handoffs, of which the agents know {known} and {claimed}");
        Ok(())
    })?;
    Ok(held)
}

fn until_shortcut(service: &Running<'_>, before: u64) -> Result<()> {
    wait_or_fail("there is a shortcut, because all are over", || {
        Held::ask(service, "held", "")?.finish(service)?;
        Ok(service.counted("servers.shortcuts")? > before)
    })
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
    fill("[limits]\nhandoffs = 10", "handoffs", "relayed_handoffs_limit")
}

#[test]
fn handoffs_of_one_peer_end_its_offers() -> Result<()> {
    fill("[limits]\nhandoffs_per_peer = 10", "handoffs_per_peer", "relayed_offers_limit")
}

#[test]
fn payloads_in_all() -> Result<()> {
    fill("[limits]\noffers = 10", "offers", "relayed_offers_limit")
}

#[test]
fn payloads_for_one_peer() -> Result<()> {
    fill("[limits]\noffers_per_peer = 10", "offers_per_peer", "relayed_offers_limit")
}

#[test]
fn bytes_in_all() -> Result<()> {
    fill("[limits]\nbytes = 2621440", "bytes", "relayed_offers_limit")
}

#[test]
fn bytes_for_one_peer() -> Result<()> {
    fill("[limits]\nbytes_per_peer = 2621440", "bytes_per_peer", "relayed_offers_limit")
}

fn allow_descriptors(service: &Running<'_>, most: u64) -> Result<()> {
    let agent = Pid::from_raw(service.service.agent(service.lab.backend())?.pid().cast_signed());
    prlimit(agent, Resource::Nofile, Rlimit { current: Some(most), maximum: Some(20000) })?;
    Ok(())
}

/// An agent without free descriptors takes no new offers, sends those that it has, and takes new ones again when it has
/// descriptors.
#[test]
fn descriptors_run_out() -> Result<()> {
    with_limits("", |service| {
        service.lab.client().run(|| -> Result<()> {
            let early: Vec<Held> = (0..4).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
            allow_descriptors(service, FEW_DESCRIPTORS)?;
            service.until_counted("agent.limited.descriptors", 1)?;
            let before = service.counted("servers.shortcuts")?;
            let held: Vec<Held> = (0..LIMIT).map(|_| ask_slowly(service)).collect::<Result<_>>()?;
            let during = service.counted("servers.shortcuts")?;
            ensure!((before, during) == (4, 4), "shortcuts before and during: {before}, {during}");
            early.into_iter().chain(held).try_for_each(|one| one.finish(service))?;
            allow_descriptors(service, 20000)?;
            until_shortcut(service, during)
        })??;
        let backend = service.service.stats(service.lab.backend())?;
        ensure!(backend.count("agent.limited.descriptors") == 1, "{}", backend.under("agent"));
        Ok(())
    })
}

/// Sockets of connections that have ended are parked. They must not take descriptors from new connections.
#[test]
fn parked_senders_give_way() -> Result<()> {
    with_limits("", |service| {
        allow_descriptors(service, DESCRIPTORS)?;
        service.lab.client().run(|| {
            let one = |_| Held::ask(service, "held", "Connection: close\r\n")?.finish(service);
            (0..CONNECTIONS).try_for_each(one).with_context(|| service.service.explain())
        })??;
        let stats = service.service.all_stats()?;
        let counted =
            ["servers.shortcuts", "servers.aborted", "agent.offers_without_descriptor"].map(|name| stats.count(name));
        ensure!(counted == [CONNECTIONS, 0, 0], "shortcuts, aborted, dropped offers: {counted:?}");
        ensure!(stats.count("agent.senders.evicted") > CONNECTIONS - DESCRIPTORS, "{}", stats.under("agent"));
        Ok(())
    })
}

/// While the greatest allowed number of fetches is under way, the frontend asks for no offers, or the backend makes
/// none. So responses are relayed whole. Later, shortcuts are taken again.
fn fill_fetches(limits: &'static str, limit: &str) -> Result<()> {
    with_limits(limits, |service| {
        // A connection from the frontend itself is never handed off, so its bodies are fetched.
        let client = service.lab.frontend();
        let held: Vec<Held> =
            client.run(|| (0..FETCHES).map(|_| Held::ask(service, "7m", "")).collect::<Result<_>>())??;
        // Both agents count the limit as reached: the one that fetches and the one that serves.
        service.until_counted(&format!("agent.limited.{limit}"), 2)?;
        for who in [client, service.lab.client()] {
            service.whole(&fetch(who, service.service.chain().server(), &["/64k", "/7m"])?)?;
        }
        let stats = service.service.all_stats()?;
        let counted = ["servers.fetched", "servers.shortcuts", "servers.fetch_failed", "agent.fetches_limited"]
            .map(|name| stats.count(name));
        ensure!(
            counted == [FETCHES as u64, 0, 0, 0],
            "fetched, shortcuts, failed, refused: {counted:?}\n{:#}",
            stats.0
        );
        client.run(|| held.into_iter().try_for_each(|one| one.finish(service)))??;
        service.lab.client().run(|| until_shortcut(service, 0))?
    })
}

#[test]
fn fetches_in_all() -> Result<()> {
    fill_fetches("[limits]\nfetches = 2", "fetches")
}

#[test]
fn fetches_of_one_peer() -> Result<()> {
    fill_fetches("[limits]\nfetches_per_peer = 2", "fetches_per_peer")
}

/// Connects to a host's agent as a server. Returns `None` if the agent refuses the connection.
fn take_place(host: &Host) -> Result<Option<OwnedFd>> {
    let socket = connect_to_agent(host)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
    // The agent answers this by a welcome, or closes the connection.
    let _ = rustix::net::send(&socket, Channel::Control.hello().as_bytes(), SendFlags::NOSIGNAL);
    let answer = rustix::net::recv(&socket, &mut [0u8; 64][..], RecvFlags::empty());
    Ok(answer.is_ok_and(|(_, bytes)| bytes > 0).then_some(socket))
}

/// All connections that the agent allows to servers are taken. A new nginx worker relays until it gets one.
#[test]
fn connections_of_servers() -> Result<()> {
    const PLACES: u64 = 4;
    with_limits("[limits]\nservers = 4", |service| {
        let (client, frontend) = (service.lab.client(), service.lab.frontend());
        let server = service.service.chain_mut().process(frontend.name()).context("the frontend's server")?;
        server.signal(Signal::KILL)?;
        server.wait(PATIENCE)?;
        // The places of the killed server's connections are free when the agent has seen that they ended.
        let taken: Vec<OwnedFd> =
            (0..PLACES).map(|_| wait_for("a place is free", || take_place(frontend))).collect::<Result<_>>()?;
        for _ in 0..PLACES {
            ensure!(take_place(frontend)?.is_none(), "the agent takes more than {PLACES} connections");
        }
        service.service.chain_mut().restart(frontend)?;
        service.whole(&fetch(client, service.service.chain().server(), &["/64k", "/7m"])?)?;
        drop(taken);
        // A question for counters takes a place, too.
        wait_for("there are places again", || Ok(service.frontend_stats().is_ok()))?;
        client.run(|| until_shortcut(service, 0))??;
        let stats = service.frontend_stats()?;
        // The test's attempts were refused, and at least one of the new worker.
        ensure!(stats.count("agent.servers_refused") > PLACES, "{}", stats.under("agent"));
        ensure!(stats.count("servers.relayed_no_agent") >= 2, "{}", stats.under("servers"));
        Ok(())
    })
}
