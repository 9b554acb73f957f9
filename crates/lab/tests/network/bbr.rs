//! Links with delays, losses, late and repeated frames, a limited rate, and a small MTU, as in links.rs. Frontend and
//! backend use BBR in place of CUBIC.

use super::way::{PATHS, SHORT_PATHS, behind, far, farthest, lossy, narrow, over, rough, small_mtu, very_lossy};
use anyhow::Result;
use shunt_lab::{LabBuilder, Link, Role};

fn with_bbr(link: Link) -> LabBuilder {
    let tiers = [Role::Frontend, Role::Backend].into_iter();
    tiers.fold(behind(link), |lab, role| lab.sysctl(role, "ipv4/tcp_congestion_control", "bbr"))
}

#[test]
fn a_long_delay() -> Result<()> {
    over(with_bbr(far()), PATHS)
}

#[test]
fn the_longest_delay() -> Result<()> {
    over(with_bbr(farthest()), SHORT_PATHS)
}

#[test]
fn independent_losses() -> Result<()> {
    over(with_bbr(lossy()), PATHS)
}

#[test]
fn many_losses() -> Result<()> {
    over(with_bbr(very_lossy()), SHORT_PATHS)
}

#[test]
fn bursts_of_losses_with_late_and_repeated_frames() -> Result<()> {
    over(with_bbr(rough()), PATHS)
}

#[test]
fn a_low_rate_with_a_short_queue() -> Result<()> {
    over(with_bbr(narrow()), PATHS)
}

#[test]
fn a_small_mtu() -> Result<()> {
    over(with_bbr(small_mtu()), PATHS)
}
