//! A backend is lost in the middle of a payload. Another backend continues at the right byte of the right record. A
//! *payload* is the body of a response.

use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use shunt_handoff::identity::FileIdentity;
use shunt_lab::{Host, Lab, Role};
use shunt_testbed::wait_for;

use crate::bed::on_tls_in;
use crate::client::{Body, Client, Target};
use crate::nonces::opened;
use crate::service::{Running, needs_root};

/// Waits until a file has been unchanged for more than 4 s. A backend that sends the file after that tells the frontend
/// the file's digest (SHA-256).
pub fn until_it_is_quiet(file: &Path) -> Result<()> {
    wait_for("the file is old enough", || {
        Ok(FileIdentity::of(&file.metadata()?).is_older_than(Duration::from_secs(4), SystemTime::now()))
    })
}

/// Reads a body slowly until the backend that sends it has told the digest of the body's file. Returns that backend.
pub fn until_its_file_is_known<'lab>(
    service: &Running<'lab>,
    client: &mut Client,
    body: &mut Body,
) -> Result<&'lab Host> {
    let told = |host: &&Host| service.service.stats(host).is_ok_and(|stats| stats.count("agent.proven") > 0);
    loop {
        if let Some(sender) = service.lab.hosts_of(Role::Backend).find(told) {
            return Ok(sender);
        }
        let left = body.left.checked_sub(64 << 10).context("no backend has told which file it sends")?;
        client.read(body, left)?;
        std::thread::sleep(Duration::from_millis(100)); // the pace of a slow client, whose body lasts
    }
}

/// Kills a backend's agent and server.
pub fn lose(service: &mut Running<'_>, backend: &Host) -> Result<()> {
    service.service.kill_agent(backend)?;
    let server = service.service.chain_mut().process(backend.name()).context("a backend has a server")?;
    server.signal(rustix::process::Signal::KILL)
}

#[test]
fn the_download_goes_on_and_no_nonce_is_used_twice() -> Result<()> {
    needs_root();
    on_tls_in(Lab::builder().backends(2), |service| {
        until_it_is_quiet(&service.files.join("64m"))?;
        let before = service.frontend_stats()?;
        let opened = opened(service, |service| {
            let (lab, target) = (service.lab, Target::of(service));
            let (mut client, mut body) = lab.client().run(|| -> Result<_> {
                let mut client = Client::connect(&target)?;
                client.get(&target, "64k")?;
                let body = client.ask("64m")?;
                Ok((client, body))
            })??;
            let sender = until_its_file_is_known(service, &mut client, &mut body)?;
            lose(service, sender)?;
            let told = lab.client().run(|| -> Result<_> {
                let mut client = client;
                client.finish(&target, body, "64m")?;
                client.get(&target, "1m")?;
                Ok(vec![client.told()?])
            })??;
            service.service.restart_agent(sender)?;
            service.service.chain_mut().restart(sender)?;
            Ok(told)
        })?;
        let after = service.frontend_stats()?;
        ensure!(after.count("servers.failovers") > before.count("servers.failovers"), "nobody went on");
        ensure!(opened[0].generations == 3, "{opened:?}");
        Ok(())
    })
}
