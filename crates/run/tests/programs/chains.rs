//! Chains of unmodified programs, all of them under Shunt. `make test` asks each for a sample; all of it, 10,000 requests
//! each: `cargo test --release -p shunt-run --test programs -- --ignored`.

use std::net::SocketAddr;

use shunt_odb::store::Limits;

use crate::backends;
use crate::bed::Bed;
use crate::mix::{Site, ask, files, unchanged};
use crate::nginx::{Tier, proxy_to, tier};

const SAMPLE: usize = 250;
const ALL: usize = 10_000;

fn seed() -> u64 {
    u64::from(std::process::id())
}

/// nginx - nginx before a service.
fn two_tiers(bed: &Bed, next: SocketAddr, more: &str) -> [Tier; 2] {
    let (http, server) = proxy_to(next, more);
    let intermediate = tier(bed, "intermediate", &http, &server, true);
    let (http, server) = proxy_to(intermediate.address, more);
    [tier(bed, "frontend", &http, &server, true), intermediate]
}

fn php(requests: usize) {
    let Some(bed) = Bed::new(Limits::default()) else { return };
    let (php, fields) = backends::php(&bed);
    let http = format!("upstream php {{ server {}; keepalive 2; }}", php.address);
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
    let Some(bed) = Bed::new(Limits::default()) else { return };
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
    let Some(bed) = Bed::new(Limits::default()) else { return };
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
    let Some(bed) = Bed::new(Limits::default()) else { return };
    for worker in ["sync", "gthread"] {
        let gunicorn = backends::gunicorn(&bed, worker);
        let tiers = two_tiers(&bed, gunicorn.address, "");
        let prefixes = &["/whole", "/file", "/pieces"];
        let site = Site { to: tiers[0].address, prefixes, echoes: &["/echo"], ranges: false, made: unchanged };
        ask(&site, requests / 2, seed());
    }
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
}
