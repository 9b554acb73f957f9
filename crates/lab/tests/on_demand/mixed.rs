//! Requests of all kinds in a random order, which a seed determines, on several connections at once. Each byte of the
//! responses is compared. A *handoff* lets the backend's agent send a body.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::sockopt::set_socket_linger;
use shunt_lab::random::{Random, seed_or_random};
use shunt_lab::{Host, Lab, Options, Role, Settings};
use shunt_testbed::same_bytes;

use crate::lost::until_handed_off;
use crate::service::{FILES, Running};
use crate::{LIMIT, options, run};

const CLIENTS: u64 = 4;

/// Returns a location of the frontend's nginx, `/chunks/`, that sends all files in chunks.
fn chunks(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Frontend {
        return String::new();
    }
    "location /chunks/ { add_trailer X-End yes; proxy_pass http://next/; proxy_http_version 1.1; \
     proxy_set_header Connection \"\"; proxy_buffer_size 16k; proxy_buffers 32 64k; proxy_max_temp_file_size 0; }\n"
        .to_owned()
}

/// A request, and the part of a file that its response must have.
struct Asked {
    text: String,
    file: usize,
    body: Range<usize>,
    is_head: bool,
}

impl Asked {
    fn draw(random: &mut Random, version: &str) -> Self {
        let file = random.below(FILES.len());
        let (name, length) = FILES[file];
        let (length, prefix) = (length as usize, if random.below(4) == 0 { "/chunks" } else { "" });
        let (mut method, mut fields, mut body) = ("GET", String::new(), 0..length);
        match random.below(6) {
            0 => (method, body) = ("HEAD", 0..0),
            1 | 2 => {
                let from = random.below(length);
                body = from..from + 1 + random.below(length - from);
                fields = format!("Range: bytes={}-{}\r\n", body.start, body.end - 1);
            }
            _ => {}
        }
        let keeps = if version == "1.0" { "Connection: keep-alive\r\n" } else { "" };
        let text = format!("{method} {prefix}/{name} HTTP/{version}\r\nHost: test\r\n{keeps}{fields}\r\n");
        Self { text, file, body, is_head: method == "HEAD" }
    }
}

/// Fields of a response's header.
struct Head {
    length: Option<usize>,
    is_chunked: bool,
    closes: bool,
}

impl Head {
    fn read(stream: &mut impl BufRead) -> Result<Self> {
        let (mut head, mut line) = (Self { length: None, is_chunked: false, closes: false }, String::new());
        stream.read_line(&mut line)?;
        ensure!(line.contains(" 200 ") || line.contains(" 206 "), "{line:?}");
        loop {
            line.clear();
            ensure!(stream.read_line(&mut line)? > 0, "the end within a header");
            match line.trim_end().to_ascii_lowercase().split_once(": ") {
                Some(("content-length", value)) => head.length = Some(value.parse()?),
                Some(("transfer-encoding", "chunked")) => head.is_chunked = true,
                Some(("connection", value)) => head.closes = value == "close",
                None => return Ok(head),
                Some(_) => {}
            }
        }
    }
}

/// Reads a response and compares its body. Returns `false` if the connection ends after this response.
fn answer(stream: &mut impl BufRead, asked: &Asked, file: &[u8]) -> Result<bool> {
    let head = Head::read(stream)?;
    let mut got = Vec::new();
    if asked.is_head {
    } else if head.is_chunked {
        read_chunks(stream, &mut got)?;
    } else if let Some(length) = head.length {
        got.resize(length, 0);
        stream.read_exact(&mut got)?;
    } else {
        stream.read_to_end(&mut got)?;
        same_bytes(&got, &file[asked.body.clone()])?;
        return Ok(false);
    }
    same_bytes(&got, &file[asked.body.clone()])?;
    Ok(!head.closes)
}

fn read_chunks(stream: &mut impl BufRead, into: &mut Vec<u8>) -> Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        stream.read_line(&mut line)?;
        let size = usize::from_str_radix(line.trim(), 16).with_context(|| format!("a chunk of {line:?}"))?;
        let from = into.len();
        into.resize(from + size, 0);
        stream.read_exact(&mut into[from..])?;
        if size == 0 {
            return read_trailer(stream);
        }
        line.clear();
        stream.read_line(&mut line)?;
        ensure!(line == "\r\n", "behind a chunk: {line:?}");
    }
}

fn read_trailer(stream: &mut impl BufRead) -> Result<()> {
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        ensure!(stream.read_line(&mut line)? > 0, "the end within a trailer");
    }
    Ok(())
}

