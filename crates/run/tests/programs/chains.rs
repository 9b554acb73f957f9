//! Chains of unmodified programs, all under `shunt run`. `make test` sends a sample of requests to each chain. `cargo
//! test --release -p shunt-run --test programs -- --ignored` sends 10,000 to each.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use shunt_odb::store::Limits;

use crate::backends;
use crate::bed::Bed;
use crate::mix::{SIZES, Site, ask, files, unchanged};
use crate::nginx::{Tier, proxy_to, tier};

const SAMPLE: usize = 250;
const ALL: usize = 10_000;

fn seed() -> u64 {
    u64::from(std::process::id())
}

/// Starts two nginx in front of a service.
fn two_tiers(bed: &Bed, next: SocketAddr, more: &str) -> [Tier; 2] {
    let (http, server) = proxy_to(next, more);
    let intermediate = tier(bed, "intermediate", &http, &server, true);
    let (http, server) = proxy_to(intermediate.address, more);
    [tier(bed, "frontend", &http, &server, true), intermediate]
}

fn php(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let (php, fields) = backends::php(&bed, &["www-data"]);
    let http = format!("upstream php {{ server {}; keepalive 2; }}", php.addresses[0]);
    for more in ["", "fastcgi_buffering off; proxy_buffering off;"] {
        let (fastcgi, proxy): (Vec<_>, Vec<_>) =
            more.split_inclusive(';').partition(|directive| directive.contains("fastcgi"));
        let server = format!("location / {{ {fields} {} }}", fastcgi.concat());
        let intermediate = tier(&bed, "intermediate", &http, &server, true);
        let (next, server) = proxy_to(intermediate.address, &proxy.concat());
        let frontend = tier(&bed, "frontend", &next, &server, true);
        let prefixes = &["/whole", "/plain", "/file", "/pieces"];
        let site = Site { to: frontend.address, prefixes, echoes: &["/echo"], ranges: false, made: unchanged };
        ask(&site, requests / 2, seed());
    }
}

fn haproxy(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let server = format!("root {};", files(&bed).display());
    for (backend, splices) in [
        ("sendfile on;", "option splice-auto\n  option splice-response\n  option splice-request"),
        ("sendfile off;", ""),
    ] {
        let backend = tier(&bed, "backend", backend, &server, true);
        let haproxy = backends::haproxy(&bed, backend.address, splices);
        let (http, server) = proxy_to(haproxy.address, "");
        let frontend = tier(&bed, "frontend", &http, &server, true);
        for to in [haproxy.address, frontend.address] {
            let site = Site { to, prefixes: &[""], echoes: &[], ranges: true, made: unchanged };
            ask(&site, requests / 4, seed());
        }
    }
}

fn apache(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    for more in
        ["EnableSendfile On\nEnableMMAP Off", "EnableSendfile Off\nEnableMMAP On", "EnableSendfile Off\nEnableMMAP Off"]
    {
        let apache = backends::apache(&bed, more);
        let tiers = two_tiers(&bed, apache.address, "");
        let site = Site { to: tiers[0].address, prefixes: &[""], echoes: &[], ranges: true, made: unchanged };
        ask(&site, requests / 3, seed());
    }
}

fn gunicorn(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    for worker in ["sync", "gthread", "gevent"] {
        let gunicorn = backends::gunicorn(&bed, worker);
        let tiers = two_tiers(&bed, gunicorn.address, "");
        let prefixes = &["/whole", "/file", "/pieces"];
        let site = Site { to: tiers[0].address, prefixes, echoes: &["/echo"], ranges: false, made: unchanged };
        ask(&site, requests / 3, seed());
    }
}

/// Tests filters that read, change and cache bodies.
fn filters(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let served = files(&bed);
    pages(&served);
    let server = format!("root {};", served.display());
    let cached = "proxy_cache here; proxy_cache_valid any 10m;";
    let compressed = "proxy_set_header Accept-Encoding gzip;";
    let gzip = "gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any; gzip_http_version 1.0;";
    let substituted = "sub_filter_types *; sub_filter_once off; sub_filter 'ab' 'xyz!';";
    let small = "proxy_buffers 4 4k; proxy_buffer_size 4k; proxy_busy_buffers_size 8k;";
    let gunzip = format!("{compressed} gunzip on;");
    // Directives of the backend, of the intermediate and of the frontend, prefixes of paths, whether to ask for ranges,
    // and the expected change of bodies.
    type Case<'a> = (&'a str, &'a str, &'a str, &'static [&'static str], bool, fn(Vec<u8>) -> Vec<u8>);
    let cases: [Case<'_>; 5] = [
        (gzip, compressed, &gunzip, &[""], false, unchanged),
        ("", substituted, "", &[""], false, replaced),
        ("", "", "ssi on; ssi_types *;", &["/ssi"], false, included),
        ("", cached, cached, &[""], true, unchanged),
        ("sendfile off;", small, small, &[""], true, unchanged),
    ];
    for (at_backend, at_intermediate, at_frontend, prefixes, ranges, made) in cases {
        let backend = tier(&bed, "backend", at_backend, &server, true);
        let cache = "proxy_cache_path cache keys_zone=here:1m;";
        let (http, proxy) = proxy_to(backend.address, at_intermediate);
        let intermediate = tier(&bed, "intermediate", &format!("{http} {cache}"), &proxy, true);
        let (http, proxy) = proxy_to(intermediate.address, at_frontend);
        let frontend = tier(&bed, "frontend", &format!("{http} {cache}"), &proxy, true);
        ask(&Site { to: frontend.address, prefixes, echoes: &[], ranges, made }, requests / 5, seed());
    }
}

/// Writes pages that include the files.
fn pages(files: &Path) {
    let directory = files.join("ssi");
    fs::create_dir_all(&directory).unwrap();
    for size in SIZES {
        let page = format!("<!--# include virtual=\"/{size}\" -->the end");
        fs::write(directory.join(size.to_string()), page).unwrap();
    }
}

fn included(mut body: Vec<u8>) -> Vec<u8> {
    body.extend_from_slice(b"the end");
    body
}

/// Replaces `ab` as nginx's sub_filter does: in upper and lower case.
fn replaced(body: Vec<u8>) -> Vec<u8> {
    let mut made = Vec::with_capacity(body.len());
    let mut rest = &body[..];
    while let Some((first, after)) = rest.split_first() {
        if first.eq_ignore_ascii_case(&b'a') && after.first().is_some_and(|next| next.eq_ignore_ascii_case(&b'b')) {
            made.extend_from_slice(b"xyz!");
            rest = &after[1..];
        } else {
            made.push(*first);
            rest = after;
        }
    }
    made
}

macro_rules! chains {
    ($($name:ident)*) => {$(
        mod $name {
            #[test]
            fn a_sample() {
                super::$name(super::SAMPLE);
            }

            #[test]
            #[ignore = "10,000 requests take a minute"]
            fn all() {
                super::$name(super::ALL);
            }
        }
    )*};
}

chains! {
    php
    haproxy
    apache
    gunicorn
    filters
}
