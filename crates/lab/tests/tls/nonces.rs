//! No nonce may be used twice with one key, whatever happens. The tests capture the packets that a client gets, and
//! decrypt each TLS record in them. A *payload* is the body of a response. A *handoff* lets a backend send a payload on
//! a client's connection.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Host, Lab, Link, Tcpdump};
use shunt_testbed::wait_for;

use crate::bed::{FILES, on_tls, on_tls_in};
use crate::client::{Client, Shared, Target, Told};
use crate::midway::MIDDLE;
use crate::opened::{Opened, Used, open, records, stream};
use crate::service::{Running, needs_root};

/// Captures the client's packets during `talk`. Returns the capture's file, and the result of `talk`.
pub fn captured<T>(
    service: &mut Running<'_>,
    talk: impl FnOnce(&mut Running<'_>) -> Result<T>,
) -> Result<(PathBuf, T)> {
    let device = device(service.lab.client());
    let capture = Tcpdump::start_whole(service.lab.client(), &device, "tcp port 443")?;
    let told = talk(service)?;
    Ok((capture.stop()?, told))
}

fn device(host: &Host) -> String {
    host.ports()[0].device.clone()
}

/// Opens all records that the server sent on each connection during `talk`. Asserts that no nonce is used twice with
/// one key, on one connection or on two.
pub fn opened(
    service: &mut Running<'_>,
    talk: impl FnOnce(&mut Running<'_>) -> Result<Vec<Told>>,
) -> Result<Vec<Opened>> {
    let (capture, told) = captured(service, talk)?;
    let (capture, mut used) = (std::fs::read(capture)?, Used::new());
    let mut open_one = |told: Told| {
        let wire = stream(&capture, 443, told.client_port)?;
        open(&records(&wire, told.reset)?, &told, &mut used)
            .with_context(|| format!("the connection from port {}", told.client_port))
    };
    let opened = told.into_iter().map(&mut open_one).collect::<Result<Vec<_>>>()?;
    ensure!(used.len() == opened.iter().map(|opened| opened.records).sum::<usize>(), "records and nonces differ");
    Ok(opened)
}

fn many_responses(service: &mut Running<'_>) -> Result<Vec<Told>> {
    let target = Target::of(service);
    service.lab.client().run(|| {
        let mut client = Client::connect(&target)?;
        for (name, _) in FILES.iter().filter(|(_, length)| *length <= 1 << 20).cycle().take(18) {
            client.get(&target, name)?;
        }
        Ok(vec![client.told()?])
    })?
}

#[test]
fn of_many_responses() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        let opened = opened(service, many_responses)?;
        // One KeyUpdate comes before the first response, because tickets were already sent with the first key. One more
        // comes after each response but the last.
        ensure!(opened[0].generations == 18, "{opened:?}");
        ensure!(opened[0].records > 18 * 2 + 64 * 3, "{opened:?}");
        Ok(())
    })
}

#[test]
fn of_many_responses_over_a_link_with_losses() -> Result<()> {
    needs_root();
    let link = Link::wan(Duration::from_millis(2)).loss(0.01);
    on_tls_in(Lab::builder().client_link(link), |service| {
        let opened = opened(service, many_responses)?;
        ensure!(opened[0].generations == 18, "{opened:?}");
        Ok(())
    })
}

#[test]
fn of_resumed_sessions() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let target = Target::of(service);
        let opened = opened(service, |service| {
            service.lab.client().run(|| {
                let (shared, mut told) = (Shared::new(&target)?, Vec::new());
                for connection in 0..4 {
                    let mut client = Client::connect_with(&target, &shared)?;
                    for name in ["64k", "1k", "1m"] {
                        client.get(&target, name)?;
                    }
                    let resumed = client.tls.handshake_kind() == Some(rustls::HandshakeKind::Resumed);
                    ensure!(resumed == (connection > 0), "connection {connection}: resumed {resumed}");
                    told.push(client.told()?);
                }
                Ok(told)
            })?
        })?;
        ensure!(opened.iter().all(|opened| opened.generations >= 3), "{opened:?}");
        Ok(())
    })
}

/// Event that ends a handoff in the middle of a payload.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// The client resets the connection.
    Reset,
    /// The client cannot decrypt a record, and sends an alert.
    Alert,
    /// The backend's file changes.
    FileChanged,
}

fn aborted(target: &Target, end: End, file: &Path) -> Result<Told> {
    let mut client = Client::connect(target)?;
    client.get(target, "64k")?;
    let mut body = client.ask("64m")?;
    client.read(&mut body, MIDDLE)?;
    match end {
        End::Reset => rustix::net::sockopt::set_socket_linger(&client.stream, Some(Duration::ZERO))?,
        End::Alert => client.damage = true,
        End::FileChanged => std::fs::File::options().write(true).open(file)?.write_all_at(b"more", 0)?,
    }
    ensure!(end == End::Reset || client.read(&mut body, 0).is_err(), "the body came whole");
    Ok(Told { reset: true, ..client.told()? })
}

#[test]
fn of_aborted_handoffs() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let (target, file) = (Target::of(service), service.files.join("64m"));
        let before = service.counted("servers.aborted")?;
        let opened = opened(service, |service| {
            let ends = [End::Reset, End::Alert, End::FileChanged].into_iter();
            let told = service.lab.client().run(|| ends.map(|end| aborted(&target, end, &file)).collect())?;
            wait_for("every handoff is given up", || Ok(service.counted("servers.aborted")? >= before + 3))?;
            told
        })?;
        ensure!(opened.iter().all(|opened| opened.generations == 2), "{opened:?}");
        Ok(())
    })
}
