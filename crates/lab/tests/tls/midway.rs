//! TLS messages that a client sends while a payload (a body that the backend sends to it) is under way.

use std::io::{Read, Write};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_testbed::{same_bytes, wait_for};

use crate::bed::{Before, Counted, on_tls};
use crate::client::{Body, Client, Target, connect_from, request};
use crate::service::{Running, needs_root};

/// Number of bytes of a 64 MiB body that a client still has to read when a test acts. Most of them are not sent by
/// then.
pub const MIDDLE: u64 = 48 << 20;

/// Fetches a small file, begins to read a large one, and calls `midway` in the middle of the large one.
fn in_the_middle(
    service: &Running<'_>,
    midway: impl FnOnce(&mut Client, &Target, Body) -> Result<()> + Send,
) -> Result<Counted> {
    let (before, target) = (Before::of(service)?, Target::of(service));
    service.lab.client().run(|| -> Result<()> {
        let mut client = Client::connect(&target)?;
        client.get(&target, "16k")?;
        let mut body = client.ask("64m")?;
        client.read(&mut body, MIDDLE)?;
        midway(&mut client, &target, body)
    })??;
    before.counted(service)
}

#[test]
fn a_client_that_asks_for_key_updates_gets_its_payload_and_goes_on() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let counted = in_the_middle(service, |client, target, mut body| {
            for left in [MIDDLE - 1, 30 << 20, 29 << 20, 1 << 20] {
                client.tls.refresh_traffic_keys()?;
                client.read(&mut body, left)?;
            }
            client.finish(target, body, "64m")?;
            client.get(target, "1m")?;
            client.get(target, "1k")
        })?;
        counted.ensure("shortcuts", 4)
    })
}

#[test]
fn a_close_notify_in_mid_payload_lets_the_rest_come() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let counted = in_the_middle(service, |client, target, body| {
            client.tls.send_close_notify();
            client.finish(target, body, "64m")
        })?;
        counted.ensure("shortcuts", 2)?;
        counted.ensure("aborted", 0)
    })
}

#[test]
fn a_fatal_alert_in_mid_payload_ends_the_handoff() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let counted = in_the_middle(service, |client, _, mut body| {
            client.damage = true;
            ensure!(client.read(&mut body, 0).is_err(), "a broken record was taken");
            // The client has sent an alert, and its socket is still open. Bytes that were under way may still come, and
            // then a reset, long before the body's end. If nothing comes, the read fails with another error.
            let mut more = 0;
            let mut bytes = vec![0; 1 << 16];
            let error = loop {
                match std::io::Read::read(&mut client.stream, &mut bytes) {
                    Ok(0) => break None,
                    Ok(read) => more += read as u64,
                    Err(error) => break Some(error.kind()),
                }
            };
            ensure!(error == Some(std::io::ErrorKind::ConnectionReset), "{error:?} after {more} bytes");
            ensure!(more < MIDDLE, "{more} bytes came");
            Ok(())
        })?;
        counted.ensure("aborted", 1)?;
        let target = Target::of(service);
        service.lab.client().run(|| Client::connect(&target)?.get(&target, "1m"))?
    })
}

#[test]
fn a_reset_in_mid_payload_hurts_nobody_else() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let (before, target) = (service.frontend_stats()?, Target::of(service));
        service.lab.client().run(|| -> Result<()> {
            let mut other = Client::connect(&target)?;
            let mut others = other.ask("64m")?;
            other.read(&mut others, MIDDLE)?;
            let mut client = Client::connect(&target)?;
            let mut body = client.ask("64m")?;
            client.read(&mut body, MIDDLE)?;
            rustix::net::sockopt::set_socket_linger(&client.stream, Some(Duration::ZERO))?;
            drop(client);
            other.finish(&target, others, "64m")?;
            other.get(&target, "1m")
        })??;
        let before = before.count("servers.aborted");
        wait_for("somebody notices the reset", || Ok(service.counted("servers.aborted")? > before))
    })
}

/// A client has a plain and a TLS connection from the same port. While the backend sends on the plain one, its socket
/// for the TLS connection would have the same addresses and ports as that for the plain one. So the backend refuses to
/// send TLS payloads. No record of these payloads has been sent by then, so the frontend's nginx may encrypt and send
/// them itself.
#[test]
fn one_client_port_to_both_ports_of_the_frontend_gets_all_bodies() -> Result<()> {
    needs_root();
    const PORT: u16 = 19_997;
    on_tls(0, |service| {
        let (before, target) = (Before::of(service)?, Target::of(service));
        let plain = service.service.chain().server().port();
        service.lab.client().run(|| -> Result<()> {
            let mut first = connect_from(PORT, &target, plain)?;
            first.write_all(request("64m").as_bytes())?;
            let mut answer = vec![0; 100_000];
            first.read_exact(&mut answer)?;
            let mut second = Client::connect_from(PORT, &target)?;
            (0..4).try_for_each(|_| second.get(&target, "1m"))?;
            let header = answer.windows(4).position(|four| four == b"\r\n\r\n").context("no header's end")? + 4;
            answer.resize(header + (64 << 20), 0);
            first.read_exact(&mut answer[100_000..])?;
            same_bytes(&answer[header..], &std::fs::read(target.files.join("64m"))?).context("the first connection")?;
            second.get(&target, "1m")
        })??;
        let counted = before.counted(service)?;
        let (shortcuts, refused) = (counted.grown("shortcuts"), counted.grown("fetched_refused"));
        ensure!(shortcuts + refused == 6 && refused > 0, "{shortcuts} shortcuts, {refused} fetched");
        counted.ensure("aborted", 0)
    })
}
