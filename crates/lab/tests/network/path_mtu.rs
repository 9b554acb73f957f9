//! The path to the client changes while a payload is under way. A router then takes only smaller packets than before,
//! and drops larger ones. It reports each drop to the packet's source address, which is the frontend's. A *payload* is
//! a response's body, which the backend sends in the frontend's name.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use super::service::{needs_root, start_on};
use super::way::{FILES, check, patient};
use anyhow::{Context, Result, ensure};
use shunt_lab::{Families, Family, Lab, Link, Options};

/// Sets the MTU of the router's interface towards the client.
fn set_mtu(lab: &Lab, mtu: u16) -> Result<()> {
    let router = lab.switch();
    let device = router.ports().iter().find(|port| port.device.starts_with("cl-")).context("the client's link")?;
    let mut ip = Command::new("ip");
    ip.args(["link", "set", &device.device, "mtu", &mtu.to_string()]);
    router.check(ip).map(drop)
}

/// Downloads bodies over a link that needs about two seconds for 4 MiB. Meanwhile, the MTU is lowered to the two values
/// in `smaller`, in bytes, and then set to 1500 bytes again.
fn changes(family: Family, smaller: [u16; 2]) -> Result<()> {
    needs_root();
    let link = Link::wan(Duration::from_millis(5)).rate(20_000_000, 200_000);
    let lab = Lab::builder().routed().ipv6().client_link(link);
    let options = Options { families: Families::all(family), ..Options::steady() };
    start_on(lab, FILES, options, |service| {
        let service = &*service;
        std::thread::scope(|scope| {
            let fetching = scope.spawn(|| check(service, &patient(service), &["/4m", "/1m", "/4m"]));
            for mtu in [smaller[0], smaller[1], 1500] {
                sleep(Duration::from_millis(400)); // so that the MTU changes while a body is under way
                set_mtu(service.lab, mtu)?;
            }
            fetching.join().expect("the client's thread")
        })?;
        let stats = service.service.all_stats()?;
        let [passed_on, arrived] = ["frontend.fe_in_too_big", "backend.be_in_too_big"].map(|name| stats.count(name));
        ensure!(
            passed_on >= 2 && arrived >= 2,
            "{passed_on} reports passed on, {arrived} arrived: {}",
            stats.under("")
        );
        Ok(())
    })
}

#[test]
fn the_path_mtu_changes_over_ipv4() -> Result<()> {
    changes(Family::V4, [1200, 700])
}

/// The least MTU of IPv6 is 1,280 bytes (RFC 8200, 5).
#[test]
fn the_path_mtu_changes_over_ipv6() -> Result<()> {
    changes(Family::V6, [1400, 1280])
}
