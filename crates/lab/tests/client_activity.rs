//! Clients that do something while their connection is handed off: they send more requests, noise, or a FIN; stop
//! reading; close or reset at any byte. A client that stays gets every byte. When a client leaves, nothing is kept for
//! it. Other clients notice nothing. A connection is handed off while a backend sends a body on it (a *handoff*).

mod service;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::net::sockopt;
use service::{Running, needs_root, start_on};
use shunt_lab::faults::Ledger;
use shunt_lab::{Families, Family, Fetch, Lab, Options, Settings};
use shunt_testbed::same_bytes;

const FILES: &[(&str, u64)] = &[("1k", 1 << 10), ("64k", 64 << 10), ("300k", 300 << 10), ("7m", 7 << 20)];

/// Options with short lifetimes, so that what is no longer used is given back soon: flows (the frontend's entries for
/// connections), the backend's idle sockets, and offers (bodies that the backend holds ready).
fn soon() -> Options {
    let settings = Settings {
        agent_frontend: "flow_quiet = \"1s\"\n",
        agent_backend: "park = \"1s\"\noffer_lifetime = \"4s\"\n",
        ..Settings::default()
    };
    Options { settings, ..Options::shunt() }
}

/// A client's connection. Its receive buffer is so small that the server cannot be far ahead.
struct Client {
    stream: TcpStream,
    /// Number of bytes of the stream that have been read.
    read: u64,
}

impl Client {
    fn connect(service: &Running<'_>) -> Result<Self> {
        Self::connect_to(service, service.service.chain().server(), None)
    }

    /// Connects to an address of the frontend, from a local port of the caller's choice.
    fn connect_to(service: &Running<'_>, server: SocketAddr, port: Option<u16>) -> Result<Self> {
        let socket = service.lab.client().run(|| -> std::io::Result<_> {
            let socket = service::socket_at(port)?;
            sockopt::set_socket_recv_buffer_size(&socket, 16 << 10)?;
            rustix::net::connect(&socket, &server)?;
            Ok(socket)
        })??;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self { stream, read: 0 })
    }

    fn ask(&mut self, path: &str, field: &str) -> Result<()> {
        Ok(self.stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: lab\r\n{field}\r\n").as_bytes())?)
    }

    /// Reads exactly `count` bytes of the stream.
    fn take(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let mut filled = 0;
        while filled < count {
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => bail!("the end, {} bytes early", count - filled),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).with_context(|| format!("{} bytes early", count - filled)),
            }
        }
        self.read += count as u64;
        Ok(bytes)
    }

    /// Reads a response's header byte by byte, so that none of its body is read. Returns the body's length.
    fn head(&mut self) -> Result<usize> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.extend(self.take(1)?);
        }
        let head = String::from_utf8(head)?.to_ascii_lowercase();
        ensure!(head.starts_with("http/1.1 200"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        Ok(length.with_context(|| format!("no length in {head}"))?.parse()?)
    }

    /// Reads a whole response, and compares it with its file.
    fn response(&mut self, files: &Path, name: &str) -> Result<()> {
        let length = self.head().with_context(|| format!("the header of {name}"))?;
        let body = self.take(length).with_context(|| format!("the body of {name}"))?;
        same(files, name, 0, &body)
    }

    /// Reads up to the end of the stream.
    fn rest(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.stream.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Closes the connection with a reset.
    fn reset(self) -> Result<()> {
        Ok(sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO))?)
    }
}

/// Compares bytes with the part of a file from `from` on.
fn same(files: &Path, name: &str, from: usize, got: &[u8]) -> Result<()> {
    let file = std::fs::read(files.join(name))?;
    let expected = file.get(from..from + got.len()).with_context(|| format!("{name} is shorter"))?;
    same_bytes(got, expected).with_context(|| format!("{name} from {from} on"))
}

