//! Chains of three nginx, as Debian ships it. A *store* is the part of an agent that keeps the bodies of its machine's
//! programs.

use std::fs;
use std::net::SocketAddr;

use shunt_odb::store::Limits;
use shunt_testbed::assert_same_bytes;

use crate::bed::{Bed, bytes};
use crate::http::Client;
use crate::mix::{SIZES, files};
use crate::nginx::{Tier, proxy_to, tier};

/// Size of a body that does not fit into socket buffers.
pub const LARGE: usize = 48_000_007;

/// Starts the chain. `under_shunt` says for frontend, intermediate and backend whether they run under `shunt run`.
pub fn chain(bed: &Bed, under_shunt: [bool; 3], backend: &str, proxy: &str) -> [Tier; 3] {
    let files = files(bed);
    fs::write(files.join(LARGE.to_string()), bytes(LARGE as u64, LARGE)).unwrap();
    let backend = tier(bed, "backend", backend, &format!("root {};", files.display()), under_shunt[2]);
    let (http, server) = proxy_to(backend.address, proxy);
    let intermediate = tier(bed, "intermediate", &http, &server, under_shunt[1]);
    let (http, server) = proxy_to(intermediate.address, proxy);
    let frontend = tier(bed, "frontend", &http, &server, under_shunt[0]);
    [frontend, intermediate, backend]
}

/// Sends many requests on a few connections, in an order that the seed gives. Returns the total length, in bytes, of
/// the bodies that are large enough to be left in the store.
pub fn load(to: SocketAddr, requests: u64, seed: u64) -> u64 {
    println!("seed {seed}");
    let mut clients: Vec<Client> = (0..4).map(|_| Client::new(to)).collect();
    let mut large = 0;
    for turn in 0..requests {
        let random = u64::from_le_bytes(bytes(seed + turn, 8).try_into().unwrap());
        let size = SIZES[(random >> 8) as usize % SIZES.len()];
        let client = (random >> 40) as usize % clients.len();
        let (head, body) = clients[client].get(&format!("/{size}"));
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_same_bytes(&body, &bytes(size as u64, size), format_args!("request {turn}"));
        large += if size >= 65_536 { size as u64 } else { 0 };
    }
    large
}

#[test]
fn bodies_skip_the_intermediate_and_arrive_unchanged() {
    let bed = Bed::of(3, Limits::default());
    for (turn, backend) in ["sendfile off;", "sendfile on;", "sendfile off; output_buffers 1 512k;"].iter().enumerate()
    {
        let (before, between) = (bed.counted("fetched_bytes"), bed.machine_of("intermediate"));
        let passed_before = between.program_counted("nginx", "passed_on");
        let tiers = chain(&bed, [true; 3], backend, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
        let large = load(tiers[0].address, 400, 100 * turn as u64);
        let fetched = bed.counted("fetched_bytes") - before;
        println!("{backend} {large} bytes in large bodies, {fetched} fetched");
        assert!(fetched * 10 > large * 8, "the frontend fetches what the intermediate has not had");
        let passed_on = between.program_counted("nginx", "passed_on") - passed_before;
        assert!(passed_on * 10 > large * 8, "the intermediate says so, too: {passed_on}");
        assert!(fetched * 10 < large * 12, "nobody fetches a body twice: the intermediate did not look at it");
    }
}

#[test]
fn usual_buffers_and_temporary_files_change_nothing() {
    let bed = Bed::new(Limits::default());
    for proxy in ["", "proxy_buffering off;", "proxy_buffers 4 4k; proxy_buffer_size 4k; proxy_busy_buffers_size 8k;"] {
        let tiers = chain(&bed, [true; 3], "sendfile off;", proxy);
        load(tiers[0].address, 200, 7);
    }
}

#[test]
fn any_of_the_tiers_may_be_plain() {
    let bed = Bed::new(Limits::default());
    for mask in 0..7 {
        let tiers = chain(&bed, [mask & 1 != 0, mask & 2 != 0, mask & 4 != 0], "sendfile off;", "");
        load(tiers[0].address, 100, 1000 + mask);
    }
}

#[test]
fn a_full_store_costs_no_byte() {
    let limits = Limits { bytes: 3 << 20, segment_bytes: 1 << 20, ..Limits::default() };
    let bed = Bed::new(limits);
    let tiers = chain(&bed, [true; 3], "sendfile off;", "proxy_buffers 32 64k;");
    load(tiers[0].address, 300, 5);
}

#[test]
fn a_large_file_comes_whole() {
    let bed = Bed::of(3, Limits::default());
    for backend in ["sendfile on;", "sendfile off; output_buffers 2 3m;"] {
        let tiers = chain(&bed, [true; 3], backend, "");
        for _ in 0..3 {
            let (_, body) = Client::new(tiers[0].address).get(&format!("/{LARGE}"));
            assert_same_bytes(&body, &bytes(LARGE as u64, LARGE), backend);
        }
    }
}
