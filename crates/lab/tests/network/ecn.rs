//! Explicit congestion notification (RFC 3168): client and frontend have agreed on it, and a router marks packets.
//!
//! A backend's socket has no ECN, because TCP_REPAIR cannot set it. So the router drops payload packets in place of
//! marking them. Only the frontend's own packets, with the responses' headers, get marks. The client's echoes of these
//! marks reach the backend, too.

use std::time::Duration;

use super::service::{needs_root, start_on};
use super::way::{FILES, PATHS, TcpCounters, behind, check, patient};
use anyhow::{Result, ensure};
use shunt_lab::{Link, Options, Role};

#[test]
fn headers_that_meet_congestion() -> Result<()> {
    needs_root();
    let lab = behind(Link::wan(Duration::from_millis(10)).marking(0.9));
    let lab = [Role::Client, Role::Frontend, Role::Backend]
        .iter()
        .fold(lab, |lab, role| lab.sysctl(*role, "ipv4/tcp_ecn", "1"));
    start_on(lab, FILES, Options::steady(), |service| {
        check(service, &patient(service), PATHS)?;
        let marked = service.lab.cables()[0].received().marked;
        ensure!(marked > 0, "the link marked nothing");
        let seen = TcpCounters(service.lab.client()).read("InCEPkts")?;
        ensure!(seen > 0, "the client saw no mark");
        Ok(())
    })
}
