//! A frontend's or a backend's agent is told to end (SIGTERM): it drains. New responses are relayed (sent through the
//! tiers), and are whole. Responses under way by a shortcut (from the backend straight to the client) end as usual. If
//! one takes too long, another backend or the tiers continue it.

mod service;

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use service::held::Held;
use service::{ALONE, Running, needs_root, same_file, start_on};
use shunt_lab::{Fetch, Host, Lab, LabBuilder, Options, Role, Settings, fetch};
use shunt_testbed::{PATIENCE, wait_for, wait_or_fail};

/// Names and lengths of files. The last one is larger than the buffers of both ends together.
const FILES: &[(&str, u64)] = &[("64k", 64 << 10), ("1m", 1 << 20), ("held", 24 << 20)];

fn options(agent: &'static str) -> Options {
    Options { settings: Settings { agent, http: ALONE, ..Settings::default() }, ..Options::shunt() }
}

fn terminate(service: &Running<'_>, host: &Host) -> Result<()> {
    let agent = Pid::from_raw(service.service.agent(host)?.pid().cast_signed());
    Ok(kill_process(agent.context("a process has a number")?, Signal::TERM)?)
}

/// Tells an agent to end, and waits until its log says that it takes nothing new.
fn drain(service: &Running<'_>, host: &Host) -> Result<()> {
    terminate(service, host)?;
    wait_for("it drains", || Ok(service.service.agent(host)?.log().contains("draining: no new")))
}

fn ends_well(service: &mut Running<'_>, host: &Host) -> Result<()> {
    let agent = service.service.agent_process(host)?.context("no agent")?;
    let status = agent.wait(PATIENCE)?;
    ensure!(status.success(), "{}: {status}:\n{}", host.name(), agent.log());
    Ok(())
}

fn shortcuts(service: &Running<'_>) -> Result<u64> {
    service.counted("servers.shortcuts")
}

/// Fetches two files, and returns whether both were relayed.
fn is_relayed(service: &Running<'_>) -> Result<bool> {
    let before = shortcuts(service)?;
    service.whole(&fetch(service.lab.client(), service.service.chain().server(), &["/64k", "/1m"])?)?;
    Ok(shortcuts(service)? == before)
}

/// Begins a download by a shortcut. The payload stays under way, because the client does not read for now.
fn begin(service: &Running<'_>) -> Result<Held> {
    // A frontend that has only just started may still relay.
    wait_or_fail("shortcuts are taken", || Ok(!is_relayed(service)?))?;
    let before = service.counted("frontend.fe_begun")?;
    let held = service.lab.client().run(|| Held::ask(service, "held", ""))??;
    wait_or_fail("the handoff begins", || {
        let begun = service.counted("frontend.fe_begun")?;
        ensure!(begun <= before + 1, "{begun} handoffs after {before}");
        Ok(begun == before + 1)
    })?;
    Ok(held)
}

fn begin_again(service: &mut Running<'_>, host: &Host) -> Result<()> {
    service.service.restart_agent(host)?;
    service.service.wait_for_agents()?;
    wait_or_fail("shortcuts are taken again", || Ok(!is_relayed(service)?))
}

fn drains(of: fn(&Lab) -> &Host) -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, options("drain = \"1h\"\n"), |service| {
        let host = of(service.lab);
        let held = begin(service)?;
        drain(service, host)?;
        // Until the other machine's agent has heard that this one drains, responses may still take the shortcut.
        wait_or_fail("responses are relayed", || is_relayed(service))?;
        ensure!(is_relayed(service)?, "a new shortcut of an agent that ends");
        ensure!(service.service.agent_process(host)?.context("no agent")?.try_wait()?.is_none(), "ended too early");
        service.lab.client().run(|| held.finish(service))??;
        ends_well(service, host)?;
        begin_again(service, host)
    })
}

#[test]
fn a_backends_agent_ends_when_its_payloads_have() -> Result<()> {
    drains(Lab::backend)
}

#[test]
fn a_frontends_agent_ends_when_its_handoffs_have() -> Result<()> {
    drains(Lab::frontend)
}

fn serving<'lab>(service: &Running<'lab>) -> Result<&'lab Host> {
    for host in service.lab.hosts_of(Role::Backend) {
        if service.service.stats(host)?.count("agent.claims") > 0 {
            return Ok(host);
        }
    }
    anyhow::bail!("no backend sends")
}

fn takes_too_long(lab: LabBuilder, of: fn(&Running<'_>) -> Result<String>) -> Result<()> {
    needs_root();
    start_on(lab, FILES, options("drain = \"1s\"\n"), |service| {
        let held = begin(service)?;
        let name = of(service)?;
        let host = service.lab.host(&name)?;
        terminate(service, host)?;
        ends_well(service, host)?;
        ensure!(service.service.agent(host)?.log().contains("draining took too long"), "it did not wait");
        if host.role() == Role::Frontend {
            service.service.restart_agent(host)?;
        }
        service.lab.client().run(|| held.finish(service))??;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.failovers") >= 1, "nobody went on: {:#}", stats.0);
        if host.role() == Role::Frontend { Ok(()) } else { begin_again(service, host) }
    })
}

#[test]
fn another_backend_goes_on_with_what_takes_too_long() -> Result<()> {
    takes_too_long(Lab::builder().backends(2), |service| Ok(serving(service)?.name().to_owned()))
}

#[test]
fn a_second_signal_ends_it_at_once() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, options("drain = \"1h\"\n"), |service| {
        let backend = service.lab.backend();
        let held = begin(service)?;
        drain(service, backend)?;
        terminate(service, backend)?;
        ends_well(service, backend)?;
        drop(held);
        begin_again(service, backend)
    })
}

/// Returns a location of the frontend with a filter, which reads bodies and changes nothing. A body that a filter reads
/// is *fetched*: it comes through both agents to the frontend's nginx.
fn filtered(lab: &Lab, host: &Host) -> String {
    let Some(address) = lab.backend().service_address().filter(|_| host.role() == Role::Frontend) else {
        return String::new();
    };
    format!(
        "        location /filtered/ {{\n            proxy_pass http://{address}:80/;\n            \
         sub_filter no-such-text other-text;\n            sub_filter_types *;\n        }}\n"
    )
}

#[test]
fn a_fetch_under_way_comes_to_its_end() -> Result<()> {
    needs_root();
    for of in [Lab::frontend, Lab::backend] {
        let mut options = options("drain = \"1h\"\n");
        options.settings.locations = Some(filtered);
        start_on(Lab::builder(), FILES, options, |service| {
            let (host, client, server) = (of(service.lab), service.lab.client(), service.service.chain().server());
            let mut slow = Fetch::new(server);
            (slow.read_bytes, slow.pause) = (64 << 10, Duration::from_millis(10));
            let got = slow.got.clone();
            let fetched = std::thread::scope(|scope| {
                let download = scope.spawn(|| slow.run(client, &["/filtered/held"]));
                wait_for("the fetch begins", || Ok(got.load(Ordering::Relaxed) > 0))?;
                drain(service, host)?;
                let stats = service.service.stats(host)?;
                let under_way = stats.count("agent.now.fetches_in") + stats.count("agent.now.fetches_out");
                ensure!(under_way == 1, "{under_way} fetches under way: {:#}", stats.0["agent"]);
                download.join().expect("no panic")
            })?;
            same_file(&service.files, "held", &fetched[0].sha256)?;
            ends_well(service, host)?;
            begin_again(service, host)
        })
        .with_context(|| "a fetch at a draining agent")?;
    }
    Ok(())
}
