//! The agent's page of counters in the format of Prometheus, and malformed or slow requests for it.

mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Role, Settings, fetch};
use shunt_testbed::{is_asleep, wait_for};

const ADDRESS: &str = "127.0.0.1:9440";

/// Sends a request to the agent's HTTP server for counters, and returns the whole answer.
fn ask(request: &[u8]) -> Result<String> {
    let mut stream = TcpStream::connect(ADDRESS)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(request)?;
    let mut answer = String::new();
    match stream.read_to_string(&mut answer) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error.into()),
        _ => Ok(answer),
    }
}

fn page() -> Result<String> {
    let answer = ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n")?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    ensure!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    ensure!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    ensure!(head.contains(&format!("Content-Length: {}", body.len())), "{head}: {} bytes", body.len());
    Ok(body.to_owned())
}

/// Parses a page, and checks the rules of the format. Each family comes once, with HELP and TYPE first. Names and
/// labels have the allowed characters, counters end in `_total`, and no sample comes twice.
fn samples(page: &str) -> Result<BTreeMap<String, u64>> {
    let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !name.is_empty();
    let (mut samples, mut families, mut family) = (BTreeMap::new(), BTreeSet::new(), String::new());
    let mut helped = None;
    ensure!(page.ends_with('\n'), "the last line has no end");
    for line in page.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').context("HELP without a text")?;
            ensure!(is_name(name) && !text.is_empty() && families.insert(name.to_owned()), "{line}");
            helped = Some(name.to_owned());
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').context("TYPE without a kind")?;
            ensure!(helped.take().as_deref() == Some(name), "{line}: not behind its HELP");
            ensure!(matches!((kind, name.ends_with("_total")), ("counter", true) | ("gauge", false)), "{line}");
            name.clone_into(&mut family);
        } else {
            let (sample, value) = line.rsplit_once(' ').with_context(|| format!("{line:?} is no sample"))?;
            let (name, labels) = sample.split_once('{').map_or((sample, None), |(name, rest)| (name, Some(rest)));
            ensure!(name == family, "{line} stands in {family}");
            if let Some(labels) = labels {
                let inner = labels.strip_suffix('}').context("labels without their end")?;
                for label in inner.split(',') {
                    let (label, text) = label.split_once('=').context("a label without a value")?;
                    ensure!(
                        is_name(label) && text.len() >= 2 && text.starts_with('"') && text.ends_with('"'),
                        "{line}"
                    );
                }
            }
            let value = value.parse().with_context(|| line.to_owned())?;
            ensure!(samples.insert(sample.to_owned(), value).is_none(), "{line}: twice");
        }
    }
    Ok(samples)
}

/// Asserts that the page has as many samples as `shunt stats` has numbers, besides one sample for each peer. Also
/// asserts that docs/counters.md names each number or its group.
fn is_complete(service: &Running<'_>, samples: &BTreeMap<String, u64>) -> Result<()> {
    let document = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/counters.md");
    let document = std::fs::read_to_string(document)?;
    let stats = service.frontend_stats()?.flat();
    let of_peers = samples.keys().filter(|name| name.starts_with("shunt_peer_up")).count();
    ensure!(
        samples.len() - of_peers == stats.len(),
        "{} samples for {} numbers",
        samples.len() - of_peers,
        stats.len()
    );
    for path in stats.keys() {
        let general = ["ended", "limited", "now", "limit"].iter().find_map(|group| {
            path.strip_prefix(&format!("agent.{group}."))?;
            Some(format!("`agent.{group}."))
        });
        let wanted = general.unwrap_or_else(|| format!("`{path}`"));
        ensure!(document.contains(&wanted), "docs/counters.md does not know {path}");
    }
    Ok(())
}

/// Adds 255 peers with long names to the configuration of the frontend's agent. With the real peer, they are as many as
/// an agent may have. Nobody answers at their address.
fn with_many_peers(host: &Host, mut text: String) -> String {
    if host.role() != Role::Frontend {
        return text;
    }
    for number in 1..256 {
        let name = format!("{number:a>63}");
        text += &format!("\n[[peer]]\nname = \"{name}\"\naddress = \"127.0.0.1:9\"\nspeaks_for = []\n");
    }
    text
}

#[test]
fn an_agent_with_many_peers_tells_of_all_of_them() -> Result<()> {
    needs_root();
    let agent = "metrics = \"127.0.0.1:9440\"";
    let settings = Settings { agent, agent_text: Some(with_many_peers), apart: true, ..Settings::default() };
    start_on(Lab::builder(), &[("64k", 64 << 10)], Options { settings, ..Options::shunt() }, |service| {
        wait_for("the agent answers", || service.frontend_stats().map(drop))?;
        let stats = service.frontend_stats()?;
        ensure!(stats.0["peers"].as_array().map(Vec::len) == Some(256), "{}", stats.0["peers"]);
        let samples = service.lab.frontend().run(|| samples(&page()?))??;
        let peers = samples.keys().filter(|name| name.starts_with("shunt_peer_up")).count();
        ensure!(peers == 256, "{peers} peers on the page of counters");
        Ok(())
    })
}

