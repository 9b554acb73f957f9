//! The store as a process sees it: real sockets, real shared memory, every byte compared.

use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use shunt_odb::fetch::{FetchError, Holders};
use shunt_odb::hold::{Hold, Returns};
use shunt_odb::reference::{Reference, Weight};
use shunt_odb::segment::Writer;
use shunt_odb::store::Limits;
use shunt_odb::store::server::Server;

/// A store in a thread of its own; it ends with the test's process.
struct Bed {
    dir: tempfile::TempDir,
    holder: SocketAddr,
}

impl Bed {
    fn new(limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let leases = Server::listen_for_programs(&dir.path().join("store")).unwrap();
        let fetches = TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = fetches.local_addr().unwrap();
        let server = Server::new(limits, leases, fetches, holder).unwrap();
        std::thread::spawn(move || server.run().unwrap());
        Self { dir, holder }
    }

    fn program(&self) -> Program {
        Program::new(&self.dir.path().join("store"))
    }
}

struct Program(std::os::fd::OwnedFd);

impl Program {
    fn new(store: &Path) -> Self {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(store).unwrap()).unwrap();
        Self(socket)
    }

    fn lease(&self) -> Option<Writer> {
        shunt_odb::store::client::lease(&self.0).unwrap()
    }
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| ((seed + at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn fetch(holders: &Holders, reference: &Reference) -> Result<Vec<u8>, FetchError> {
    let mut got = vec![0; reference.length as usize];
    holders.fetch(reference, &mut got).map(|()| got)
}

/// Waits for what another thread does, with a generous bound.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_put_is_fetched_whole_and_in_parts() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let holders = Holders::default();
    for (seed, length) in [(1, 1), (2, 4095), (3, 4096), (4, 4097), (5, 65_536), (6, 3_000_001)] {
        let body = bytes(seed, length);
        let reference = writer.put(&[IoSlice::new(&body[..length / 3]), IoSlice::new(&body[length / 3..])]).unwrap();
        assert_eq!(fetch(&holders, &reference).unwrap(), body, "{length} bytes");
        let part = Reference { offset: (length / 2) as u64, length: (length - length / 2) as u64, ..reference };
        assert_eq!(fetch(&holders, &part).unwrap(), body[length / 2..]);
    }
}

#[test]
fn a_files_bytes_are_those_of_when_it_was_put() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let body = bytes(7, 200_000);
    file.write_all(&body).unwrap();
    let reference = writer.put_file(std::os::fd::AsFd::as_fd(&file), 1000, 150_000).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(fetch(&Holders::default(), &reference).unwrap(), body[1000..151_000]);
    assert!(writer.put_file(std::os::fd::AsFd::as_fd(&file), 0, 10).is_none(), "nothing is there any more");
}

#[test]
fn payloads_outlive_their_program_and_go_with_the_last_share() {
    let limits = Limits { bytes: 9 << 20, segment_bytes: 8 << 20, ..Limits::default() };
    let bed = Bed::new(limits);
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    assert!(bed.program().lease().is_none(), "there is room for one segment only");
    let body = bytes(8, 100_000);
    let reference = writer.put(&[IoSlice::new(&body)]).unwrap();
    drop((writer, program));
    let holders = Holders::default();
    assert_eq!(fetch(&holders, &reference).unwrap(), body);
    let other = bed.program();
    assert!(other.lease().is_none(), "somebody may still ask for it");

    let returns = Arc::new(Returns::default());
    let hold = Hold::new(reference.payload, reference.weight, &returns);
    let forwarded = hold.refer(10, 20).unwrap();
    drop(hold);
    holders.send_returns(&returns);
    assert_eq!(fetch(&holders, &forwarded).unwrap(), body[10..30], "half of the share is still out");
    drop(Hold::new(forwarded.payload, forwarded.weight, &returns));
    holders.send_returns(&returns);
    until("the segment is free", || other.lease().is_some());
    assert!(matches!(fetch(&holders, &forwarded), Err(FetchError::Gone(_))));
}

