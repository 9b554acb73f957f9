//! Two backends whose files have the same name, length and time, and so the same ETag from nginx. If one backend is
//! lost, the other may continue the lost backend's TLS payload only if the files' bytes are the same, too. Otherwise
//! two plaintexts would be encrypted with one nonce. Backends prove that their bytes are the same by a *digest*: the
//! SHA-256 of the file. A *payload* is the body of a response.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use shunt_lab::{Host, Lab, Role};

use crate::bed::{FILES, options};
use crate::client::{Body, Client, Target, Told};
use crate::failover::{lose, until_it_is_quiet, until_its_file_is_known};
use crate::nonces::opened;
use crate::service::{Running, needs_root, start_prepared};

const BODY: &str = "own/body";
const BODY_BYTES: u64 = 64 << 20;

fn locations(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Backend {
        return String::new();
    }
    format!("        location /own/ {{ root {}; shunt_offer on; }}\n", host.dir().display())
}

/// Writes the file of one backend. Its bytes follow from `seed`.
fn write(host: &Host, seed: u64) -> Result<()> {
    std::fs::create_dir_all(host.dir().join("own"))?;
    let path = host.dir().join(BODY);
    let mut file = BufWriter::new(File::create(&path)?);
    let mut state = seed;
    for _ in 0..BODY_BYTES / 8 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        file.write_all(&state.to_le_bytes())?;
    }
    let file = file.into_inner()?;
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000))?;
    Ok(())
}

/// Runs `test` with two backends whose files have the same bytes (`are_same`), or different ones.
fn with_files(are_same: bool, test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    let mut options = options();
    options.settings.locations = Some(locations);
    let prepare = |lab: &Lab| {
        let mut backends = lab.hosts_of(Role::Backend).zip(1..);
        backends.try_for_each(|(host, number)| write(host, if are_same { 1 } else { number }))
    };
    start_prepared(Lab::builder().backends(2), FILES, options, prepare, |service| {
        let mut backends = service.lab.hosts_of(Role::Backend);
        backends.try_for_each(|host| until_it_is_quiet(&host.dir().join(BODY)))?;
        test(service)
    })
}

/// Begins a download, and reads until the backend that sends has told its file's digest. Returns the client, the body
/// and that backend.
fn begin<'lab>(service: &Running<'lab>) -> Result<(Client, Body, &'lab Host)> {
    let target = Target::of(service);
    let (mut client, mut body) = service.lab.client().run(|| -> Result<_> {
        let mut client = Client::connect(&target)?;
        let body = client.ask(BODY)?;
        Ok((client, body))
    })??;
    let sender = until_its_file_is_known(service, &mut client, &mut body)?;
    Ok((client, body, sender))
}

/// Returns a target with the files of the backend that is not `sender`, so that bodies are compared with these files.
fn with_file_of_another(service: &Running<'_>, sender: &Host) -> Result<Target> {
    let other = service.lab.hosts_of(Role::Backend).find(|host| host.name() != sender.name());
    let mut target = Target::of(service);
    target.files = other.context("no other backend")?.dir().to_path_buf();
    Ok(target)
}

/// Begins a download, and kills the agent and the server of the backend that sends it. `rest` reads the rest.
fn download(service: &mut Running<'_>, rest: impl FnOnce(Client, Body) -> Result<Told> + Send) -> Result<Vec<Told>> {
    let lab = service.lab;
    let (client, body, sender) = begin(service)?;
    lose(service, sender)?;
    let told = lab.client().run(|| rest(client, body))??;
    service.service.restart_agent(sender)?;
    service.service.chain_mut().restart(sender)?;
    Ok(vec![told])
}

#[test]
fn nobody_goes_on_with_other_bytes_of_the_same_etag() -> Result<()> {
    needs_root();
    with_files(false, |service| {
        let before = service.frontend_stats()?;
        let opened = opened(service, |service| {
            download(service, |mut client, mut body| {
                let Err(error) = client.read(&mut body, 0) else { bail!("two halves were taken for a whole") };
                let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
                ensure!(kind == Some(ErrorKind::ConnectionReset), "not a reset: {error:#}");
                Ok(Told { reset: true, ..client.told()? })
            })
        })?;
        let after = service.frontend_stats()?;
        let grown = |name: &str| after.count(name) - before.count(name);
        ensure!(opened[0].records > 1, "{opened:?}");
        let counted = ["failovers", "failover_unproven", "aborted"].map(|name| grown(&format!("servers.{name}")));
        ensure!(counted == [0, 1, 1], "{counted:?}");
        Ok(())
    })
}

#[test]
fn another_goes_on_with_the_same_bytes_of_a_file_of_its_own() -> Result<()> {
    needs_root();
    with_files(true, |service| {
        let before = service.frontend_stats()?;
        let mut target = Target::of(service);
        let backend = service.lab.hosts_of(Role::Backend).next().context("no backend")?;
        target.files = backend.dir().to_path_buf();
        opened(service, |service| {
            download(service, |mut client, body| {
                client.finish(&target, body, BODY)?;
                client.told()
            })
        })?;
        let after = service.frontend_stats()?;
        ensure!(after.count("servers.failovers") == before.count("servers.failovers") + 1, "nobody went on");
        Ok(())
    })
}

/// Runs `ip route` on a host.
fn route(host: &Host, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("ip");
    command.arg("route").args(arguments);
    host.check(command).map(drop)
}

/// A file that grows may be a log. If it grows while its payload is sent, no other backend can continue the payload,
/// but the first one sends it to its end.
#[test]
fn a_file_that_grows_after_its_digest_was_told_comes_whole() -> Result<()> {
    needs_root();
    with_files(true, |service| {
        let (mut client, body, sender) = begin(service)?;
        let target = with_file_of_another(service, sender)?;
        let before = service.service.stats(sender)?.count("agent.unproven");
        File::options().append(true).open(sender.dir().join(BODY))?.write_all(b"more")?;
        service.lab.client().run(|| client.finish(&target, body, BODY))??;
        let after = service.service.stats(sender)?.count("agent.unproven");
        ensure!(after > before, "the digest of what the file was still counts");
        Ok(())
    })
}

/// The frontend no longer hears the backend's agent, and the backend's file is overwritten. Another backend goes on
/// with the old bytes. The first backend must not have sealed any of the new bytes under the same record numbers.
#[test]
fn a_file_that_is_overwritten_where_nobody_hears_of_it_shows_in_no_record() -> Result<()> {
    needs_root();
    with_files(true, |service| {
        let before = service.frontend_stats()?;
        opened(service, |service| {
            let (mut client, body, sender) = begin(service)?;
            let target = with_file_of_another(service, sender)?;
            let frontend = service.lab.frontend().service_address().context("the agents' network")?;
            route(sender, &["add", "blackhole", &format!("{frontend}/32")])?;
            let file = File::options().write(true).open(sender.dir().join(BODY))?;
            // First the file only grows. The backend may go on sending a file that grows, but not while the frontend
            // may still rely on the digest that it was told.
            file.write_all_at(b"more", BODY_BYTES)?;
            file.write_all_at(&vec![7; BODY_BYTES as usize], 0)?;
            let told = service.lab.client().run(|| -> Result<_> {
                client.finish(&target, body, BODY)?;
                client.told()
            })?;
            route(sender, &["del", "blackhole", &format!("{frontend}/32")])?;
            Ok(vec![told?])
        })?;
        let after = service.frontend_stats()?;
        ensure!(after.count("servers.failovers") > before.count("servers.failovers"), "nobody went on");
        Ok(())
    })
}
