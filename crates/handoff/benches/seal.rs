//! CPU time of a sender for a payload on a TLS 1.3 connection: `cargo bench -p shunt-handoff --bench seal`.
//!
//! Prints the sending thread's nanoseconds for each KiB of a 1 MiB file, sent into a Unix socket that another thread
//! empties. For comparison, it prints the time of sendfile(2) without TLS, and of the sealing alone. Each figure is the
//! median of 9 rounds of 200 payloads.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use shunt_handoff::body::Body;
use shunt_handoff::flow_sender::{FlowSender, KernelSocket};
use shunt_handoff::payload::Payload;
use shunt_handoff::tls13::keys::{ContentType, Sealer};
use shunt_handoff::tls13::stream::Generation;
use shunt_handoff::tls13::workbench::Workbench;
use shunt_wire::local::Offer;
use shunt_wire::tls::Suite;
use zerocopy::FromZeros;

const PAYLOAD_BYTES: u64 = 1 << 20;
const ROUNDS: usize = 9;
const PAYLOADS: u32 = 200;

fn main() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; PAYLOAD_BYTES as usize]).unwrap();
    println!("{:30} {:>8}", "1 MiB", "ns/KiB");
    show("sendfile", || send(&file, None));
    for suite in Suite::ALL {
        show(&format!("{suite:?}: sent"), || send(&file, Some(suite)));
        show(&format!("{suite:?}: sealed only"), || seal(suite));
    }
}

fn show(name: &str, mut run: impl FnMut() -> Duration) {
    let mut each: Vec<Duration> = (0..ROUNDS).map(|_| run()).collect();
    each.sort();
    println!("{name:30} {:8.1}", each[ROUNDS / 2].as_nanos() as f64 / f64::from(PAYLOADS) / 1024.0);
}

/// Returns the CPU time that this thread has used.
fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn payload(file: &File) -> Payload {
    let meta = file.metadata().unwrap();
    let mut offer = Offer::new_zeroed();
    (offer.length, offer.size) = (PAYLOAD_BYTES, meta.len());
    offer.mtime_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
    Payload::new(file.try_clone().unwrap(), &offer)
}

fn send(file: &File, suite: Option<Suite>) -> Duration {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let reader = std::thread::spawn(move || while theirs.read(&mut [0; 1 << 17]).unwrap() > 0 {});
    ours.set_nonblocking(true).unwrap();
    let (mut workbench, mut spent) = (Workbench::default(), Duration::ZERO);
    let ours = KernelSocket::from(OwnedFd::from(ours));
    for _ in 0..PAYLOADS {
        let payload = payload(file);
        let begin = cpu();
        let mut body = match suite {
            None => Body::plain(payload),
            Some(suite) => {
                let key = vec![1; suite.key_bytes()];
                let generation =
                    Generation { suite, key: &key, iv: &[2; 12], first_record: 0, content_bytes: 1 << 14, skip: 0 };
                Body::sealed(payload, generation).unwrap()
            }
        };
        while !body.send_to(&ours, &mut workbench).unwrap() {
            poll(&mut [PollFd::from_borrowed_fd(ours.writable(), PollFlags::OUT)], None).unwrap();
        }
        spent += cpu() - begin;
    }
    drop(ours);
    reader.join().unwrap();
    spent
}

fn seal(suite: Suite) -> Duration {
    let key = vec![1; suite.key_bytes()];
    let mut record = vec![7; (1 << 14) + 22];
    let begin = cpu();
    for _ in 0..PAYLOADS {
        let mut sealer = Sealer::new(suite, &key, &[2; 12], 0, 64).unwrap();
        (0..64).for_each(|_| sealer.seal(&mut record, ContentType::ApplicationData));
    }
    cpu() - begin
}