/// Runs a test while another client downloads, and then checks that nothing is left behind.
fn beside_others(intermediates: u8, options: Options, work: impl Fn(&Running<'_>) -> Result<()>) -> Result<()> {
    needs_root();
    start_on(Lab::builder().intermediates(intermediates), FILES, options, |service| {
        // This makes the connections between tiers, and fills nginx's cache of open files.
        FILES.iter().try_for_each(|(name, _)| fetch_one(service, name))?;
        let before = idle(service)?;
        let done = AtomicBool::new(false);
        let (worked, others) = std::thread::scope(|scope| {
            let running = &*service;
            let other = scope.spawn(|| -> Result<u64> {
                let mut rounds = 0;
                while !done.load(Ordering::Relaxed) {
                    fetch_one(running, "300k")?;
                    rounds += 1;
                    std::thread::sleep(Duration::from_millis(5)); // leaves processor time to the test
                }
                Ok(rounds)
            });
            let worked = work(running);
            done.store(true, Ordering::Relaxed);
            (worked, other.join().expect("the other client's thread"))
        });
        worked.with_context(|| service.service.explain())?;
        let rounds = others.context("a client that is not involved")?;
        ensure!(rounds > 0, "the other client got nothing");
        let leaks = Ledger::leaks(&before, &service.service)?;
        ensure!(leaks.is_empty(), "left behind: {leaks:?}\n{}", service.service.explain());
        Ok(())
    })
}

/// Waits until the service is idle, and returns the resources that it holds then.
fn idle(service: &Running<'_>) -> Result<Ledger> {
    let ledger = Ledger::settled(&service.service)?;
    ensure!(ledger.is_idle(), "the service does not become idle: {ledger:?}{}", service.service.explain());
    Ok(ledger)
}

fn fetch_one(service: &Running<'_>, name: &str) -> Result<()> {
    service.whole(&Fetch::new(service.service.chain().server()).run(service.lab.client(), &[format!("/{name}")])?)
}

/// Has many clients leave within a response, each at a different byte. They close their connections, or reset them if
/// `resets` is set.
fn leave_everywhere(options: Options, resets: bool) -> Result<()> {
    beside_others(1, options, |service| {
        for name in ["64k", "300k"] {
            let mut measured = Client::connect(service)?;
            measured.ask(&format!("/{name}"), "")?;
            let body = measured.head()? as u64;
            let start = measured.read;
            measured.take(body as usize)?;
            let end = start + body;
            let inside = (1..8).map(|eighth| start + body * eighth / 8);
            let edges = [0, 1, start - 1, start, start + 1, start + 1448, end - 1448, end - 1, end];
            for at in edges.into_iter().chain(inside) {
                leave_at(service, name, start, at, resets).with_context(|| format!("{name}: leaving at byte {at}"))?;
            }
        }
        Ok(())
    })
}

/// Has a client leave at byte `at` of a response whose header ends at byte `start`. The client sends two requests, so
/// that a second response waits at that moment.
fn leave_at(service: &Running<'_>, name: &str, start: u64, at: u64, resets: bool) -> Result<()> {
    let mut client = Client::connect(service)?;
    client.ask(&format!("/{name}"), "")?;
    client.ask("/64k", "")?;
    let head = client.take(at.min(start) as usize)?;
    ensure!(b"HTTP/1.1 200 OK\r\n".starts_with(&head[..head.len().min(17)]), "another header");
    let body = client.take(at.saturating_sub(start) as usize)?;
    same(&service.files, name, 0, &body)?;
    if resets { client.reset() } else { Ok(()) }
}

#[test]
fn a_client_that_closes_at_any_byte_leaves_nothing_behind() -> Result<()> {
    leave_everywhere(soon(), false)
}

#[test]
fn a_client_that_resets_at_any_byte_leaves_nothing_behind() -> Result<()> {
    leave_everywhere(soon(), true)
}

#[test]
fn a_port_that_a_client_left_by_a_reset_serves_its_next_connection() -> Result<()> {
    beside_others(0, soon(), |service| {
        let server = service.service.chain().server();
        for round in 0..10 {
            let mut client = Client::connect_to(service, server, Some(19_999))?;
            client.ask("/7m", "")?;
            client.head()?;
            same(&service.files, "7m", 0, &client.take(100_000 * round)?)?;
            client.reset()?;
            let mut next = Client::connect_to(service, server, Some(19_999))?;
            next.ask("/300k", "")?;
            next.response(&service.files, "300k").with_context(|| format!("round {round}"))?;
            next.reset()?;
        }
        Ok(())
    })
}

#[test]
fn requests_that_come_with_acknowledgments_wait_their_turn() -> Result<()> {
    beside_others(1, soon(), |service| {
        let names = ["64k", "1k", "300k"];
        let mut client = Client::connect(service)?;
        client.ask("/7m", "")?;
        let length = client.head()?;
        let (mut asked, mut at) = (Vec::new(), 0);
        while at < length {
            let part = client.take((length - at).min(256 << 10))?;
            same(&service.files, "7m", at, &part)?;
            at += part.len();
            let name = names[asked.len() % names.len()];
            client
                .ask(&format!("/{name}"), "X-Filler: so that a segment holds a request and a part of the next\r\n")?;
            asked.push(name);
        }
        for name in asked {
            client.response(&service.files, name)?;
        }
        Ok(())
    })
}

/// Sends bytes that are no request during a download. Returns the answer that follows the body, without its line
/// `Date`.
fn noise_in_the_stream(service: &Running<'_>, noise: &[u8]) -> Result<Vec<u8>> {
    let mut client = Client::connect(service)?;
    client.ask("/7m", "")?;
    let length = client.head()?;
    let half = client.take(length / 2)?;
    same(&service.files, "7m", 0, &half)?;
    client.stream.write_all(noise)?;
    let rest = client.take(length - half.len())?;
    same(&service.files, "7m", half.len(), &rest)?;
    let answer = client.rest()?;
    // Leave out the date.
    let lines = String::from_utf8_lossy(&answer).lines().filter(|line| !line.starts_with("Date:")).collect::<String>();
    Ok(lines.into_bytes())
}

#[test]
fn noise_in_the_stream_is_answered_as_by_plain_nginx() -> Result<()> {
    needs_root();
    // A ClientHello's beginning, HTTP/2's preface, and bytes of no protocol.
    let noises: [&[u8]; 3] =
        [&[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0xff; 3000]];
    let answers = [Options::plain(), soon()].map(|options| {
        start_on(Lab::builder(), FILES, options, |service| {
            let answers = noises.map(|noise| noise_in_the_stream(service, noise));
            let shortcuts = if options.shunt { service.counted("servers.shortcuts")? } else { 0 };
            ensure!(!options.shunt || shortcuts == noises.len() as u64, "{shortcuts} shortcuts");
            answers.into_iter().collect::<Result<Vec<_>>>()
        })
    });
    let [plain, ours] = answers;
    let (plain, ours) = (plain.context("plain nginx")?, ours?);
    ensure!(plain == ours, "plain nginx: {plain:?}; ours: {ours:?}");
    Ok(())
}

/// Point of a response at which the client closes its sending half.
#[derive(Debug, Clone, Copy)]
enum Moment {
    AfterTheRequest,
    AfterTheHeader,
    InMidPayload,
    AtTheLastByte,
}

const MOMENTS: [Moment; 4] =
    [Moment::AfterTheRequest, Moment::AfterTheHeader, Moment::InMidPayload, Moment::AtTheLastByte];

/// Downloads a file, and sends a FIN at `moment`. Returns whether the client got the whole body. A wrong byte is an
/// error.
fn half_close(service: &Running<'_>, name: &str, moment: Moment) -> Result<bool> {
    let mut client = Client::connect(service)?;
    client.ask(&format!("/{name}"), "")?;
    if let Moment::AfterTheRequest = moment {
        client.stream.shutdown(Shutdown::Write)?;
    }
    let Ok(length) = client.head() else { return Ok(false) };
    let before = match moment {
        Moment::AfterTheRequest | Moment::AfterTheHeader => 0,
        Moment::InMidPayload => length / 2,
        Moment::AtTheLastByte => length,
    };
    let first = client.take(before)?;
    same(&service.files, name, 0, &first)?;
    if !matches!(moment, Moment::AfterTheRequest) {
        client.stream.shutdown(Shutdown::Write)?;
    }
    let mut rest = Vec::new();
    let end = client.stream.read_to_end(&mut rest);
    same(&service.files, name, before, &rest)?;
    let whole = before + rest.len() == length;
    // nginx gives up the connection when it sees the FIN. It may see the FIN only after it has sent all bytes.
    ensure!(!whole || end.is_ok() || !matches!(moment, Moment::AtTheLastByte), "a whole body, and then {end:?}");
    Ok(whole)
}

// nginx closes the connection of a client that has closed its sending half. It does so both while nginx reads the
// response from an upstream and while the response waits to be sent.
#[test]
fn a_client_that_has_closed_its_half_is_never_left_with_wrong_bytes() -> Result<()> {
    beside_others(0, soon(), |service| {
        for name in ["1k", "64k", "7m"] {
            for moment in MOMENTS {
                let whole = half_close(service, name, moment).with_context(|| format!("{name} {moment:?}"))?;
                eprintln!("{name} {moment:?}: {}", if whole { "whole" } else { "given up" });
                ensure!(whole || !matches!(moment, Moment::AtTheLastByte), "{name}: a part only");
            }
        }
        Ok(())
    })
}

/// Like [`soon`], with tiers that go on sending to a client that has closed its sending half.
fn deaf() -> Options {
    let options = soon();
    let settings = Settings { http: &["proxy_ignore_client_abort on"], ..options.settings };
    Options { settings, ..options }
}

/// Has clients close their sending half at each of the [`MOMENTS`]. Returns names for the bodies that came whole.
fn whole_though_half_closed(service: &Running<'_>) -> Result<Vec<String>> {
    let mut whole = Vec::new();
    for name in ["64k", "7m"] {
        for moment in MOMENTS {
            if half_close(service, name, moment).with_context(|| format!("{name} {moment:?}"))? {
                whole.push(format!("{name} {moment:?}"));
            }
        }
    }
    Ok(whole)
}

// With `proxy_ignore_client_abort`, nginx without Shunt goes on sending to a half-closed client while nginx reads from
// an upstream. nginx looks for the FIN again when it writes the last bytes, so buffers decide how much the client gets.
// With a shortcut (a body that the backend sends), nginx does not write the last bytes, so it does not look again.
#[test]
fn a_client_that_has_closed_its_half_gets_everything_where_aborts_are_ignored() -> Result<()> {
    beside_others(0, deaf(), |service| {
        let whole = whole_though_half_closed(service)?;
        ensure!(whole.len() == 2 * MOMENTS.len(), "whole are only {whole:?}");
        let aborted = service.counted("servers.aborted")?;
        ensure!(aborted == 0, "{aborted} shortcuts were aborted");
        Ok(())
    })
}

#[test]
fn a_client_that_leaves_at_any_byte_leaves_nothing_behind_where_aborts_are_ignored() -> Result<()> {
    leave_everywhere(deaf(), false)?;
    leave_everywhere(deaf(), true)
}

#[test]
fn both_sides_close_at_once() -> Result<()> {
    beside_others(1, soon(), |service| {
        for early in [0, 1, 1448, 20_000] {
            for name in ["300k", "7m"] {
                let mut client = Client::connect(service)?;
                client.ask(&format!("/{name}"), "Connection: close\r\n")?;
                let length = client.head()?;
                let body = client.take(length - early)?;
                same(&service.files, name, 0, &body)?;
                client.stream.shutdown(Shutdown::Write)?;
                let mut rest = Vec::new();
                let end = client.stream.read_to_end(&mut rest);
                same(&service.files, name, length - early, &rest)?;
                ensure!(early > 0 || end.is_ok(), "{name}, {early} bytes early: {end:?}");
            }
        }
        Ok(())
    })
}

#[test]
fn a_client_with_a_closed_window_gets_answers_to_its_keepalive_probes() -> Result<()> {
    beside_others(0, soon(), |service| {
        let mut client = Client::connect(service)?;
        // Without an answer, the kernel gives the connection up after 1 second and 3 probes at intervals of 1 second.
        sockopt::set_socket_keepalive(&client.stream, true)?;
        sockopt::set_tcp_keepidle(&client.stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepintvl(&client.stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&client.stream, 3)?;
        client.ask("/7m", "")?;
        let length = client.head()?;
        let first = client.take(100_000)?;
        std::thread::sleep(Duration::from_secs(12)); // the subject of the test: a closed window
        let rest = client.take(length - first.len())?;
        same(&service.files, "7m", 0, &[first, rest].concat())
    })
}

/// Gives the client a route to the frontend's address in the service network, so that the client can connect to both
/// addresses of the frontend.
fn by_way_of_the_frontend(lab: &Lab) -> Result<()> {
    let (inner, outer) = (lab.frontend().service_address_of(Family::V4)?, lab.frontend().address());
    let mut route = Command::new("ip");
    route.args(["route", "add", &inner.to_string(), "via", &outer.to_string()]);
    lab.client().check(route).map(drop)
}

#[test]
fn one_client_port_to_two_addresses_of_the_frontend_gets_both_bodies() -> Result<()> {
    needs_root();
    let families = Families { clients: Family::V4, tiers: Family::V4, dual_stack: true };
    let options = Options { families, ..soon() };
    let lab = Lab::builder().ipv6().backends(2);
    service::start_prepared(lab, FILES, options, by_way_of_the_frontend, |service| {
        let server = service.service.chain().server();
        let inner = SocketAddr::new(service.lab.frontend().service_address_of(Family::V4)?, server.port());
        let mut first = Client::connect_to(service, server, Some(19_998))?;
        first.ask("/7m", "")?;
        let length = first.head()?;
        let begun = first.take(100_000)?;
        // Requests alternate between the two backends. One backend already sends to this client's address and port, for
        // the first connection. For the second connection, the bodies of this backend are therefore fetched (they come
        // through the agents).
        let mut second = Client::connect_to(service, inner, Some(19_998))?;
        for round in 0..4 {
            second.ask("/300k", "")?;
            second.response(&service.files, "300k").with_context(|| format!("round {round}"))?;
        }
        let rest = first.take(length - begun.len())?;
        same(&service.files, "7m", 0, &[begun, rest].concat()).context("the connection that was there first")?;
        let stats = service.frontend_stats()?;
        let (shortcuts, fetched) = (stats.count("servers.shortcuts"), stats.count("servers.fetched_refused"));
        ensure!(shortcuts + fetched == 5 && fetched > 0, "{shortcuts} shortcuts: {}", stats.under("servers"));
        Ok(())
    })
}
