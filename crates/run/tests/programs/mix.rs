//! Mix of requests in a random order, which a seed determines. Each response is compared with the expected one.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use shunt_testbed::assert_same_bytes;

use crate::bed::{Bed, bytes};
use crate::http::Client;

/// Sizes of the bodies that the mix asks for.
pub const SIZES: [usize; 12] = [0, 1, 4095, 4096, 4097, 8192, 12_289, 16_384, 65_536, 65_537, 262_144, 1_000_003];

/// Requests that a service answers. Below each prefix it has files whose names are their lengths.
pub struct Site<'a> {
    pub to: SocketAddr,
    pub prefixes: &'a [&'a str],
    /// Paths that answer with the request's body.
    pub echoes: &'a [&'a str],
    pub ranges: bool,
    /// The change that the service makes to a body.
    pub made: fn(Vec<u8>) -> Vec<u8>,
}

/// The change of a service that sends bodies as they are: none.
pub fn unchanged(body: Vec<u8>) -> Vec<u8> {
    body
}

/// Makes the files that services serve, and returns their directory.
pub fn files(bed: &Bed) -> PathBuf {
    let files = bed.path().join("files");
    fs::create_dir_all(&files).unwrap();
    readable(&files);
    for size in SIZES {
        fs::write(files.join(size.to_string()), bytes(size as u64, size)).unwrap();
    }
    files
}

/// Makes a directory readable for programs that have given up their privileges.
pub fn readable(directory: &Path) {
    fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

/// Random numbers from a seed.
pub struct Chooser(u64);

impl Chooser {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        (u64::from_le_bytes(bytes(self.0, 8).try_into().unwrap()) >> 20) as usize % bound
    }

    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Sends a number of requests, each on one of four connections that the seed picks.
pub fn ask(site: &Site<'_>, requests: usize, seed: u64) {
    ask_as(site, || Client::new(site.to), requests, seed);
}

/// Like [`ask`], with clients of another kind.
pub fn ask_as(site: &Site<'_>, client: impl Fn() -> Client, requests: usize, seed: u64) {
    println!("seed {seed}");
    let mut chooser = Chooser(seed << 32);
    let mut clients: Vec<Client> = (0..4).map(|_| client()).collect();
    for turn in 0..requests {
        let client = chooser.below(clients.len());
        one(site, &mut clients[client], &mut chooser, turn);
    }
}

fn one(site: &Site<'_>, client: &mut Client, chooser: &mut Chooser, turn: usize) {
    let size = chooser.one_of(&SIZES);
    let path = format!("{}/{size}", chooser.one_of(site.prefixes));
    let whole = || (site.made)(bytes(size as u64, size));
    let (got, expected) = match chooser.below(10) {
        0 => (client.ask("HEAD", &path, "", b""), Vec::new()),
        1 if site.ranges && size > 0 => {
            let from = chooser.below(size);
            let to = from + chooser.below(size - from);
            let range = format!("Range: bytes={from}-{to}\r\n");
            (client.ask("GET", &path, &range, b""), bytes(size as u64, size)[from..=to].to_vec())
        }
        2 | 3 if !site.echoes.is_empty() && size > 0 => {
            let body = bytes(turn as u64, size);
            (client.ask("POST", chooser.one_of(site.echoes), "", &body), body)
        }
        _ => (client.ask("GET", &path, "", b""), whole()),
    };
    assert!(matches!(got.status(), "200" | "206"), "request {turn}, {path}: {}", got.head);
    assert_same_bytes(&got.body, &expected, format_args!("request {turn}, {path}: {}", got.head));
}
