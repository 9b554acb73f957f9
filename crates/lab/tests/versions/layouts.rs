//! An agent starts while connections still need the steering programs of another *layout* (version of the contents of
//! the pinned BPF maps). Only tests build that other layout: its `struct flow` differs from that of every version
//! (feature `test-layout` of shunt-handoff). A body takes the *shortcut* if the backend sends it straight to the
//! client. A body is *relayed* if it comes through all tiers.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_lab::{Host, Lab, Options, Release, Releases, Role, Settings, fetch};
use shunt_testbed::{PATIENCE, wait_or_fail};

use crate::rolling::upgrade_agent;
use crate::service::held::Held;
use crate::service::{ALONE, Running, needs_root, start_on};
use crate::{NO_AGENT, no_errors_but};

/// Part of the line that nginx logs if a payload (body) stops before its end. The frontend's old agent ends its session
/// with the backend's agent. So the backend's agent ends the socket that sends the payload, unless the whole file is
/// already in this socket. The frontend's nginx then relays the rest.
const STOPPED: &str = "has stopped at byte";
/// Number of the tests' layout (crates/handoff/build.rs).
const TEST_LAYOUT: u32 = 32;
/// Names and lengths of files. `held` is larger than the buffers of both ends together; `fits` fits into a sender's
/// buffer.
const FILES: &[(&str, u64)] = &[("64k", 64 << 10), ("1m", 1 << 20), ("fits", 300 << 10), ("held", 24 << 20)];

fn options() -> Options {
    let releases = |host: &Host| {
        let agent = if host.role() == Role::Frontend { Release::OtherLayout } else { Release::This };
        Releases { agent, server: Release::This }
    };
    let settings = Settings { http: ALONE, agent_frontend: "flow_quiet = \"1s\"\n", ..Settings::default() };
    Options { releases: Some(releases), settings, ..Options::shunt() }
}

fn run(test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, options(), |service| {
        test(service).with_context(|| service.service.explain())?;
        no_errors_but(service, &[NO_AGENT, STOPPED])
    })
}

/// Returns the pin directories of other layouts that stay on the frontend, because connections need their programs.
fn older(service: &Running<'_>) -> Result<Vec<PathBuf>> {
    let pins = format!("{}{}", service.lab.id().pins_prefix(), service.lab.frontend().name());
    let entries = std::fs::read_dir(&pins).with_context(|| pins.clone())?;
    let entries = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    Ok(entries.into_iter().filter(|path| path.is_dir()).collect())
}

fn begun(service: &Running<'_>) -> Result<u64> {
    Ok(service.frontend_stats()?.count("frontend.fe_begun"))
}

/// Begins a download by a shortcut. The payload stays under way, because the client does not read for now.
fn begin(service: &Running<'_>, name: &str) -> Result<Held> {
    let before = begun(service)?;
    let held = service.lab.client().run(|| Held::ask(service, name, ""))??;
    wait_or_fail("the handoff begins", || Ok(begun(service)? > before))?;
    Ok(held)
}

/// Waits until new connections take the shortcut.
fn until_shortcuts(service: &Running<'_>) -> Result<()> {
    wait_or_fail("new connections take the shortcut", || {
        let before = begun(service)?;
        service.whole(&fetch(service.lab.client(), service.service.chain().server(), &["/64k", "/1m"])?)?;
        Ok(begun(service)? > before)
    })
}

/// Upgrades the frontend's agent by `replace` while two downloads are under way. Asserts that both come whole and that
/// their connections go on. When these connections have ended, nothing of the older layout may be left.
fn comes_to_its_end(service: &mut Running<'_>, replace: fn(&mut Running<'_>, &Host) -> Result<()>) -> Result<()> {
    let (frontend, client) = (service.lab.frontend(), service.lab.client());
    let mut connections = [begin(service, "held")?, begin(service, "fits")?];
    replace(service, frontend)?;
    let stays = older(service)?;
    ensure!(stays.len() == 1 && stays[0].ends_with(format!("older_{TEST_LAYOUT}")), "{stays:?} stay");
    until_shortcuts(service)?;
    let before = begun(service)?;
    client.run(|| connections.iter_mut().try_for_each(|held| held.read_rest(service)))??;
    ensure!(older(service)? == stays, "the programs of open connections have gone");
    let refused = || Ok::<_, anyhow::Error>(service.frontend_stats()?.count("frontend.fe_refused_older"));
    ensure!(refused()? == 0, "something began on a connection of another layout");
    let next = |held: &mut Held| held.ask_for_next("1m").and_then(|()| held.read_rest(service));
    client.run(|| connections.iter_mut().try_for_each(next))??;
    // There may be only one refusal: if the server sent the rest of one payload itself, it tries no further handoff
    // on that connection.
    ensure!(refused()? >= 1 && begun(service)? == before, "{} refused", refused()?);
    drop(connections);
    wait_or_fail("the older layout has gone", || Ok(older(service)?.is_empty()))?;
    until_shortcuts(service)
}

#[test]
fn downloads_go_on_when_an_agent_of_another_layout_takes_over() -> Result<()> {
    run(|service| comes_to_its_end(service, |service, host| upgrade_agent(service, host, Release::This)))
}

#[test]
fn downloads_go_on_when_an_agent_was_killed_and_one_of_another_layout_starts() -> Result<()> {
    run(|service| {
        comes_to_its_end(service, |service, host| {
            service.service.set_agent_release(host, Release::This)?;
            service.service.kill_agent(host)?;
            service.service.restart_agent(host)
        })
    })
}

#[test]
fn an_agent_that_comes_back_takes_its_own_layout_back() -> Result<()> {
    run(|service| {
        let (frontend, client) = (service.lab.frontend(), service.lab.client());
        let mut first = begin(service, "held")?;
        upgrade_agent(service, frontend, Release::This)?;
        let mut second = {
            until_shortcuts(service)?;
            begin(service, "held")?
        };
        upgrade_agent(service, frontend, Release::OtherLayout)?;
        let stays = older(service)?;
        ensure!(stays.len() == 1 && !stays[0].ends_with(format!("older_{TEST_LAYOUT}")), "{stays:?} stay");
        client.run(|| first.read_rest(service).and_then(|()| second.read_rest(service)))??;
        drop((first, second));
        wait_or_fail("the other layout has gone", || Ok(older(service)?.is_empty()))?;
        until_shortcuts(service)
    })
}

/// `shuntd --detach` removes all that agents have left in the kernel, of each layout.
#[test]
fn detaching_takes_all_layouts_out() -> Result<()> {
    run(|service| {
        let frontend = service.lab.frontend();
        let held = begin(service, "held")?;
        upgrade_agent(service, frontend, Release::This)?;
        ensure!(older(service)?.len() == 1, "nothing stays");
        let agent = service.service.agent_process(frontend)?.context("it has an agent")?;
        agent.signal(Signal::TERM)?;
        agent.wait(PATIENCE)?;
        let mut detach = std::process::Command::new(Release::This.shuntd()?);
        detach.arg("--config").arg(frontend.dir().join("shuntd.toml")).arg("--detach");
        frontend.check(detach)?;
        ensure!(older(service).is_err(), "pins stay");
        ensure!(service.lab.client().run(|| held.ends_early())??, "its programs are gone, and it went on");
        service.service.restart_agent(frontend)?;
        until_shortcuts(service)
    })
}
