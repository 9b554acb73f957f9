//! A service with Shunt over links with the properties of real networks: every byte arrives, and by the shortcut.

mod service;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use service::{Running, may_run, start_on};
use shunt_lab::{Fetch, Fetched, Host, Lab, Link, Options, file_sha256};

const FILES: &[(&str, u64)] =
    &[("1k", 1 << 10), ("32k", 32 << 10), ("100k", 100 << 10), ("1m", 1 << 20), ("4m", 4 << 20)];

/// Over one connection, one after the other: short and long windows, and a long body after a short one.
const PATHS: &[&str] = &["/1k", "/32k", "/4m", "/100k", "/1k", "/1m", "/32k", "/32k", "/1m", "/100k"];

/// A loss of a retransmission is found by a timeout, and those double.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// RTT 100 ms.
fn far() -> Link {
    Link::wan(Duration::from_millis(50))
}

/// RTT 40 ms, 1% loss.
fn lossy() -> Link {
    Link::wan(Duration::from_millis(20)).loss(0.01)
}

/// RTT 20 ms; 3% loss in bursts of 4 frames; late and repeated frames.
fn rough() -> Link {
    let link = Link::wan(Duration::from_millis(10)).jitter(Duration::from_millis(2)).burst_loss(0.03, 4.0);
    link.reorder(0.02, Duration::from_millis(4)).duplicate(0.01)
}

/// 20 Mbit/s, RTT 10 ms, and a queue of 40 ms.
fn narrow() -> Link {
    Link::wan(Duration::from_millis(5)).rate(20_000_000, 100_000)
}

/// How often each counter of TCP grew on a host, by name (proc_net_netstat and proc_net_snmp of proc(5)).
struct TcpCounters<'a>(&'a Host);

impl TcpCounters<'_> {
    fn read(&self, name: &str) -> Result<u64> {
        let table = self.0.run(|| -> std::io::Result<String> {
            let read = |file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}"));
            Ok(read("netstat")? + &read("snmp")?)
        })??;
        let lines: Vec<&str> = table.lines().collect();
        // A line of names, then a line of values.
        let values = lines.chunks(2).flat_map(|pair| pair[0].split(' ').zip(pair[1].split(' ')));
        let found = values.into_iter().find(|(key, _)| *key == name);
        found.with_context(|| format!("TCP counts no {name}"))?.1.parse().context("a number")
    }
}

const SENDERS_COUNTERS: &[&str] = &[
    "OutSegs",
    "RetransSegs",
    "TCPTimeouts",
    "TCPLossProbes",
    "TCPLossProbeRecovery",
    "TCPSlowStartRetrans",
    "TCPSpuriousRtxHostQueues",
    "TCPDSACKRecv",
];

/// Prints what the backend's TCP and the frontend's steering did.
fn tell(service: &Running<'_>) -> Result<()> {
    let tcp = TcpCounters(service.lab.backend());
    for name in SENDERS_COUNTERS {
        eprint!("{name} {} ", tcp.read(name)?);
    }
    let stats = service.frontend_stats()?;
    for name in ["fe_in_held", "fe_in_backend", "fe_in_both"] {
        eprint!("{name} {} ", stats.count(&format!("frontend.{name}")));
    }
    for cable in service.lab.cables() {
        eprint!("\nfrom the client {:?}\nto the client {:?}", cable.sent(), cable.received());
    }
    eprintln!();
    Ok(())
}

fn get(service: &Running<'_>, paths: &[&str]) -> Result<Vec<Fetched>> {
    let mut fetch = Fetch::new(service.service.chain().server());
    fetch.timeout = SILENCE_LIMIT;
    let fetched = fetch.run(service.lab.client(), paths)?;
    for one in &fetched {
        ensure!(one.status == 200, "{}: status {}", one.path, one.status);
        ensure!(one.sha256 == file_sha256(service.files.join(&one.path[1..]))?, "{}: other bytes", one.path);
    }
    Ok(fetched)
}

/// All responses over one connection: whole, by the shortcut where they are long, and without a reset.
fn over(test: &str, link: Link) -> Result<()> {
    if !may_run(test) {
        return Ok(());
    }
    start_on(Lab::builder().client_link(link), FILES, Options::shunt(), |service| {
        let begin = Instant::now();
        let fetched = get(service, PATHS);
        eprintln!("{test}: {:?}", begin.elapsed());
        tell(service)?;
        for one in fetched.with_context(|| service.service.explain())? {
            eprint!("{} {} ms; ", one.path, one.elapsed.as_millis());
        }
        eprintln!();
        let long = PATHS.iter().filter(|path| **path != "/1k").count() as u64;
        let stats = service.frontend_stats()?;
        let shortcuts = stats.count("servers.shortcuts");
        ensure!(shortcuts == long, "{shortcuts} shortcuts for {long} long bodies: {:#}", stats.0);
        service.no_fallback()?;
        let resets = TcpCounters(service.lab.client()).read("EstabResets")?;
        ensure!(resets == 0, "{resets} connections of the client were reset");
        ensure!(stats.count("frontend.fe_client_reset") == 0, "the client reset: {:#}", stats.0);
        Ok(())
    })
}

#[test]
fn a_long_delay() -> Result<()> {
    over("a_long_delay", far())
}

#[test]
fn independent_losses() -> Result<()> {
    over("independent_losses", lossy())
}

#[test]
fn bursts_of_losses_with_late_and_repeated_frames() -> Result<()> {
    over("bursts_of_losses_with_late_and_repeated_frames", rough())
}

#[test]
fn a_low_rate_with_a_short_queue() -> Result<()> {
    over("a_low_rate_with_a_short_queue", narrow())
}

/// Prints times with Shunt and without, and what the backend's TCP did; asserts none of that.
#[test]
#[ignore = "takes minutes and only prints"]
fn times() -> Result<()> {
    if !may_run("times") {
        return Ok(());
    }
    for (name, link, seeds) in [("far", far(), 0..3), ("lossy", lossy(), 0..8)] {
        for seed in seeds {
            for (kind, options) in [("plain", Options::plain()), ("shunt", Options::shunt())] {
                start_on(Lab::builder().client_link(link.seed(seed)), FILES, options, |service| {
                    let fetched = get(service, &["/4m", "/4m"])?;
                    let tcp = TcpCounters(service.lab.backend());
                    let mut line = format!("TIMES {name} {kind} seed {seed}");
                    for one in fetched {
                        line += &format!(" {}", one.elapsed.as_millis());
                    }
                    for host in [service.lab.frontend(), service.lab.backend()] {
                        let tcp = TcpCounters(host);
                        let count = |name| tcp.read(name);
                        let (timeouts, probes, again) =
                            (count("TCPTimeouts")?, count("TCPLossProbes")?, count("RetransSegs")?);
                        line += &format!(" {}: {timeouts} timeouts {probes} probes {again} again;", host.name());
                    }
                    if kind == "shunt" {
                        let stats = service.frontend_stats()?;
                        for name in ["fe_in_held", "fe_in_backend", "fe_in_both"] {
                            line += &format!(" {name} {}", stats.count(&format!("frontend.{name}")));
                        }
                    }
                    eprintln!("{line} dsacks {}", tcp.read("TCPDSACKRecv")?);
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}
