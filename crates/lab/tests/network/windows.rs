//! Clients that read slowly, or not at all for some time: their windows close and open again.

use std::time::Duration;

use super::service::{needs_root, start_on};
use super::way::{FILES, behind, check, far, get, patient};
use anyhow::{Result, ensure};
use shunt_lab::{Link, Options, Settings};

#[test]
fn a_slow_reader_far_away() -> Result<()> {
    needs_root();
    start_on(behind(far()), FILES, Options::steady(), |service| {
        let mut fetch = patient(service);
        (fetch.read_bytes, fetch.pause) = (32 << 10, Duration::from_millis(10));
        check(service, &fetch, &["/4m", "/1k", "/100k"])
    })
}

/// Window probes are sent and answered. There are two responses, because the backend sends the second one on the socket
/// that it has kept from the first one.
#[test]
fn a_window_that_is_closed_for_seconds() -> Result<()> {
    needs_root();
    start_on(behind(Link::wan(Duration::from_millis(5)).loss(0.01)), FILES, Options::steady(), |service| {
        let mut fetch = patient(service);
        fetch.stall = Duration::from_secs(12);
        check(service, &fetch, &["/4m", "/1m"])
    })
}

/// The window is closed for longer than nginx and the agent wait by default. Here nginx and the agent are configured to
/// wait for ten minutes.
#[test]
#[ignore = "takes minutes"]
fn a_window_that_is_closed_for_minutes() -> Result<()> {
    needs_root();
    let settings =
        Settings { agent_backend: "progress = \"10m\"", http: &["send_timeout 600s"], ..Settings::default() };
    let options = Options { settings, ..Options::steady() };
    start_on(behind(Link::wan(Duration::from_millis(5))), FILES, options, |service| {
        let mut fetch = patient(service);
        fetch.stall = Duration::from_secs(180);
        check(service, &fetch, &["/4m", "/1m"])
    })
}

/// After nginx's send_timeout the client's connection ends, with Shunt as without.
#[test]
fn a_window_that_stays_closed_ends_as_with_plain_nginx() -> Result<()> {
    needs_root();
    const LONG: &[(&str, u64)] = &[("40m", 40 << 20)];
    for options in [Options::plain(), Options::steady()] {
        let settings = Settings { http: &["send_timeout 5s"], ..Settings::default() };
        start_on(behind(Link::wan(Duration::from_millis(5))), LONG, Options { settings, ..options }, |service| {
            let mut fetch = patient(service);
            fetch.stall = Duration::from_secs(15);
            let ended = fetch.run(service.lab.client(), &["/40m"]);
            ensure!(ended.is_err(), "a client that took nothing for 15 s got the rest");
            // Another connection must not suffer.
            get(service, &patient(service), &["/40m"]).map(drop)
        })?;
    }
    Ok(())
}
