//! Unmodified nginx on every tier, under `shunt run`. The backend's agent encrypts bodies and sends them straight to
//! TLS clients, past all other tiers: they are *handed off*. A *store* is the part of an agent that has its machine's
//! bodies.

mod loads;
mod lost;
mod programs;

use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use rustls::CipherSuite;
use shunt_lab::{ByteMeter, OnDemand, Options, Settings};

use crate::bed::{FILES, authority, compare, on_tls_with, urls};
use crate::client::{Client, Shared, Target, Told};
use crate::nonces::opened;
use crate::service::{Running, needs_root};

fn options() -> Options {
    let settings = Settings { tls: Some(""), ..Settings::default() };
    Options { on_demand: Some(OnDemand::CHECKED), settings, ..Options::default() }
}

/// Returns how many bytes the frontend's nginx has handed off: it has written them to clients, and another machine
/// sends them.
fn handed_off(service: &Running<'_>) -> Result<u64> {
    service.counted("store.by_program.nginx.handed_off")
}

fn run(what: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    needs_root();
    on_tls_with(options(), |service| what(service).with_context(|| service.service.explain()))
}

/// Number of bytes that one program may leave in a store at a time. The rest of a longer body may be sent as bytes.
const STORED: u64 = 32 << 20;

/// Fetches all files of at most `longest` bytes, each `2 * times` times, over one connection with curl. Returns the
/// total length of the bodies that are long enough to be handed off.
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
    run(|service| {
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
    run(|service| {
        let before = handed_off(service)?;
        curl(service, 1, u64::MAX, &["--tls-max", "1.2"])?;
        ensure!(handed_off(service)? == before, "there are no such keys");
        Ok(())
    })
}

/// Pseudorandom numbers that decide what clients do. They differ in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// Makes one client's connections, one after the other. They resume sessions and ask for new keys in both directions,
/// and some of them end in the middle of a body. Every body is compared.
fn client(target: &Target, mut random: Random, connections: usize, requests: usize) -> Result<Vec<Told>> {
    let names: Vec<&str> = FILES.iter().filter(|(_, length)| *length <= 1 << 20).map(|(name, _)| *name).collect();
    let shared = SUITES.map(|suite| Shared::with_suite(target, suite));
    let mut told = Vec::new();
    for _ in 0..connections {
        let suite = random.below(SUITES.len());
        let shared = shared[suite].as_ref().map_err(|error| anyhow!("{:?}: {error}", SUITES[suite]))?;
        let mut client = Client::connect_with(target, shared)?;
        for turn in 0..requests {
            if turn > 0 && random.below(5) == 0 {
                client.tls.refresh_traffic_keys()?;
            }
            client.get(target, names[random.below(names.len())])?;
        }
        let leaves = random.below(4) == 0;
        if leaves {
            let mut body = client.ask("1m")?;
            client.read(&mut body, random.below(1 << 20) as u64)?;
        }
        told.push(Told { reset: leaves, ..client.told()? });
    }
    Ok(told)
}

/// Runs several clients at once.
fn clients(service: &mut Running<'_>, count: u64, connections: usize, requests: usize) -> Result<Vec<Told>> {
    let (target, seed) = (Target::of(service), u64::from(std::process::id()));
    println!("seed {seed}");
    service.lab.client().run(|| {
        std::thread::scope(|scope| {
            let one = |number| client(&target, Random(seed << 8 | number), connections, requests);
            let all: Vec<_> = (0..count).map(|number| scope.spawn(move || one(number))).collect();
            let mut told = Vec::new();
            for client in all {
                told.extend(client.join().map_err(|_| anyhow!("a client panicked"))??);
            }
            Ok(told)
        })
    })?
}

#[test]
fn no_nonce_is_used_twice_whatever_clients_ask_for() -> Result<()> {
    run(|service| {
        let before = handed_off(service)?;
        let all = opened(service, |service| clients(service, 3, 4, 12))?;
        ensure!(!all.is_empty() && handed_off(service)? > before, "nothing was handed off");
        Ok(())
    })
}

#[test]
#[ignore = "10,000 requests take minutes"]
fn ten_thousand_requests() -> Result<()> {
    run(|service| {
        let before = handed_off(service)?;
        clients(service, 4, 95, 25)?;
        ensure!(handed_off(service)? > before, "nothing was handed off");
        curl(service, 50, STORED, &["--tls-max", "1.2"]).map(drop)
    })
}
