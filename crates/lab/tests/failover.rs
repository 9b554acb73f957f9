//! Backends that are lost before or during a download. Another backend continues the download if it surely has the same
//! bytes. Otherwise the client's connection is reset.

mod service;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use service::needs_root;
use shunt_lab::failover::{BODY_BYTES, BOUND, Failover, How, Loss, Rounds};
use shunt_lab::pace::Pace;
use shunt_lab::report::Progress;
use shunt_lab::{Lab, LabBuilder, Role, Wire};

const HOWS: [How; 2] = [How::Kill, How::CutOff];
/// Number of body bytes after which a backend is lost. Near the body's end, the lost backend's kernel could still send
/// all the rest out of its send buffer.
const MIDDLE: u64 = BODY_BYTES / 2;

fn start<T>(builder: LabBuilder, test: impl FnOnce(&mut Failover<'_>) -> Result<T>) -> Result<T> {
    let lab = builder.wire(Wire::Mtu).build()?;
    let mut failover = Failover::start(&lab)?;
    let outcome = test(&mut failover).with_context(|| failover.service.explain())?;
    failover.service.check_running()?;
    Ok(outcome)
}

fn two() -> LabBuilder {
    Lab::builder().backends(2)
}

#[test]
fn ten_downloads_are_whole_whenever_their_backends_are_killed() -> Result<()> {
    needs_root();
    let rounds = start(two(), |failover| Rounds::run(failover, 10, &HOWS, Rounds::seed(), &Progress::to_stderr()))?;
    let faults = rounds.faults(Pace::BesideOthers);
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// Loses a backend after `at` bytes of a download, once in each way of [`HOWS`]. Asserts that the download is whole,
/// ends in time, and takes this number of failovers (moves to another backend).
fn lose_at(builder: LabBuilder, at: u64, failovers: u64) -> Result<()> {
    needs_root();
    start(builder, |failover| {
        let undisturbed = failover.undisturbed(2)?;
        for how in HOWS {
            let download = failover.download(&[Loss { at, how }]).with_context(|| format!("{how} at {at}"))?;
            ensure!(download.failovers == failovers, "{how} at {at}: {download:?}");
            ensure!(
                download.fetched.elapsed < Pace::BesideOthers.bound(undisturbed + BOUND),
                "{how} at {at}: {download:?}"
            );
            failover.bring_back(&download.lost, how)?;
        }
        Ok(())
    })
}

#[test]
fn lost_before_the_header() -> Result<()> {
    needs_root();
    start(two(), |failover| {
        for how in HOWS {
            let lost = failover.lose_next(how)?;
            failover.download(&[])?;
            failover.bring_back(&lost, how)?;
        }
        Ok(())
    })
}

#[test]
fn lost_right_after_the_header() -> Result<()> {
    lose_at(two(), 1, 1)
}

#[test]
fn lost_in_the_middle() -> Result<()> {
    lose_at(two(), MIDDLE, 1)
}

#[test]
fn lost_behind_an_intermediate() -> Result<()> {
    lose_at(two().intermediates(1), MIDDLE, 1)
}

#[test]
fn a_killed_backends_kernel_sends_what_it_has() -> Result<()> {
    needs_root();
    start(two(), |failover| {
        let download = failover.download(&[Loss { at: BODY_BYTES - (128 << 10), how: How::Kill }])?;
        ensure!(download.failovers == 0, "{download:?}");
        failover.bring_back(&download.lost, How::Kill)
    })
}

#[test]
fn lost_twice_in_one_download() -> Result<()> {
    needs_root();
    start(Lab::builder().backends(3), |failover| {
        for how in HOWS {
            let losses = [Loss { at: MIDDLE / 2, how }, Loss { at: MIDDLE + MIDDLE / 8, how }];
            let download = failover.download(&losses).with_context(|| format!("{how} twice"))?;
            ensure!(download.lost.len() == 2 && download.failovers == 2, "{how} twice: {download:?}");
            failover.bring_back(&download.lost, how)?;
        }
        Ok(())
    })
}

/// The backend is off the network for about the time after which an agent takes its peer for lost. So one agent may
/// have ended the session, and the other one not yet. No offer (body that a backend holds ready) may be refused because
/// of this.
#[test]
fn after_a_moment_off_the_network_no_offer_is_refused() -> Result<()> {
    needs_root();
    let lab = Lab::builder().wire(Wire::Mtu).build()?;
    let mut failover = Failover::start_with(&lab, &[])?;
    let backend = lab.hosts_of(Role::Backend).next().context("no backend")?;
    for moment in (700..1100).step_by(50).map(Duration::from_millis) {
        failover.lose(backend, How::CutOff)?;
        std::thread::sleep(moment); // the subject of the test: the time off the network
        failover.bring_back(&[backend.name().to_owned()], How::CutOff)?;
        failover.download(&[]).with_context(|| format!("after {moment:?} off the network"))?;
    }
    let refused = failover.service.stats(lab.frontend())?.count("servers.refused_unknown_peer");
    ensure!(refused == 0, "{refused} offers were refused");
    Ok(())
}

/// Without a strong ETag it is unknown whether another backend has the same bytes, so none continues the download.
#[test]
fn where_nobody_can_go_on_the_client_is_reset_in_time() -> Result<()> {
    needs_root();
    let lab = two().wire(Wire::Mtu).build()?;
    let mut failover = Failover::start_with(&lab, &["etag off"])?;
    for how in HOWS {
        let (download, lost) = failover.try_download(&[Loss { at: MIDDLE, how }]);
        match download {
            Ok(download) => bail!("{how}: the client took a part for the whole: {download:?}"),
            Err(error) => ensure!(
                format!("{error:#}").contains("Connection reset by peer"),
                "{how}: not a reset in 10 s: {error:#}"
            ),
        }
        failover.bring_back(&lost, how)?;
        failover.download(&[])?;
    }
    failover.service.check_running()
}
