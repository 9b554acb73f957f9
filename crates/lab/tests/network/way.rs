//! Checks that a service must pass over any path to its clients: every byte arrives, long bodies take the shortcut
//! (straight from the backend to the client), and the client's only connection is never reset. The *steering programs*
//! (BPF) pass the client's packets on to the backend that sends. A *handoff* lets the backend send one body.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shunt_lab::{Fetch, Fetched, Host, Lab, LabBuilder, Link, Options};

use super::service::{Running, needs_root, start_on};

pub const FILES: &[(&str, u64)] =
    &[("1k", 1 << 10), ("32k", 32 << 10), ("100k", 100 << 10), ("1m", 1 << 20), ("4m", 4 << 20)];

/// URL paths that are fetched over one connection, one after the other. There are bodies of few segments and of many,
/// and long bodies after short ones.
pub const PATHS: &[&str] = &["/1k", "/32k", "/4m", "/100k", "/1k", "/1m", "/32k", "/32k", "/1m", "/100k"];

/// Like [`PATHS`], but fewer and without the longest body, for links over which that body would take minutes.
pub const SHORT_PATHS: &[&str] = &["/1k", "/32k", "/100k", "/1k", "/1m", "/32k", "/32k", "/100k"];

/// Longest time that a client waits for more bytes. If a retransmission is lost, too, TCP waits for a timeout, and each
/// timeout in a row is twice as long as the one before.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Link with an RTT of 100 ms.
pub fn far() -> Link {
    Link::wan(Duration::from_millis(50))
}

/// Link with an RTT of 400 ms.
pub fn farthest() -> Link {
    Link::wan(Duration::from_millis(200))
}

/// Link with an RTT of 40 ms and 1% loss.
pub fn lossy() -> Link {
    Link::wan(Duration::from_millis(20)).loss(0.01)
}

/// Link with an RTT of 4 ms and 5% loss.
pub fn very_lossy() -> Link {
    Link::wan(Duration::from_millis(2)).loss(0.05)
}

/// Link with an RTT of 20 ms, 3% loss in bursts of 4 frames, and late and repeated frames.
pub fn rough() -> Link {
    let link = Link::wan(Duration::from_millis(10)).jitter(Duration::from_millis(2)).burst_loss(0.03, 4.0);
    link.reorder(0.02, Duration::from_millis(4)).duplicate(0.01)
}

/// Link with 20 Mbit/s, an RTT of 10 ms, and a queue of 40 ms.
pub fn narrow() -> Link {
    Link::wan(Duration::from_millis(5)).rate(20_000_000, 100_000)
}

/// Link with an MTU of 576 bytes: IPv4 hosts must accept datagrams of this size (RFC 791).
pub fn small_mtu() -> Link {
    Link::wan(Duration::from_millis(5)).mtu(576)
}

/// A host's TCP counters since the host was made (`/proc/net/netstat` and `/proc/net/snmp`).
pub struct TcpCounters<'a>(pub &'a Host);

impl TcpCounters<'_> {
    pub fn read(&self, name: &str) -> Result<u64> {
        let table = self.0.run(|| -> std::io::Result<String> {
            let read = |file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}"));
            Ok(read("netstat")? + &read("snmp")?)
        })??;
        let lines: Vec<&str> = table.lines().collect();
        // A line of names is followed by a line of values.
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

/// Prints counters of the backend's TCP, of the frontend's steering programs, and of the links.
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

/// Fetches all paths, and compares every byte.
pub fn get(service: &Running<'_>, fetch: &Fetch, paths: &[&str]) -> Result<Vec<Fetched>> {
    let fetched = fetch.run(service.lab.client(), paths)?;
    service.whole(&fetched)?;
    Ok(fetched)
}

/// Returns a client that waits long enough for all links of this file.
pub fn patient(service: &Running<'_>) -> Fetch {
    let mut fetch = Fetch::new(service.service.chain().server());
    fetch.timeout = SILENCE_LIMIT;
    fetch
}

/// Fetches all paths over one connection. Asserts that the bodies are whole, that all long ones (or all but one) take
/// the shortcut, and that no connection is reset.
pub fn check(service: &Running<'_>, fetch: &Fetch, paths: &[&str]) -> Result<()> {
    let begin = Instant::now();
    let fetched = get(service, fetch, paths);
    eprintln!("{:?}", begin.elapsed());
    tell(service)?;
    for one in fetched.with_context(|| service.service.explain())? {
        eprint!("{} {} ms; ", one.path, one.elapsed.as_millis());
    }
    eprintln!();
    let long = paths.iter().filter(|path| **path != "/1k").count() as u64;
    let stats = service.frontend_stats()?;
    // A handoff needs proof that the steering programs see the connection's packets. If a segment of the frontend comes
    // late, this proof may be missing for one body, which is then fetched (through both agents).
    let unproven = stats.count("servers.fetched_unproven");
    let shortcuts = stats.count("servers.shortcuts");
    let all = shortcuts + unproven == long && unproven <= 1;
    ensure!(all, "{shortcuts} shortcuts for {long} long bodies: {}", stats.under("servers"));
    service.no_fallback_but(unproven)?;
    let resets = TcpCounters(service.lab.client()).read("EstabResets")?;
    ensure!(resets == 0, "{resets} connections of the client were reset");
    ensure!(stats.count("frontend.fe_client_reset") == 0, "the client reset: {}", stats.under("servers"));
    Ok(())
}

/// Runs [`check`] in a new lab.
pub fn over(builder: LabBuilder, paths: &[&str]) -> Result<()> {
    over_with(builder, paths, |_| ())
}

/// Like [`over`], with a client that `client` has changed.
pub fn over_with(builder: LabBuilder, paths: &[&str], client: impl FnOnce(&mut Fetch)) -> Result<()> {
    needs_root();
    start_on(builder, FILES, Options::steady(), |service| {
        let mut fetch = patient(service);
        client(&mut fetch);
        check(service, &fetch, paths)
    })
}

/// Returns the builder of a lab (hosts as network namespaces) whose client has this link.
pub fn behind(link: Link) -> LabBuilder {
    Lab::builder().client_link(link)
}
