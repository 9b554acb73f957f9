//! SIGHUP: the agent reads its certificates and the list of revoked ones again.

mod service;

use anyhow::{Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use service::held::{HELD_BYTES, Held};
use service::{FILES, Running, needs_root, start, start_on};
use shunt_ca::{Authority, Request};
use shunt_lab::{Host, Lab, Options, fetch};
use shunt_testbed::wait_for;

fn reload(service: &Running<'_>, host: &Host) -> Result<()> {
    let agent = Pid::from_raw(service.service.agent(host)?.pid().cast_signed());
    Ok(kill_process(agent.ok_or_else(|| anyhow::anyhow!("a process has a number"))?, Signal::HUP)?)
}

/// Returns the sum of a counter over all agents and servers.
fn count(service: &Running<'_>, what: &str) -> Result<u64> {
    Ok(service.service.all_stats()?.count(what))
}

#[test]
fn a_revoked_agent_is_turned_away_at_once() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (client, frontend, backend) = (service.lab.client(), service.lab.frontend(), service.lab.backend());
        service.still_good()?;
        let authority = Authority::open(&service.lab.dir().join("ca"));
        authority.revoke(backend.name())?;
        reload(service, frontend)?;
        wait_for("its session ends", || Ok(service.counted("agent.sessions_lost")? == 1))?;
        // The revoked agent tries again and again, and is refused.
        wait_for("it is refused", || Ok(service.counted("agent.strangers")? >= 3))?;
        let shortcuts = service.counted("servers.shortcuts")?;
        service.whole(&fetch(client, service.service.chain().server(), &["/64k", "/1m"])?)?;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.shortcuts") == shortcuts, "a revoked backend sends: {}", stats.under("servers"));
        ensure!(stats.count("agent.sessions") == 1, "it got another session: {}", stats.under("agent"));

        let old = authority.files_of(backend.name());
        std::fs::remove_file(&old.certificate)?;
        std::fs::remove_file(&old.key)?;
        authority.issue(&Request { name: backend.name().to_owned(), addresses: Vec::new(), days: 1 })?;
        reload(service, backend)?;
        service.service.wait_for_agents()?;
        service.still_good()
    })
}

#[test]
fn certificates_that_cannot_be_used_leave_all_as_it_was() -> Result<()> {
    needs_root();
    let files = [FILES, &[("held", HELD_BYTES)][..]].concat();
    start_on(Lab::builder(), &files, Options::shunt(), |service| {
        let (client, frontend, backend) = (service.lab.client(), service.lab.frontend(), service.lab.backend());
        let held = client.run(|| Held::ask(service, "held", ""))??;
        let certificate = Authority::open(&service.lab.dir().join("ca")).files_of(frontend.name()).certificate;
        let good = std::fs::read(&certificate)?;
        let said = |text: &str| -> Result<usize> { Ok(service.service.agent(frontend)?.log().matches(text).count()) };
        reload(service, frontend)?;
        wait_for("they are read again", || Ok(said("read the certificates again")? == 1))?;
        std::fs::write(&certificate, "not a certificate\n")?;
        for turn in 1..=3 {
            reload(service, frontend)?;
            wait_for("the old ones are kept", || {
                Ok(said("cannot use the new certificates; the old ones stay in use")? == turn)
            })?;
        }
        client.run(|| held.finish(service))??;
        ensure!(count(service, "agent.sessions_lost")? == 0, "a session ended");
        // A session that begins now still uses the certificates that the agent read before.
        service.service.kill_agent(backend)?;
        service.service.restart_agent(backend)?;
        std::fs::write(&certificate, good)?;
        service.good_again()
    })
}