#[test]
fn prometheus_reads_every_counter() -> Result<()> {
    needs_root();
    let settings = Settings { agent: "metrics = \"127.0.0.1:9440\"", ..Settings::default() };
    start_on(
        Lab::builder(),
        &[("64k", 64 << 10), ("1k", 1 << 10)],
        Options { settings, ..Options::shunt() },
        |service| {
            let server = service.service.chain().server();
            fetch(service.lab.client(), server, &["/64k", "/1k", "/64k"])?;
            // The client has the last byte before the frontend knows that.
            service.until_counted("servers.shortcut_bytes", 2 << 16)?;
            service.until_counted("frontend.fe_completed", 2)?;
            service.lab.frontend().run(|| -> Result<()> {
                let text = page()?;
                if let Some(file) = std::env::var_os("SHUNT_METRICS_PAGE") {
                    std::fs::write(file, &text)?;
                }
                let samples = samples(&text)?;
                ensure!(samples["shunt_shortcuts_total"] == 2, "{text}");
                ensure!(samples["shunt_shortcut_bytes_total"] == 2 << 16, "{text}");
                ensure!(samples["shunt_peer_up{peer=\"backend\"}"] == 1, "{text}");
                ensure!(samples["shunt_steering_total{role=\"frontend\",event=\"completed\"}"] == 2, "{text}");
                ensure!(samples["shunt_limit{of=\"handoffs\"}"] == 32768, "{text}");
                is_complete(service, &samples)
            })??;
            let backend = service.lab.backend().run(page)??;
            let relayed = samples(&backend)?["shunt_relayed_total{reason=\"too_small\"}"];
            ensure!(relayed == 1, "{relayed} too small");
            Ok(())
        },
    )
}

/// When a process is stopped and continues, its system calls with a timeout fail with EINTR (signal(7)). The agent must
/// answer all the same.
#[test]
fn an_agent_that_was_stopped_answers_when_it_goes_on() -> Result<()> {
    needs_root();
    let settings = Settings { agent: "metrics = \"127.0.0.1:9440\"", ..Settings::default() };
    start_on(Lab::builder(), &[("64k", 64 << 10)], Options { settings, ..Options::shunt() }, |service| {
        let frontend = service.lab.frontend();
        let mut stream = frontend.run(|| TcpStream::connect(ADDRESS))??;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\n")?;
        // Waits until a thread of the agent has read this part of the request. The thread then waits for the rest.
        wait_for("the request is read", || {
            let unread = frontend.tcp_sockets()?.iter().map(|socket| socket.unread_bytes).sum::<u64>();
            ensure!(unread == 0, "{unread} bytes are unread");
            Ok(())
        })?;
        let agent = service.service.agent_process(frontend)?.context("an agent")?;
        agent.signal(Signal::STOP)?;
        agent.signal(Signal::CONT)?;
        wait_for("the agent sleeps", || is_asleep(agent.pid()))?;
        stream.write_all(b"Host: x\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer:?}");
        Ok(())
    })
}

#[test]
fn bad_requests_end_and_others_are_served() -> Result<()> {
    needs_root();
    let settings = Settings { agent: "metrics = \"127.0.0.1:9440\"", ..Settings::default() };
    start_on(Lab::builder(), &[("64k", 64 << 10)], Options { settings, ..Options::shunt() }, |service| {
        service.lab.frontend().run(|| -> Result<()> {
            let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(64 << 10));
            for (request, status) in [
                (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
                (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\n", "405"),
                (b"\x16\x03\x01\x00\xff\x01", "400"),
                (b"nonsense\r\n\r\n", "400"),
                (long.as_bytes(), "400"),
            ] {
                let answer = ask(request).unwrap_or_default();
                // A request that was not read to its end may lose its answer to a reset.
                let is_cut = request.len() > 8 << 10 && answer.is_empty();
                ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")) || is_cut, "{request:?}: {answer}");
            }
            // Clients that say nothing take all threads for metrics, until the agent cuts them off.
            let slow: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(ADDRESS)).collect::<Result<_, _>>()?;
            samples(&page()?)?;
            drop(slow);
            samples(&page()?)?;
            Ok(())
        })??;
        fetch(service.lab.client(), service.service.chain().server(), &["/64k"])?;
        ensure!(service.counted("servers.shortcuts")? == 1, "the service has suffered");
        Ok(())
    })
}
