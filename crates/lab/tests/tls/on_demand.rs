//! Unmodified nginx on every tier, under `shunt run`: bodies go sealed from the backend to TLS clients, past all tiers
//! between.

use std::process::Command;

use anyhow::{Result, ensure};
use shunt_lab::{ByteMeter, OnDemand, Options, Settings};

use crate::bed::{FILES, authority, compare, on_tls_with, urls};
use crate::client::{Client, Shared, Target, Told};
use crate::nonces::opened;
use crate::service::{Running, may_run};

fn options() -> Options {
    let settings = Settings { tls: Some(""), ..Settings::default() };
    Options { on_demand: Some(OnDemand::default()), settings, ..Options::default() }
}

/// What the frontend's nginx has written absent to clients, and not had.
fn handed_off(service: &Running<'_>) -> Result<u64> {
    Ok(service.frontend_stats()?.count("store.by_program.nginx.handed_off"))
}

fn run(test: &str, what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    if may_run(test) { on_tls_with(options(), what) } else { Ok(()) }
}

/// What one program may leave in a store at a time: of a body that is longer the rest may come for real.
const STORED: u64 = 32 << 20;

/// All files up to so long, so often, over one connection of curl's: how long those are together that are long enough to be
/// handed off.
fn curl(service: &Running<'_>, times: usize, longest: u64, more: &[&str]) -> Result<u64> {
    let mut urls = urls(service, 2 * FILES.len() * times);
    let length = |name: &str| FILES.iter().find(|(file, _)| *file == name).map_or(0, |(_, length)| *length);
    urls.retain(|(name, _)| length(name) <= longest);
    let authority = authority(service);
    let counted = compare(service, &urls, |client, directory| {
        let mut curl = Command::new("curl");
        curl.args(["--max-time", "60", "--silent", "--show-error", "--fail", "--http1.1", "--cacert"]).arg(&authority);
        curl.args(more);
        for (index, (_, url)) in urls.iter().enumerate() {
            curl.args(["--output", &format!("{directory}/{index}"), url]);
        }
        client.check(curl).map(drop)
    })?;
    counted.ensure_one_connection()?;
    Ok(urls.iter().map(|(name, _)| length(name)).filter(|length| *length >= 64 << 10).sum())
}

#[test]
fn bodies_pass_by_a_frontend_that_speaks_tls() -> Result<()> {
    run("bodies_pass_by_a_frontend_that_speaks_tls", |service| {
        curl(service, 1, STORED, &[])?;
        for suite in ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"] {
            let before = handed_off(service)?;
            let meter = ByteMeter::start(service.lab.frontend())?;
            let long = curl(service, 8, STORED, &["--tlsv1.3", "--tls13-ciphers", suite])?;
            let (handed, bytes) = (handed_off(service)? - before, meter.total()?);
            println!("{suite}: {handed} of {long} handed off, {bytes:?}");
            ensure!(handed * 10 > long * 9, "{suite}: {handed} of {long} bytes were handed off");
            ensure!((bytes.rx_bytes + bytes.tx_bytes) * 4 < long, "{suite}: {bytes:?} of {long} at the frontend");
            curl(service, 1, u64::MAX, &["--tlsv1.3", "--tls13-ciphers", suite])?;
        }
        Ok(())
    })
}

#[test]
fn tls_1_2_gets_the_bytes() -> Result<()> {
    run("tls_1_2_gets_the_bytes", |service| {
        let before = handed_off(service)?;
        curl(service, 1, u64::MAX, &["--tls-max", "1.2"])?;
        ensure!(handed_off(service)? == before, "there are no such keys");
        Ok(())
    })
}

/// Clients that resume their sessions and ask for new keys in both directions, in an order that differs from run to run.
fn asked(service: &mut Running<'_>, connections: usize, requests: usize) -> Result<Vec<Told>> {
    let target = Target::of(service);
    let names: Vec<&str> = FILES.iter().filter(|(_, length)| *length <= 1 << 20).map(|(name, _)| *name).collect();
    let mut random = u64::from(std::process::id());
    println!("seed {random}");
    let mut below = |bound: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % bound
    };
    service.lab.client().run(|| {
        let shared = Shared::new(&target)?;
        let mut told = Vec::new();
        for _ in 0..connections {
            let mut client = Client::connect_with(&target, &shared)?;
            for turn in 0..requests {
                if turn > 0 && below(5) == 0 {
                    client.tls.refresh_traffic_keys()?;
                }
                client.get(&target, names[below(names.len())])?;
            }
            told.push(client.told()?);
        }
        Ok(told)
    })?
}

#[test]
fn no_nonce_is_used_twice_whatever_clients_ask_for() -> Result<()> {
    run("no_nonce_is_used_twice_whatever_clients_ask_for", |service| {
        let before = handed_off(service)?;
        let all = opened(service, |service| asked(service, 4, 25))?;
        ensure!(all.len() == 4 && handed_off(service)? > before, "nothing was handed off");
        Ok(())
    })
}

#[test]
#[ignore = "10,000 requests take minutes"]
fn ten_thousand_requests() -> Result<()> {
    run("ten_thousand_requests", |service| asked(service, 40, 250).map(drop))
}
