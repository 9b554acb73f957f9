//! Clients whose ACKs arrive late, and only a few of them: the link holds ACKs back for a while, and then lets only the
//! newest one pass.

use std::time::Duration;

use super::service::{needs_root, start_on};
use super::way::{FILES, PATHS, behind, check, patient};
use anyhow::{Result, ensure};
use shunt_lab::{Link, Options, Role};

/// Tests a path with an RTT of 20 ms whose ACKs pass once in each `slot`, first with CUBIC, then with BBR.
fn acks_once_in(slot: Duration) -> Result<()> {
    needs_root();
    for control in ["cubic", "bbr"] {
        let tiers = [Role::Frontend, Role::Backend].into_iter();
        let lab = behind(Link::wan(Duration::from_millis(10)).ack_slot(slot));
        let lab = tiers.fold(lab, |lab, role| lab.sysctl(role, "ipv4/tcp_congestion_control", control));
        start_on(lab, FILES, Options::steady(), |service| {
            check(service, &patient(service), PATHS)?;
            let acks = service.lab.cables()[0].sent();
            ensure!(acks.thinned > 100, "the link thinned no ACKs: {acks:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn stretched_acks() -> Result<()> {
    acks_once_in(Duration::from_millis(5))
}

#[test]
fn delayed_acks() -> Result<()> {
    acks_once_in(Duration::from_millis(40))
}
