//! Clients whose TCP lacks options that every TCP has today, or whose segments are tiny. In the tests of the options
//! alone, the link loses packets, because without losses the options make no difference.

use std::time::Duration;

use super::way::{SHORT_PATHS, behind, over, over_with};
use anyhow::Result;
use shunt_lab::{LabBuilder, Link, Role};

const SACK: &str = "ipv4/tcp_sack";
const TIMESTAMPS: &str = "ipv4/tcp_timestamps";
const WINDOW_SCALING: &str = "ipv4/tcp_window_scaling";

/// Returns a lab with an RTT of 10 ms and 1% loss, whose client lacks these options.
fn without(options: &[&'static str]) -> LabBuilder {
    let link = Link::wan(Duration::from_millis(5)).loss(0.01);
    options.iter().fold(behind(link), |lab, option| lab.sysctl(Role::Client, option, "0"))
}

#[test]
fn no_selective_acknowledgements() -> Result<()> {
    over(without(&[SACK]), SHORT_PATHS)
}

#[test]
fn no_timestamps() -> Result<()> {
    over(without(&[TIMESTAMPS]), SHORT_PATHS)
}

#[test]
fn no_window_scaling() -> Result<()> {
    over(without(&[WINDOW_SCALING]), SHORT_PATHS)
}

#[test]
fn none_of_the_three() -> Result<()> {
    over(without(&[SACK, TIMESTAMPS, WINDOW_SCALING]), SHORT_PATHS)
}

/// The segments have the smallest size that Linux takes (TCP_MIN_MSS), with timestamps and without.
#[test]
fn tiny_segments() -> Result<()> {
    for options in [&[][..], &[TIMESTAMPS]] {
        let lab = options
            .iter()
            .fold(behind(Link::wan(Duration::from_millis(5))), |lab, option| lab.sysctl(Role::Client, option, "0"));
        over_with(lab, SHORT_PATHS, |fetch| fetch.mss = Some(88))?;
    }
    Ok(())
}