#[test]
fn pages_are_used_again_when_the_shares_are_back_and_never_before() {
    let limits = Limits { segment_bytes: 1 << 20, ..Limits::default() };
    let bed = Bed::new(limits);
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let holders = Holders::default();
    let returns = Arc::new(Returns::default());
    let mut out: Vec<(Reference, Vec<u8>)> = Vec::new();
    let seed = std::process::id() as u64;
    println!("seed {seed}");
    let mut random = seed;
    let mut full = 0;
    for round in 0..3000u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = 1 + (random >> 33) as usize % 90_000;
        let body = bytes(round, length);
        if let Some(reference) = writer.put(&[IoSlice::new(&body)]) {
            out.push((reference, body));
            continue;
        }
        full += 1;
        let (reference, body) = out.swap_remove((random >> 20) as usize % out.len());
        assert_eq!(fetch(&holders, &reference).unwrap(), body, "round {round}");
        returns.give(reference.payload, reference.weight);
        holders.send_returns(&returns);
        let gone = |reference: &Reference| matches!(fetch(&holders, reference), Err(FetchError::Gone(_)));
        assert!(gone(&reference), "its last share is back");
    }
    assert!(full > 100, "the segment was full {full} times only");
    for (reference, body) in &out {
        assert_eq!(fetch(&holders, reference).unwrap(), *body);
    }
}

#[test]
fn nobody_gets_a_byte_without_the_secret_or_beyond_the_end() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let reference = writer.put(&[IoSlice::new(&bytes(9, 5000))]).unwrap();
    let holders = Holders::default();
    let mut wrong = vec![reference; 6];
    wrong[0].payload.secret ^= 1;
    wrong[1].payload.slot += 1;
    wrong[2].payload.slot = u32::MAX;
    wrong[3].payload.segment = 77;
    wrong[4].offset = 1;
    wrong[5].offset = 5000;
    for wrong in &wrong {
        assert!(matches!(fetch(&holders, wrong), Err(FetchError::Gone(_))), "{wrong:?}");
    }
    let returns = Returns::default();
    returns.give(wrong[0].payload, Weight::WHOLE);
    holders.send_returns(&returns);
    assert_eq!(fetch(&holders, &reference).unwrap(), bytes(9, 5000), "only who has the secret gives shares back");
}

#[test]
fn a_lease_ends_and_then_a_fetch_says_so() {
    let bed = Bed::new(Limits { lease_ms: 200, ..Limits::default() });
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let reference = writer.put(&[IoSlice::new(&bytes(10, 5000))]).unwrap();
    let holders = Holders::default();
    until("the lease has ended", || matches!(fetch(&holders, &reference), Err(FetchError::Gone(_))));
    assert_eq!(writer.payloads(), 0);
}

#[test]
fn a_reader_that_reads_nothing_or_talks_nonsense_stops_nobody_else() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap();
    let body = bytes(11, 4 << 20);
    let reference = writer.put(&[IoSlice::new(&body)]).unwrap();
    let mut idle = TcpStream::connect(bed.holder).unwrap();
    let request = shunt_odb::store::server::Request {
        kind: shunt_odb::store::server::FETCH.into(),
        zero: 0.into(),
        reference: reference.emit(),
    };
    for _ in 0..100 {
        idle.write_all(zerocopy::IntoBytes::as_bytes(&request)).unwrap();
    }
    let mut nonsense = TcpStream::connect(bed.holder).unwrap();
    nonsense.write_all(&[0xff; 640]).unwrap();
    let holders = Holders::default();
    assert_eq!(fetch(&holders, &reference).unwrap(), body);
    let mut end = Vec::new();
    let ended = nonsense.read_to_end(&mut end);
    assert!(end.is_empty() && ended.is_ok_and(|count| count == 0) || end.is_empty(), "no answer to nonsense");
    // What the idle one asked for comes whole, all hundred times.
    let mut answer = vec![0; 16 + body.len()];
    for turn in 0..100 {
        idle.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], [1, 0, 0, 0]);
        assert!(answer[16..] == body, "turn {turn}");
    }
}

#[test]
fn a_holder_that_is_not_there_is_an_error_and_not_a_wait() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut reference = program.lease().unwrap().put(&[IoSlice::new(b"x")]).unwrap();
    reference.payload.holder = nobody;
    assert!(matches!(fetch(&Holders::default(), &reference), Err(FetchError::Holder(..))));
}
