//! Writers learn from receivers whether to send a body's bytes inline (in the connection) or by reference to the store
//! of the writer's machine. The tests use chains of real programs and the programs' own counters. No test measures
//! time. A *store* is the part of an agent that keeps the bodies of its machine's programs.

use std::fs;
use std::net::SocketAddr;

use shunt_odb::store::Limits;
use shunt_testbed::assert_same_bytes;

use crate::backends;
use crate::bed::{Bed, bytes};
use crate::http::Client;
use crate::mix::files;
use crate::nginx::{Tier, proxy_to, tier};

const SIZE: usize = 65_536;
const ENOUGH: usize = 150;

/// Starts a chain of three nginx. `locations` are more locations of the intermediate.
fn chain(bed: &Bed, backend: &str, locations: &str) -> [Tier; 3] {
    let server = format!("root {}; sendfile off; {backend}", files(bed).display());
    let backend = tier(bed, "backend", "", &server, true);
    let (http, server) = proxy_to(backend.address, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    let cache = "proxy_cache_path cache keys_zone=here:1m;";
    let intermediate = tier(bed, "intermediate", &format!("{http} {cache}"), &format!("{server} {locations}"), true);
    let (http, server) = proxy_to(intermediate.address, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    [tier(bed, "frontend", &http, &server, true), intermediate, backend]
}

/// Returns a location of the intermediate. It has the directives `more`, and passes requests below it to the backend.
fn location(name: &str, more: &str) -> String {
    let proxy = "proxy_pass http://next/; proxy_http_version 1.1; proxy_set_header Connection '';";
    format!("location {name} {{ {proxy} proxy_buffers 32 64k; proxy_max_temp_file_size 0; {more} }}")
}

/// Growth of counters during some requests.
#[derive(Debug)]
struct Meanwhile {
    /// At the backend: number of bytes that were sent inline because receivers had read earlier payloads of this kind,
    /// and number of payloads that were sent by reference to find out whether receivers still read such payloads
    /// (probes).
    real: u64,
    probes: u64,
    /// At the intermediate: number of bytes that it passed on as references, number of page faults on memory that only
    /// stands for bytes, and number of bytes that were fetched because a call needed them.
    passed_on: u64,
    faults: u64,
    fetched: u64,
}

/// Fetches a body `times` times and compares it each time. Returns the growth of the counters.
fn ask(bed: &Bed, to: SocketAddr, path: impl Fn(usize) -> String, size: usize, times: usize) -> Meanwhile {
    let (backend, between) = (bed.machine_of("backend"), bed.machine_of("intermediate"));
    let counts = || {
        let at_backend = ["sent_real_touched", "probes"].map(|name| backend.program_counted("nginx", name));
        let names = ["passed_on", "faults", "fetched"];
        (at_backend, names.map(|name| between.program_counted("nginx", name)))
    };
    let (at_backend, at_intermediate) = counts();
    let mut client = Client::new(to);
    for turn in 0..times {
        let (head, body) = client.get(&path(turn));
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_same_bytes(&body, &bytes(size as u64, size), format_args!("request {turn}"));
    }
    let ([real, probes], [passed_on, faults, fetched]) = counts();
    let meanwhile = Meanwhile {
        real: real - at_backend[0],
        probes: probes - at_backend[1],
        passed_on: passed_on - at_intermediate[0],
        faults: faults - at_intermediate[1],
        fetched: fetched - at_intermediate[2],
    };
    println!("{}, {times} times: {meanwhile:?}", path(0));
    meanwhile
}

/// Returns nine tenths of the bytes of `times` bodies.
fn most(times: usize) -> u64 {
    (times * SIZE) as u64 / 10 * 9
}

fn is_followed(more: &str) {
    let bed = Bed::of(3, Limits::default());
    let tiers = chain(&bed, "", &location("/read/", more));
    let to = tiers[0].address;
    let untouched = |_| format!("/{SIZE}");
    let touched = |turn| format!("/read/{SIZE}?{turn}");
    for round in 0..2 {
        // In the first round the backend has learned nothing yet. In the second round it has to notice that the
        // receiver no longer reads bodies. Only one payload in 64 (a probe) shows this.
        let patience = if round == 0 { 1 } else { 200 };
        let known = (0..patience).any(|_| ask(&bed, to, untouched, SIZE, 20).real == 0);
        assert!(known, "nobody looks at anything, and it still goes for real");
        let by_reference = ask(&bed, to, untouched, SIZE, 50);
        assert!(by_reference.passed_on >= most(50), "what nobody looks at goes by reference: {by_reference:?}");
        assert_eq!(by_reference.real, 0, "{by_reference:?}");
        // Each request has a different URL, so that no cache has the response.
        ask(&bed, to, |turn| format!("{}.{round}", touched(turn)), SIZE, 40);
        let real = ask(&bed, to, |turn| format!("{}.{round}.again", touched(turn)), SIZE, ENOUGH);
        assert!(real.real >= most(ENOUGH), "what the intermediate reads goes for real: {real:?}");
        // Each body is two payloads, and about one payload in 64 is a probe.
        assert!((1..=16).contains(&real.probes), "{real:?}");
        // The other bytes went by reference: in probes, and in a few payloads that followed late reports. A body that
        // nobody looked at is reported only when its memory is used again, which may be long after it was freed.
        let by_reference = (ENOUGH * SIZE) as u64 - real.real;
        let payloads = by_reference.div_ceil(SIZE as u64 / 2);
        assert!(real.faults <= 6 * payloads && real.fetched <= by_reference, "only those are fetched: {real:?}");
    }
}

#[test]
fn bodies_that_a_filter_reads_go_as_bytes_as_long_as_it_does() {
    is_followed("sub_filter_types *; sub_filter 'no body has these words' '';");
}

#[test]
fn bodies_that_a_cache_keeps_go_as_bytes_as_long_as_it_does() {
    is_followed("proxy_cache here; proxy_cache_valid any 10m;");
}

#[test]
fn one_content_type_is_learnt_without_another() {
    let bed = Bed::of(3, Limits::default());
    let types = "types { text/html html; application/octet-stream bin; }";
    // sub_filter reads only text/html.
    let tiers = chain(&bed, types, &location("/some/", "sub_filter 'no body has these words' '';"));
    for name in ["page.html", "file.bin"] {
        fs::write(files(&bed).join(name), bytes(SIZE as u64, SIZE)).unwrap();
    }
    let ask = |name: &str, times| ask(&bed, tiers[0].address, |_| format!("/some/{name}"), SIZE, times);
    for _ in 0..10 {
        ask("page.html", 5);
        ask("file.bin", 5);
    }
    for _ in 0..3 {
        let page = ask("page.html", 20);
        assert!(page.real >= most(19) && page.passed_on <= page.probes * SIZE as u64, "{page:?}");
        let file = ask("file.bin", 20);
        assert!(file.real == 0 && file.passed_on >= most(20), "{file:?}");
    }
}

/// In Table 4.1 of the paper on on-demand buffers, PHP's framing costs one, one, two and no page faults. Here it costs
/// none, at the latest when the writer has learned from the receiver.
#[test]
fn framing_costs_no_faults() {
    let bed = Bed::of(3, Limits::default());
    let (php, fields) = backends::php(&bed, &["www-data"]);
    // nginx makes a new connection for each request, which is its default.
    let http = format!("upstream php {{ server {}; }}", php.addresses[0]);
    let server = format!("location / {{ {fields} fastcgi_buffer_size 16k; fastcgi_buffers 32 64k; }}");
    let intermediate = tier(&bed, "intermediate", &http, &server, true);
    let (http, server) = proxy_to(intermediate.address, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    let frontend = tier(&bed, "frontend", &http, &server, true);
    let ask = |how: &str, size| ask(&bed, frontend.address, |_| format!("/{how}/{size}"), size, 20);
    for how in ["plain", "whole"] {
        for size in [4096, 8192, 12_289] {
            let meanwhile = ask(how, size);
            assert_eq!(meanwhile.faults, 0, "from the first on: {how}, {size} bytes: {meanwhile:?}");
        }
        // A large write has several FastCGI records, and the headers of all but the first are inside it. The writer has
        // to learn that the receiver reads these places.
        for size in [16_384, SIZE] {
            let known = (0..50).map(|_| ask(how, size)).any(|round| round.faults == 0 && round.passed_on > 0);
            assert!(known, "{how}, {size} bytes: it still costs faults");
        }
    }
}
