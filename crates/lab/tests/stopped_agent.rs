//! A frontend's agent is stopped (SIGSTOP) or killed. Responses must be whole all the same, and must not wait until the
//! agent continues. A *handoff* lets a backend send a payload on the client's connection; the frontend's agent *claims*
//! the payload: it asks the backend's agent to send it. The *worker* is the frontend's nginx. A *payload* is the body
//! of a response. A body takes the *shortcut* if the backend sends it straight to the client.

mod service;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use service::held::Held;
use service::{FILES, Running, needs_root, start, start_on};
use shunt_lab::{FlowTable, Host, Lab, Options, Role, Stats, fetch};
use shunt_testbed::{wait_for, wait_or_fail};

fn signal(service: &mut Running<'_>, host: &Host, signal: Signal) -> Result<()> {
    service.service.agent_process(host)?.context("the host has an agent")?.signal(signal)
}

/// Asks for a body that is longer than the client's buffers, so that the client's window closes after a part of the
/// body.
fn ask(service: &Running<'_>) -> Result<Held> {
    service.lab.client().run(|| Held::ask(service, "7m", ""))?
}

/// Waits until the frontend's counters fulfil a condition, which `what` names.
fn wait_for_stats(service: &Running<'_>, what: &str, holds: impl Fn(&Stats) -> bool) -> Result<()> {
    wait_for(what, || {
        let stats = service.frontend_stats()?;
        ensure!(holds(&stats), "not yet: {:#}", stats.0);
        Ok(())
    })
}

/// Waits until a response takes the shortcut. Every response that comes until then must be whole.
fn recovers(service: &Running<'_>) -> Result<()> {
    let before = service.counted("servers.shortcuts")?;
    wait_or_fail("a response takes the shortcut", || {
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/1m"]);
        let Ok(fetched) = fetched else { return Ok(false) };
        service.whole(&fetched)?;
        Ok(service.counted("servers.shortcuts")? > before)
    })
}

/// The agent is stopped just before the handoffs. So nobody claims their payloads, and the worker cannot know this yet.
#[test]
fn a_handoff_that_a_stopped_agent_never_reads_goes_on_without_it() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        service.still_good()?;
        signal(service, frontend, Signal::STOP)?;
        let held = [ask(service)?, ask(service)?];
        held.into_iter().try_for_each(|one| one.finish(service))?;
        signal(service, frontend, Signal::CONT)?;
        // The agent reads the handoffs now, and passes none of them on.
        wait_for_stats(service, "two handoffs are unknown, and their bodies are relayed", |stats| {
            (stats.count("agent.handoffs_unknown"), stats.count("servers.relayed_stopped")) == (2, 2)
        })?;
        recovers(service)
    })
}

/// While the frontend's agent is stopped, the backend's agent is killed in the middle of a payload. So the worker has
/// to notice the loss itself.
#[test]
fn a_payload_whose_backend_is_lost_while_the_agent_is_stopped_goes_on() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let held = ask(service)?;
        signal(service, frontend, Signal::STOP)?;
        service.service.kill_agent(backend)?;
        service.service.start_agent(backend)?; // the new agent ends the sockets by which the old one sends
        held.finish(service)?;
        signal(service, frontend, Signal::CONT)?;
        wait_for_stats(service, "the body is relayed", |stats| stats.count("servers.relayed_stopped") == 1)?;
        recovers(service)
    })
}

/// The agent is killed, and is not restarted before the response has ended.
#[test]
fn a_handoff_of_an_agent_that_is_killed_goes_on_without_it() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        signal(service, frontend, Signal::STOP)?;
        let held = ask(service)?;
        service.service.kill_agent(frontend)?;
        held.finish(service)?;
        service.service.restart_agent(frontend)?;
        recovers(service)
    })
}

/// The agent of the handoff is killed, and then its successor. A *ring* is a BPF ring buffer that the agent makes, and
/// by which the kernel answers a worker. The successor's rings have replaced those of the first agent, so the worker
/// has to ask by a ring of the successor.
#[test]
fn a_handoff_of_an_agent_whose_successor_is_killed_goes_on_without_it() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        service.still_good()?;
        let held = ask(service)?;
        let flows = FlowTable::of(service.lab)?;
        wait_for("a handoff is under way", || flows.active() == 1)?;
        service.service.kill_agent(frontend)?;
        service.service.restart_agent(frontend)?;
        recovers(service)?;
        service.service.kill_agent(frontend)?;
        held.finish(service)?;
        service.service.restart_agent(frontend)?;
        recovers(service)
    })
}

/// Name and length of a file that is longer than the client has room for, but fits into the sender's socket.
const QUEUED: (&str, u64) = ("500k", 500 << 10);
const QUEUED_BYTES: &str = "agent.senders.queued_bytes";

/// The frontend waits for the message of the backend's agent that the whole payload was delivered. The message is not
/// sent, or the frontend's agent does not read it.
#[test]
fn a_payload_that_no_agent_calls_delivered_is_complete_when_its_client_says_so() -> Result<()> {
    needs_root();
    let files = [FILES, &[QUEUED]].concat();
    start_on(Lab::builder(), &files, Options::shunt(), |service| {
        service.still_good()?;
        for role in [Role::Backend, Role::Frontend] {
            let (client, backend) = (service.lab.client(), service.lab.backend());
            let queued =
                |service: &Running<'_>| Ok::<_, anyhow::Error>(service.service.stats(backend)?.count(QUEUED_BYTES));
            let before = queued(service)?;
            let held = client.run(|| Held::ask(service, QUEUED.0, ""))??;
            wait_for("the payload is all in its socket", || Ok(queued(service)? >= before + QUEUED.1))?;
            let host = service.lab.hosts_of(role).next().context("a host")?;
            signal(service, host, Signal::STOP)?;
            held.finish_and_ask_again(service, "1k").with_context(|| format!("{role:?} stopped"))?;
            signal(service, host, Signal::CONT)?;
            service.good_again()?;
        }
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.aborted") == 0, "{}", stats.under("servers"));
        ensure!(stats.count("frontend.fe_taken") == 2, "{}", stats.under("frontend"));
        Ok(())
    })
}

/// While the agent is stopped, a handoff begins, and its client leaves. When the agent continues and reads of this
/// handoff, it must not log a failure.
#[test]
fn a_client_that_leaves_is_no_refusal_in_the_log() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        let flows = FlowTable::of(service.lab)?;
        service.still_good()?;
        signal(service, frontend, Signal::STOP)?;
        let held = ask(service)?;
        wait_for("a handoff is under way", || flows.active() == 1)?;
        held.reset()?;
        wait_for("the reset ends the handoff", || flows.active() == 0)?;
        signal(service, frontend, Signal::CONT)?;
        service.until_counted("agent.handoffs_unknown", 1)?;
        service.good_again()?;
        let log = service.service.agent(frontend)?.log();
        ensure!(!log.contains("a handoff failed"), "{log}");
        Ok(())
    })
}
