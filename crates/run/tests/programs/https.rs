//! Chains whose clients speak TLS. Different proxies terminate TLS, different services are behind them, and all run
//! under `shunt run`. `make test` sends a few requests to each chain whose programs `make packages` installs. `make
//! https-chains` installs all programs, and sends 2,000 requests to each chain. A *reference* goes over a connection in
//! place of bytes. The receiver fetches these bytes from the sender's machine if it needs them.

mod behind;
mod ends;

use std::net::SocketAddr;

use shunt_odb::store::Limits;

use crate::backends;
use crate::bed::Bed;
use crate::mix::{Site, ask_as, files, unchanged};
use crate::nginx::{Tier, proxy_to, tier};
use crate::tls::{SUITES, client, roots};
use ends::End;

const SAMPLE: usize = 120;
const ALL: usize = 2_000;

/// Starts the backend: nginx with the files.
fn served(bed: &Bed) -> Tier {
    tier(bed, "backend", "sendfile off; output_buffers 2 256k;", &format!("root {};", files(bed).display()), true)
}

/// Starts the intermediate: nginx in front of the server at `next`.
fn between(bed: &Bed, next: SocketAddr) -> Tier {
    let (http, server) = proxy_to(next, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    tier(bed, "intermediate", &http, &server, true)
}

/// Sends requests to the site. Each client offers one cipher suite.
fn asks(bed: &Bed, end: &End, site: &Site<'_>, requests: usize) {
    let (seed, roots) = (u64::from(std::process::id()), roots(bed));
    for suite in SUITES {
        ask_as(site, || client(end.address, &roots, &[suite]), requests / SUITES.len(), seed);
    }
}

fn of_files(end: &End) -> Site<'static> {
    Site { to: end.address, prefixes: &[""], echoes: &[], ranges: true, made: unchanged }
}

/// Asserts that references were used.
fn was_absent(bed: &Bed) {
    assert!(bed.counted("returned") > 0, "nothing went by reference");
}

/// Tests a proxy that terminates TLS, with two nginx behind it.
fn ended_by(end: impl Fn(&Bed, SocketAddr) -> End, requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let backend = served(&bed);
    let between = between(&bed, backend.address);
    let end = end(&bed, between.address);
    asks(&bed, &end, &of_files(&end), requests);
    was_absent(&bed);
}

/// Tests nginx in front of Varnish, first with a Varnish that caches nothing, then with one that does.
fn varnish(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let backend = served(&bed);
    for kept in [0, 120] {
        let varnish = behind::varnish(&bed, backend.address, kept);
        let end = ends::nginx(&bed, varnish.address);
        asks(&bed, &end, &of_files(&end), requests / 2);
    }
    was_absent(&bed);
}

/// Tests two pools of PHP-FPM, which run as two users, behind one nginx.
fn php(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let (pools, fields) = backends::php(&bed, &["www-data", "nobody"]);
    let servers: String = pools.addresses.iter().map(|address| format!("server {address}; ")).collect();
    let http = format!("upstream php {{ {servers} keepalive 4; }}");
    let intermediate = tier(&bed, "intermediate", &http, &format!("location / {{ {fields} }}"), true);
    let end = ends::nginx(&bed, intermediate.address);
    let prefixes = &["/whole", "/plain", "/file", "/pieces"];
    let site = Site { to: end.address, prefixes, echoes: &["/echo"], ranges: false, made: unchanged };
    asks(&bed, &end, &site, requests);
    was_absent(&bed);
}

/// Tests gunicorn, which reads its bodies from PostgreSQL by psycopg2-binary. This package brings its own OpenSSL.
fn database(requests: usize) {
    let bed = Bed::of(3, Limits::default());
    let database = behind::Database::start(&bed);
    for encrypted in [false, true] {
        let gunicorn = database.gunicorn(&bed, encrypted);
        let end = ends::nginx(&bed, gunicorn.address);
        let prefixes = &["/whole", "/pieces"];
        let site = Site { to: end.address, prefixes, echoes: &["/echo"], ranges: false, made: unchanged };
        asks(&bed, &end, &site, requests / 2);
    }
    was_absent(&bed);
}

macro_rules! chains {
    ($($name:ident: $run:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn a_sample() {
                $run(SAMPLE);
            }

            #[test]
            #[ignore = "2,000 requests: make https-chains"]
            fn all() {
                $run(ALL);
            }
        }
    )*};
}

/// Chains with programs that only `make https-chains` installs.
macro_rules! further_chains {
    ($($name:ident: $run:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            #[ignore = "2,000 requests to programs that it installs: make https-chains"]
            fn all() {
                $run(ALL);
            }
        }
    )*};
}

chains! {
    by_nginx: |requests| ended_by(ends::nginx, requests);
    by_haproxy: |requests| ended_by(ends::haproxy, requests);
    by_apache: |requests| ended_by(ends::apache, requests);
    by_node: |requests| ended_by(ends::node, requests);
    by_java: |requests| ended_by(ends::java, requests);
    before_php: php;
}

further_chains! {
    before_varnish: varnish;
    before_a_database: database;
}
