//! A test with very many senders at once, whose clients never answer. A *sender* is a backend's socket for one client.
//! A *sweep* examines some of the senders, and gives up those without progress.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shunt_handoff::payload::Payload;
use shunt_handoff::sender::{Claimant, SenderKey, SenderLimits, SenderTable, Senders, Slot};
use shunt_wire::Address;
use shunt_wire::local::{Offer, Reason};
use shunt_wire::peer::Claim;
use zerocopy::FromZeros;

use super::host::Host;

/// Number of senders. Each has two descriptors.
const SENDERS: u16 = 8000;
/// Number of sweeps that together examine each sender.
const SWEEPS: u32 = 10;
const PROGRESS: Duration = Duration::from_secs(60);

/// A stand-in for the BPF maps of the senders. It holds the senders' keys alone.
#[derive(Default)]
struct Table(HashSet<SenderKey>);

impl SenderTable for Table {
    fn write_slot(&mut self, _: u32, _: &Slot) {}

    fn window(&self, _: u32) -> u32 {
        0
    }

    fn insert(&mut self, key: &SenderKey, _: u32) -> io::Result<()> {
        self.0.insert(*key);
        Ok(())
    }

    fn remove(&mut self, key: &SenderKey) {
        self.0.remove(key);
    }

    fn await_end(&mut self, _: u32, _: u32) {}

    fn acked(&self, _: u32) -> u32 {
        0
    }

    fn take_reports(&mut self) -> Vec<SenderKey> {
        Vec::new()
    }
}

/// Payload of the first 1000 bytes of this program's file.
fn payload() -> Payload {
    let file = File::open("/proc/self/exe").expect("this program");
    let metadata = file.metadata().expect("its size");
    let mut offer = Offer::new_zeroed();
    offer.length = 1000;
    offer.size = metadata.size();
    offer.mtime_ns = metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec();
    Payload::new(file, &offer)
}

fn claim(number: u16) -> Claim {
    let (client, server) = ("10.1.0.2:0".parse::<SocketAddr>(), "192.0.2.1:80".parse::<SocketAddr>());
    let (client, server) = (client.expect("an address"), server.expect("an address"));
    let mut claim = Claim::new_zeroed();
    (claim.worker, claim.handoff, claim.flow.first, claim.flow.mss) =
        (1.into(), u64::from(number).into(), 1, 1000.into());
    (claim.length, claim.flow.snd_wnd, claim.flow.snd_cwnd) = (1000.into(), 65_535.into(), 10.into());
    (claim.flow.client_address, claim.flow.client_port) = (Address::from(client.ip()), (10_000 + number).to_be_bytes());
    (claim.flow.server_address, claim.flow.server_port) = (Address::from(server.ip()), server.port().to_be_bytes());
    claim
}

#[test]
fn ten_sweeps_look_at_every_sender() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("as many descriptors as there may be");
    let _host = Host::new();
    let limits = SenderLimits {
        senders: 16_384,
        send_buffer_bytes: 65_536,
        memory_bytes: 1 << 30,
        park: PROGRESS,
        progress: PROGRESS,
    };
    let mut senders = Senders::new(Table::default(), limits);
    let (local, began) = ("10.1.0.1:7001".parse().expect("an address"), Instant::now());
    for number in 0..SENDERS {
        let claim = claim(number);
        senders.start(&claim, Claimant::of(0, &claim), local, payload(), began).expect("it begins");
    }
    eprintln!("{SENDERS} senders began in {:?}", began.elapsed());
    assert_eq!((senders.len(), senders.busy(), senders.table().0.len()), (8000, 8000, 8000));

    let soon = Instant::now();
    for _ in 0..SWEEPS {
        assert_eq!(senders.sweep(began + Duration::from_secs(1)), []);
    }
    eprintln!("a sweep took {:?}", soon.elapsed() / SWEEPS);

    let late = began + Duration::from_secs(2) + PROGRESS;
    let mut failures: Vec<_> = (0..SWEEPS).flat_map(|_| senders.sweep(late)).collect();
    failures.sort_by_key(|failure| failure.claimant.handoff);
    assert!(failures.iter().map(|failure| failure.claimant.handoff).eq(0..u64::from(SENDERS)));
    assert!(failures.iter().all(|failure| failure.reason == Reason::NoProgress));
    assert_eq!((senders.len(), senders.busy(), senders.table().0.len()), (0, 0, 0));
}
