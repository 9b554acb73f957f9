//! nginx - nginx - nginx, as Debian ships it.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::Duration;

use shunt_odb::store::Limits;

use crate::bed::{Bed, Program, bytes, free_address, wait_until_listening};

const NGINX: &str = "/usr/sbin/nginx";

/// A body that no socket buffers hold.
pub const LARGE: usize = 48_000_007;

/// Sizes of the bodies that the load asks for.
const SIZES: [usize; 12] = [0, 1, 4095, 4096, 4097, 8192, 12_289, 16_384, 65_536, 65_537, 262_144, 1_000_003];

pub struct Tier {
    pub address: SocketAddr,
    _nginx: Program,
}

fn tier(bed: &Bed, name: &str, http: &str, server: &str, under_shunt: bool) -> Tier {
    let address = free_address();
    let prefix = bed.path().join(name);
    fs::create_dir_all(prefix.join("temp")).unwrap();
    let mut text = String::from("worker_processes 1; error_log stderr warn; events { worker_connections 1024; }\n");
    writeln!(text, "http {{ access_log off; keepalive_requests 100000; {http}").unwrap();
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(text, "{kind}_temp_path temp/{kind};").unwrap();
    }
    writeln!(text, "server {{ listen {address}; {server} }} }}").unwrap();
    fs::write(prefix.join("nginx.conf"), text).unwrap();
    let mut command = if under_shunt { bed.under_shunt(NGINX) } else { bed.plain(NGINX) };
    command.arg("-p").arg(&prefix).args(["-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; pid nginx.pid;"]);
    let nginx = Program(command.stdin(Stdio::null()).spawn().unwrap());
    wait_until_listening(address);
    Tier { address, _nginx: nginx }
}

fn proxy_to(upstream: SocketAddr, more: &str) -> (String, String) {
    let http = format!("upstream next {{ server {upstream}; keepalive 16; }}");
    let server = format!(
        "location / {{ proxy_pass http://next; proxy_http_version 1.1; proxy_set_header Connection ''; {more} }}"
    );
    (http, server)
}

pub struct Client(BufReader<TcpStream>);

impl Client {
    pub fn new(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn get(&mut self, path: &str) -> (String, Vec<u8>) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
        let (mut head, mut length) = (String::new(), None);
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the connection ended in {head:?}");
            if line == "\r\n" {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                length = Some(value.trim().parse().unwrap());
            }
            head += &line;
        }
        let mut body = vec![0; length.unwrap_or_else(|| panic!("no length: {head}"))];
        self.0.read_exact(&mut body).unwrap();
        (head, body)
    }
}

/// Starts the chain; each tier is under Shunt or not.
pub fn chain(bed: &Bed, under_shunt: [bool; 3], backend: &str, proxy: &str) -> [Tier; 3] {
    let files = bed.path().join("files");
    fs::create_dir_all(&files).unwrap();
    fs::set_permissions(&files, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for size in SIZES.into_iter().chain([LARGE]) {
        fs::write(files.join(size.to_string()), bytes(size as u64, size)).unwrap();
    }
    let backend = tier(bed, "backend", backend, &format!("root {};", files.display()), under_shunt[2]);
    let (http, server) = proxy_to(backend.address, proxy);
    let intermediate = tier(bed, "intermediate", &http, &server, under_shunt[1]);
    let (http, server) = proxy_to(intermediate.address, proxy);
    let frontend = tier(bed, "frontend", &http, &server, under_shunt[0]);
    [frontend, intermediate, backend]
}

/// Many requests on a few connections, in an order that the seed gives. Returns the bytes of the bodies that are
/// large enough to be left in the store.
fn load(to: SocketAddr, requests: u64, seed: u64) -> u64 {
    println!("seed {seed}");
    let mut clients: Vec<Client> = (0..4).map(|_| Client::new(to)).collect();
    let mut large = 0;
    for turn in 0..requests {
        let random = u64::from_le_bytes(bytes(seed + turn, 8).try_into().unwrap());
        let size = SIZES[(random >> 8) as usize % SIZES.len()];
        let client = (random >> 40) as usize % clients.len();
        let (head, body) = clients[client].get(&format!("/{size}"));
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(body == bytes(size as u64, size), "request {turn}, {size} bytes: the body differs");
        large += if size >= 65_536 { size as u64 } else { 0 };
    }
    large
}

#[test]
fn bodies_skip_the_intermediate_and_arrive_unchanged() {
    let Some(bed) = Bed::new(Limits::default()) else { return };
    for (turn, backend) in ["sendfile off;", "sendfile on;", "sendfile off; output_buffers 1 512k;"].iter().enumerate()
    {
        let before = bed.counters.fetched_bytes.load(Ordering::Relaxed);
        let tiers = chain(&bed, [true; 3], backend, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
        let large = load(tiers[0].address, 400, 100 * turn as u64);
        let fetched = bed.counters.fetched_bytes.load(Ordering::Relaxed) - before;
        println!("{backend} {large} bytes in large bodies, {fetched} fetched");
        assert!(fetched * 10 > large * 8, "the frontend fetches what the intermediate has not had");
        assert!(fetched * 10 < large * 12, "nobody fetches a body twice: the intermediate did not look at it");
    }
}

#[test]
fn usual_buffers_and_temporary_files_change_nothing() {
    let Some(bed) = Bed::new(Limits::default()) else { return };
    for proxy in ["", "proxy_buffering off;", "proxy_buffers 4 4k; proxy_buffer_size 4k; proxy_busy_buffers_size 8k;"] {
        let tiers = chain(&bed, [true; 3], "sendfile off;", proxy);
        load(tiers[0].address, 200, 7);
    }
}

#[test]
fn any_of_the_tiers_may_be_plain() {
    let Some(bed) = Bed::new(Limits::default()) else { return };
    for mask in 0..7 {
        let tiers = chain(&bed, [mask & 1 != 0, mask & 2 != 0, mask & 4 != 0], "sendfile off;", "");
        load(tiers[0].address, 100, 1000 + mask);
    }
}

#[test]
fn a_full_store_costs_no_byte() {
    let limits = Limits { bytes: 3 << 20, segment_bytes: 1 << 20, ..Limits::default() };
    let Some(bed) = Bed::new(limits) else { return };
    let tiers = chain(&bed, [true; 3], "sendfile off;", "proxy_buffers 32 64k;");
    load(tiers[0].address, 300, 5);
}

#[test]
fn a_large_file_comes_whole() {
    let Some(bed) = Bed::new(Limits::default()) else { return };
    for backend in ["sendfile on;", "sendfile off; output_buffers 2 3m;"] {
        let tiers = chain(&bed, [true; 3], backend, "");
        for _ in 0..3 {
            let (_, body) = Client::new(tiers[0].address).get(&format!("/{LARGE}"));
            assert!(body == bytes(LARGE as u64, LARGE), "{backend} the body differs");
        }
    }
}
