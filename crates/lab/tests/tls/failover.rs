//! A backend that is lost in mid-payload: another goes on, in the right byte of the right record.

use anyhow::{Result, ensure};
use shunt_lab::{Lab, Role};

use crate::bed::on_tls_in;
use crate::client::{Client, Target};
use crate::nonces::opened;
use crate::service::may_run;

#[test]
fn the_download_goes_on_and_no_nonce_is_used_twice() -> Result<()> {
    if !may_run("the_download_goes_on_and_no_nonce_is_used_twice") {
        return Ok(());
    }
    on_tls_in(Lab::builder().backends(2), |service| {
        let before = service.frontend_stats()?;
        let opened = opened(service, |service| {
            let (lab, target) = (service.lab, Target::of(service));
            let (client, body) = lab.client().run(|| -> Result<_> {
                let mut client = Client::connect(&target)?;
                client.get(&target, "64k")?;
                let mut body = client.ask("64m")?;
                client.read(&mut body, 60 << 20)?;
                Ok((client, body))
            })??;
            // The one that sends: its agent has a payload that is not queued yet.
            let busy = |host: &&shunt_lab::Host| {
                service.service.stats(host).is_ok_and(|stats| stats.count("agent.senders.queued_bytes") > 1 << 20)
            };
            let sender = lab.hosts_of(Role::Backend).find(busy);
            let sender = sender.ok_or_else(|| anyhow::anyhow!("no backend sends"))?;
            service.service.kill_agent(sender)?;
            if let Some(process) = service.service.chain_mut().process(sender.name()) {
                process.signal(rustix::process::Signal::KILL);
            }
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
