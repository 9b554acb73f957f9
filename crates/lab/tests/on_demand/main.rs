//! Unmodified nginx on every tier, under `shunt run`. Bodies go from the backend straight to the client, past all other
//! tiers. A *handoff* is a body or part of one that the frontend's program lets the backend's agent send. A *store* is
//! the part of an agent that has its machine's bodies. Memory is *absent* if it stands for bytes of a store, and gets
//! them when a program touches it.

mod descriptors;
mod files;
mod killed;
mod lost;
mod mixed;
mod program;
mod refused;
#[path = "../service/mod.rs"]
mod service;
mod sources;
mod uploads;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lost::until_handed_off;
use service::{FILES, Running, needs_root, start_on};
use shunt_lab::{ByteMeter, Fetch, Host, Lab, OnDemand, Options, Role, Settings};
use shunt_testbed::PATIENCE;

/// Longest time that a client waits for anything.
const LIMIT: Duration = PATIENCE;

fn options() -> Options {
    Options { on_demand: Some(OnDemand::CHECKED), ..Options::default() }
}

fn run(options: Options, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    run_with(FILES, options, what)
}

fn run_with(files: &[(&str, u64)], options: Options, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    needs_root();
    start_on(Lab::builder().intermediates(1), files, options, |service| {
        what(service).with_context(|| service.service.explain())
    })
}

/// Returns how many bytes the frontend's nginx has handed off: it has written them to clients, and another machine
/// sends them.
fn handed_off(service: &Running<'_>) -> Result<u64> {
    service.counted("store.by_program.nginx.handed_off")
}

fn intermediate<'a>(service: &Running<'a>) -> Result<&'a Host> {
    service.lab.intermediates().first().copied().context("an intermediate")
}

/// Returns the path of every file, `times` times.
fn paths(times: usize) -> Vec<String> {
    (0..times).flat_map(|_| FILES.iter().map(|(name, _)| format!("/{name}"))).collect()
}

fn long_bytes(times: u64) -> u64 {
    FILES.iter().map(|(_, length)| length).filter(|length| **length >= 64 << 10).sum::<u64>() * times
}

#[test]
fn bodies_pass_by_all_tiers() -> Result<()> {
    run(options(), |service| {
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
        ensure!(service.counted("frontend.fe_cancelled")? == 0);
        Ok(())
    })
}

#[test]
fn requests_that_do_not_wait_are_answered_in_order() -> Result<()> {
    run(options(), |service| {
        let fetch = Fetch { pipeline: true, ..Fetch::new(service.service.chain().server()) };
        service.whole(&fetch.run(service.lab.client(), &paths(8))?)
    })
}

#[test]
fn slow_readers_and_closed_connections_get_all() -> Result<()> {
    run(options(), |service| {
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

/// Returns configuration that makes the frontend's nginx send bodies in chunks, with a trailer. nginx need not read the
/// bodies for this.
fn trailers(_: &Lab, host: &Host) -> String {
    if host.role() == Role::Frontend { "add_trailer X-End yes;\n".to_owned() } else { String::new() }
}

#[test]
fn chunks_end_where_they_do() -> Result<()> {
    let settings = Settings { locations: Some(trailers), ..Settings::default() };
    run(Options { settings, ..options() }, |service| {
        until_handed_off(service)?;
        let server = service.service.chain().server();
        let before = handed_off(service)?;
        let fetched = Fetch::new(server).run(service.lab.client(), &paths(4))?;
        service.whole(&fetched)?;
        ensure!(fetched.iter().all(|one| one.field("transfer-encoding") == Some("chunked")), "chunks");
        let (handed, long) = (handed_off(service)? - before, long_bytes(4));
        // One byte in 20 is enough: when a handoff has ended, nginx may write further bytes of the body to the
        // connection itself.
        ensure!(handed * 20 > long, "{handed} of {long} bytes were handed off");
        Ok(())
    })
}