fn connect(server: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(BufReader::with_capacity(64 << 10, stream))
}

/// Makes a connection that the client ends in the middle of a body, by a close or by a reset.
fn leave(random: &mut Random, server: SocketAddr, files: &[Vec<u8>]) -> Result<()> {
    let asked = Asked::draw(random, "1.1");
    let mut stream = connect(server)?;
    stream.get_mut().write_all(asked.text.as_bytes())?;
    let mut some = vec![0; random.below(files[asked.file].len())];
    // Fewer bytes may come, because the request may be a HEAD or ask for a range.
    stream.get_mut().set_read_timeout(Some(Duration::from_millis(20)))?;
    let _ = stream.read_exact(&mut some);
    if random.below(2) == 0 {
        set_socket_linger(stream.get_ref(), Some(Duration::ZERO))?;
    }
    Ok(())
}

/// Makes one connection with all its requests. Returns the number of requests.
fn live(random: &mut Random, server: SocketAddr, files: &[Vec<u8>]) -> Result<usize> {
    let kind = random.below(10);
    if kind == 0 {
        leave(random, server, files)?;
        return Ok(1);
    }
    let version = if kind == 1 { "1.0" } else { "1.1" };
    let all: Vec<Asked> = (0..1 + random.below(12)).map(|_| Asked::draw(random, version)).collect();
    let mut stream = connect(server)?;
    let is_pipelined = kind <= 4 && version == "1.1";
    if is_pipelined {
        let text: String = all.iter().map(|asked| asked.text.as_str()).collect();
        stream.get_mut().write_all(text.as_bytes())?;
    }
    for (turn, asked) in all.iter().enumerate() {
        if !is_pipelined {
            stream.get_mut().write_all(asked.text.as_bytes())?;
        }
        if kind == 9 {
            std::thread::sleep(Duration::from_millis(random.below(20) as u64)); // the test's subject: a client's pauses
        }
        let goes_on = answer(&mut stream, asked, &files[asked.file])
            .with_context(|| format!("response {turn} of kind {kind}, to {:?}", asked.text))?;
        if !goes_on {
            return Ok(turn + 1);
        }
    }
    Ok(all.len())
}

fn mixed(requests: usize) -> Result<()> {
    let settings = Settings { locations: Some(chunks), ..Settings::default() };
    run(Options { settings, ..options() }, |service| {
        until_handed_off(service)?;
        let seed = seed_or_random(None);
        println!("seed {seed}: SHUNT_SEED={seed} has the same requests");
        let files = FILES.iter().map(|(name, _)| std::fs::read(service.files.join(name)));
        let files = files.collect::<std::io::Result<Vec<_>>>()?;
        let (files, server, host) = (&files, service.service.chain().server(), service.lab.client());
        let client = |number: u64| {
            let mut random = Random::new(seed, number);
            let mut left = requests / CLIENTS as usize;
            while left > 0 {
                left = left.saturating_sub(live(&mut random, server, files)?);
            }
            Ok::<(), anyhow::Error>(())
        };
        std::thread::scope(|scope| {
            let client = &client;
            let clients: Vec<_> =
                (0..CLIENTS).map(|number| scope.spawn(move || host.run(|| client(number))?)).collect();
            clients.into_iter().try_for_each(|client| {
                client
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    .with_context(|| format!("seed {seed}"))
            })
        })?;
        went_past(service)
    })
}

/// Asserts that more than a third of the bytes that nginx got as references were handed off. Also asserts that no more
/// handoffs were cancelled than connections ended early.
fn went_past(service: &Running<'_>) -> Result<()> {
    let stats = service.frontend_stats()?;
    let of = |name: &str| stats.count(&format!("store.by_program.nginx.{name}"));
    let (absent, handed) = (of("received_absent"), of("handed_off"));
    ensure!(handed * 3 > absent, "{handed} of {absent} bytes were handed off");
    let cancelled = stats.count("frontend.fe_cancelled");
    let left = stats.count("frontend.fe_client_reset") + stats.count("frontend.fe_out_fin_to_rst");
    ensure!(cancelled <= left + stats.count("frontend.fe_out_rst_moved"), "{cancelled} cancelled, {left} have left");
    Ok(())
}

#[test]
fn requests_of_all_kinds() -> Result<()> {
    mixed(500)
}

/// Takes minutes, so it runs only with `--ignored`. `requests_of_all_kinds` is a sample of it.
#[test]
#[ignore = "it takes minutes"]
fn ten_thousand_requests_of_all_kinds() -> Result<()> {
    mixed(10_000)
}
