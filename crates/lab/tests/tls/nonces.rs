//! No nonce is used twice, whatever happens: a capture of the client's wire is opened record by record.

use std::time::Duration;

use anyhow::{Result, ensure};
use shunt_lab::{Host, Lab, Link, Tcpdump};

use crate::bed::{FILES, on_tls, on_tls_in};
use crate::client::{Client, Target};
use crate::opened::{Opened, open, stream};
use crate::service::{Running, may_run};

/// Captures the client's wire while it talks, then opens what the server sent: `talk` gives the server's first secret.
pub fn captured(service: &mut Running<'_>, talk: impl FnOnce(&mut Running<'_>) -> Result<Vec<u8>>) -> Result<Opened> {
    let device = device(service.lab.client());
    let capture = Tcpdump::start_whole(service.lab.client(), &device, "tcp port 443")?;
    let secret = talk(service)?;
    open(&stream(&capture.stop()?, 443)?, &secret)
}

fn device(host: &Host) -> String {
    host.ports()[0].device.clone()
}

fn many_responses(service: &mut Running<'_>) -> Result<Vec<u8>> {
    let target = Target::of(service);
    service.lab.client().run(|| -> Result<Vec<u8>> {
        let mut client = Client::connect(&target)?;
        for (name, _) in FILES.iter().filter(|(_, length)| *length <= 1 << 20).cycle().take(18) {
            client.get(&target, name)?;
        }
        let secret = client.secret.0.lock().unwrap().clone();
        Ok(secret)
    })?
}

#[test]
fn of_many_responses() -> Result<()> {
    if !may_run("of_many_responses") {
        return Ok(());
    }
    on_tls(1, |service| {
        let opened = captured(service, many_responses)?;
        // One opens the first response's generation, for tickets went out before; one ends each but the last.
        ensure!(opened.generations == 18, "{} generations", opened.generations);
        ensure!(opened.records > 18 * 2 + 64 * 3, "{} records", opened.records);
        Ok(())
    })
}

#[test]
fn of_many_responses_over_a_link_with_losses() -> Result<()> {
    if !may_run("of_many_responses_over_a_link_with_losses") {
        return Ok(());
    }
    let link = Link::wan(Duration::from_millis(2)).loss(0.01);
    on_tls_in(Lab::builder().client_link(link), |service| {
        let opened = captured(service, many_responses)?;
        ensure!(opened.generations == 18, "{} generations", opened.generations);
        Ok(())
    })
}
