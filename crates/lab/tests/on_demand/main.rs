//! Unmodified nginx on every tier, under `shunt run`: bodies go from the backend to the client, past all tiers between.

mod descriptors;
mod files;
mod lost;
mod program;
#[path = "../service/mod.rs"]
mod service;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use service::{FILES, Running, may_run, start_on};
use shunt_lab::{ByteMeter, Fetch, Host, Lab, OnDemand, Options, Settings};

fn options() -> Options {
    Options { on_demand: Some(OnDemand::default()), ..Options::default() }
}

fn run(test: &str, options: Options, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    run_with(test, FILES, options, what)
}

fn run_with(
    test: &str,
    files: &[(&str, u64)],
    options: Options,
    what: impl FnOnce(&mut Running<'_>) -> Result<()>,
) -> Result<()> {
    if !may_run(test) {
        return Ok(());
    }
    start_on(Lab::builder().intermediates(1), files, options, |service| {
        what(service).with_context(|| service.service.explain())
    })
}

/// What a host's nginx has written absent, and not had.
fn handed_off(service: &Running<'_>) -> Result<u64> {
    Ok(service.frontend_stats()?.count("store.by_program.nginx.handed_off"))
}

fn intermediate<'a>(service: &Running<'a>) -> Result<&'a Host> {
    service.lab.intermediates().first().copied().context("an intermediate")
}

/// Every file so often, on one connection.
fn paths(times: usize) -> Vec<String> {
    (0..times).flat_map(|_| FILES.iter().map(|(name, _)| format!("/{name}"))).collect()
}

fn long_bytes(times: u64) -> u64 {
    FILES.iter().map(|(_, length)| length).filter(|length| **length >= 64 << 10).sum::<u64>() * times
}

#[test]
fn bodies_pass_by_all_tiers() -> Result<()> {
    run("bodies_pass_by_all_tiers", options(), |service| {
        let server = service.service.chain().server();
        service.whole(&Fetch::new(server).run(service.lab.client(), &paths(1))?)?;
        let meters = [service.lab.frontend(), intermediate(service)?].map(ByteMeter::start);
        let before = handed_off(service)?;
        service.whole(&Fetch::new(server).run(service.lab.client(), &paths(5))?)?;
        let (handed, long) = (handed_off(service)? - before, long_bytes(5));
        ensure!(handed * 10 > long * 9, "{handed} of {long} bytes were handed off");
        for meter in meters {
            let bytes = meter?.total()?;
            ensure!((bytes.rx_bytes + bytes.tx_bytes) * 5 < long, "{bytes:?} of {long} at a tier that is passed by");
        }
        ensure!(service.frontend_stats()?.count("frontend.fe_cancelled") == 0);
        Ok(())
    })
}

#[test]
fn requests_that_do_not_wait_are_answered_in_order() -> Result<()> {
    run("requests_that_do_not_wait_are_answered_in_order", options(), |service| {
        let fetch = Fetch { pipeline: true, ..Fetch::new(service.service.chain().server()) };
        service.whole(&fetch.run(service.lab.client(), &paths(8))?)
    })
}

#[test]
fn slow_readers_and_closed_connections_get_all() -> Result<()> {
    run("slow_readers_and_closed_connections_get_all", options(), |service| {
        let server = service.service.chain().server();
        let slow = Fetch { pause: Duration::from_millis(2), read_bytes: 20_000, ..Fetch::new(server) };
        service.whole(&slow.run(service.lab.client(), &["/1m", "/7m", "/64k"])?)?;
        let closing = Fetch { headers: vec!["Connection: close".to_owned()], ..slow };
        for path in paths(2) {
            service.whole(&closing.run(service.lab.client(), &[path])?)?;
        }
        Ok(())
    })
}

/// The frontend's responses have no length: their end is written behind the body.
#[test]
fn chunks_end_where_they_do() -> Result<()> {
    let locations = |_: &Lab, _: &Host| String::new();
    let settings = Settings { http: &["ssi on", "ssi_types *"], locations: Some(locations), ..Settings::default() };
    run("chunks_end_where_they_do", Options { settings, ..options() }, |service| {
        let server = service.service.chain().server();
        service.whole(&Fetch::new(server).run(service.lab.client(), &paths(4))?)
    })
}
