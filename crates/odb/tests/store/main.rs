//! The store as a process sees it, with real sockets and real shared memory. Every byte is compared. A *segment* is
//! memory of the store into which one program writes payloads. A *reader* is a process that fetches them ([`Holders`]).
//! The *holder* of a payload is its store. A reader gives its *share* of a payload back when it does not need the
//! payload any more.

mod bed;
mod entrance;
mod files;
mod silent;

use std::io::{IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use bed::{Bed, STRANGER};
use shunt_odb::fetch::{FetchError, Holders, Wanted};
use shunt_odb::hold::{Hold, Returns};
use shunt_odb::records::Sealing;
use shunt_odb::reference::{Holder, Reference, Weight};
use shunt_odb::segment::Writer;
use shunt_odb::store::Limits;
use shunt_odb::store::client::Connection;
use shunt_odb::store::usage::{self, Counted};
use shunt_testbed::{PATIENCE, assert_same_bytes, needs_root, wait_for};
use shunt_wire::tls::{Keys, Suite};
use zerocopy::FromZeros;

impl Bed {
    /// A reader of the same user, which may map this machine's segments.
    fn holders(&self) -> Holders {
        Holders::new(self.path(), |_| ())
    }

    /// A reader of another user, which only gets bytes.
    fn strange_holders(&self) -> Holders {
        *self.user.lock() = 1001;
        let holders = self.holders();
        let nothing = Reference { payload: self.nothing(), weight: Weight::WHOLE, offset: 0, length: 1 };
        assert!(matches!(fetch(&holders, &nothing), Err(FetchError::Gone(_))), "it is connected now");
        *self.user.lock() = 1000;
        holders
    }

    fn nothing(&self) -> shunt_odb::reference::PayloadId {
        let holder = self.program().holder();
        shunt_odb::reference::PayloadId { holder, segment: 0, slot: 0, secret: 0 }
    }

    fn fetched_bytes(&self) -> u64 {
        self.counters.fetched_bytes.load(std::sync::atomic::Ordering::Relaxed)
    }
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| ((seed + at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Keys for the reader's end and for the store's end of a connection, as two agents agree on them in a handshake.
fn sealings() -> [Sealing; 2] {
    let keys = |byte| Keys { iv: [byte; 12], key: [byte; 32] };
    [(1, 2), (2, 1)].map(|(send, receive)| Sealing {
        suite: (Suite::Aes256GcmSha384 as u16).into(),
        send: keys(send),
        receive: keys(receive),
        ..Sealing::new_zeroed()
    })
}

fn fetch(holders: &Holders, reference: &Reference) -> Result<Vec<u8>, FetchError> {
    let mut got = vec![0; reference.length as usize];
    holders.fetch(reference, &mut got).map(|()| got)
}

/// Checks that a fetch gets these bytes.
#[track_caller]
fn assert_fetched(holders: &Holders, reference: &Reference, expected: &[u8], what: impl std::fmt::Display) {
    assert_same_bytes(&fetch(holders, reference).unwrap(), expected, what);
}

fn whole_and_in_parts(writer: &mut Writer, holders: &Holders) {
    for (seed, length) in [(1, 1), (2, 4095), (3, 4096), (4, 4097), (5, 65_536), (6, 3_000_001)] {
        let body = bytes(seed, length);
        let reference = writer.put(&[IoSlice::new(&body[..length / 3]), IoSlice::new(&body[length / 3..])]).unwrap();
        assert_fetched(holders, &reference, &body, format_args!("{length} bytes"));
        let part = Reference { offset: (length / 2) as u64, length: (length - length / 2) as u64, ..reference };
        assert_fetched(holders, &part, &body[length / 2..], format_args!("half of {length} bytes"));
    }
}

#[test]
fn programs_of_one_user_map_each_others_payloads() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    whole_and_in_parts(&mut program.lease().unwrap().unwrap(), &bed.holders());
    assert_eq!(bed.fetched_bytes(), 0, "nothing went through the store");
}

/// A program of user 1000 that has written a payload.
fn with_secret(bed: &Bed) -> (Connection, Writer, Reference) {
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let reference = writer.put(&[IoSlice::new(b"a secret of user 1000")]).unwrap();
    (program, writer, reference)
}

#[test]
fn another_users_program_gets_the_bytes_of_its_references_and_no_segment() {
    let bed = Bed::new(Limits::default());
    let (_program, mut writer, reference) = with_secret(&bed);
    *bed.user.lock() = 1001;
    assert!(bed.program().map(reference.payload.segment).unwrap().is_none());
    *bed.user.lock() = 0;
    assert!(bed.program().map(reference.payload.segment).unwrap().is_some(), "root could have it anyway");
    *bed.user.lock() = 1000;
    assert!(bed.program().map(reference.payload.segment).unwrap().is_some());
    assert!(bed.program().map(reference.payload.segment.wrapping_add(1)).unwrap().is_none(), "no such segment");
    whole_and_in_parts(&mut writer, &bed.strange_holders());
    assert!(bed.fetched_bytes() > 3_000_000, "through the store");
}

/// A program that has become another user keeps its connection, and the store still answers on it. But the store lets
/// the program map no segment any more.
#[test]
fn a_program_that_has_become_another_user_maps_nothing() {
    needs_root();
    let bed = Bed::new(Limits::default());
    let (_program, _writer, reference) = with_secret(&bed);
    let asks = format!(
        "
import os, socket, struct
HELLO, MAP = 1, 3
store = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
store.connect({:?})
def asks(kind):
    store.send(struct.pack('<II', kind, {}).ljust(32, bytes(1)))
    message, ancillary, _, _ = store.recvmsg(1000, 1000)
    return len(message) > 0, len(ancillary) > 0
print(asks(MAP))
os.setuid(5)
print(asks(MAP), asks(HELLO))
",
        bed.path(),
        reference.payload.segment,
    );
    let output = std::process::Command::new("python3").args(["-B", "-c", &asks]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "(True, True)\n(True, False) (True, False)\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// The descriptor of a mapped segment cannot be written to.
#[test]
fn a_mapped_segment_is_only_to_be_read() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let reference = writer.put(&[IoSlice::new(&bytes(1, 5000))]).unwrap();
    let mapped = program.map(reference.payload.segment).unwrap().unwrap();
    assert!(mapped.as_fd().try_clone_to_owned().map(std::fs::File::from).unwrap().write_all(b"x").is_err());
    let mut got = vec![0; 5000];
    assert!(mapped.copy(&reference, &mut got));
    assert_same_bytes(&got, &bytes(1, 5000), "the payload");
}

#[test]
fn a_stranger_is_told_nothing() {
    let bed = Bed::new(Limits::default());
    *bed.user.lock() = STRANGER;
    assert!(Connection::open(&bed.path()).is_err());
    let refused = || bed.counters.refused.load(std::sync::atomic::Ordering::Relaxed);
    wait_for("it is counted", || refused() == 1).unwrap();
}

/// Two machines, `m0` and `m1`. [`connect`] stands for their agents: it connects a program of one to the other's store.
fn two_machines() -> (Bed, Bed) {
    (Bed::named("m0", Limits::default()), Bed::named("m1", Limits::default()))
}

/// Answers the next wish of a program of `here` (its request for a connection to another store) with a connection to
/// `there`.
fn connect(here: &Bed, there: &Bed) {
    let (program, holder) = here.wishes.recv_timeout(PATIENCE).unwrap();
    assert_eq!(holder, there.program().holder());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [reader, store] = sealings();
    there.orders.serve(theirs.into(), store, there.orders.places().take(1).unwrap());
    here.orders.reached(program, holder, Some((ours.into(), reader)));
}

#[test]
fn another_machines_payloads_come_over_a_connection_that_the_agents_made() {
    let (here, there) = two_machines();
    let program = there.program();
    let mut writer = program.lease().unwrap().unwrap();
    let holders = here.holders();
    std::thread::scope(|scope| {
        scope.spawn(|| whole_and_in_parts(&mut writer, &holders));
        connect(&here, &there);
    });
    assert!(there.fetched_bytes() > 3_000_000);
}

#[test]
fn many_payloads_come_together() {
    let (here, there) = two_machines();
    let program = there.program();
    let mut writer = program.lease().unwrap().unwrap();
    let bodies: Vec<Vec<u8>> = (0..100).map(|seed| bytes(seed, 1 + 777 * seed as usize)).collect();
    let references: Vec<Reference> = bodies.iter().map(|body| writer.put(&[IoSlice::new(body)]).unwrap()).collect();
    let holders = here.holders();
    let mut places: Vec<Vec<u8>> = bodies.iter().map(|body| vec![0; body.len()]).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let wanted = references.iter().zip(&mut places);
            let mut wanted: Vec<Wanted<'_>> =
                wanted.map(|(reference, into)| Wanted { reference: *reference, into }).collect();
            holders.fetch_all(&mut wanted, &|| ()).unwrap();
        });
        connect(&here, &there);
    });
    for (number, (got, body)) in places.iter().zip(&bodies).enumerate() {
        assert_same_bytes(got, body, format_args!("payload {number}"));
    }
}

/// Fetches the bytes that [`kept`] has put into a store, over a connection that is made for this fetch.
fn fetch_anew(here: &Bed, there: &Bed, holders: &Holders, reference: &Reference) {
    std::thread::scope(|scope| {
        scope.spawn(|| assert_fetched(holders, reference, &bytes(3, 50_000), "the payload"));
        connect(here, there);
    });
}

/// Leaves 50,000 bytes in a store.
fn kept(program: &Connection) -> Reference {
    program.lease().unwrap().unwrap().put(&[IoSlice::new(&bytes(3, 50_000))]).unwrap()
}

/// An agent ends its connections, as after reading its certificates again: they are made again, and fetches succeed.
#[test]
fn connections_that_an_agent_ends_are_made_again() {
    let (here, there) = two_machines();
    let program = there.program();
    let reference = kept(&program);
    let holders = here.holders();
    for ended in [&here, &there, &here] {
        fetch_anew(&here, &there, &holders, &reference);
        ended.orders.end_connections();
        // Connects a program to the store. The store first ends the connections and then admits the program. So the
        // next fetch needs a new connection.
        drop(ended.program());
    }
}

/// A program lets memory stand for bytes of a holder that it has reached. So a holder whose connection has ended since
/// must not count as reached.
#[test]
fn a_store_that_was_reached_once_is_checked_again() {
    let (here, there) = two_machines();
    let program = there.program();
    let reference = kept(&program);
    let holders = here.holders();
    fetch_anew(&here, &there, &holders, &reference);
    holders.reach(&reference).unwrap();
    there.orders.end_connections();
    drop(there.program());
    std::thread::scope(|scope| {
        let reached = scope.spawn(|| holders.reach(&reference));
        let (program, holder) = here.wishes.recv_timeout(PATIENCE).expect("another try");
        here.orders.reached(program, holder, None);
        assert!(matches!(reached.join().unwrap(), Err(FetchError::Holder(..))));
    });
}

/// An agent reads its certificates again and again. Each time all connections end, but the same fetch succeeds in the
/// end.
#[test]
fn a_fetch_outlives_many_connections() {
    let (here, there) = two_machines();
    let program = there.program();
    let reference = kept(&program);
    let holders = here.holders();
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch(&holders, &reference));
        for _ in 0..15 {
            let (program, holder) = here.wishes.recv_timeout(PATIENCE).expect("another try");
            let (ours, ended) = UnixStream::pair().unwrap();
            drop(ended);
            here.orders.reached(program, holder, Some((ours.into(), sealings()[0])));
        }
        connect(&here, &there);
        assert_same_bytes(&fetched.join().unwrap().unwrap(), &bytes(3, 50_000), "the payload");
    });
}

#[test]
fn a_holder_that_cannot_be_reached_is_an_error_at_once() {
    let (here, there) = two_machines();
    let reference = there.program().lease().unwrap().unwrap().put(&[IoSlice::new(b"x")]).unwrap();
    let holders = here.holders();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                assert!(matches!(fetch(&holders, &reference), Err(FetchError::Holder(..))));
            }
        });
        let (program, holder) = here.wishes.recv_timeout(PATIENCE).unwrap();
        here.orders.reached(program, holder, None);
    });
    assert!(here.wishes.try_recv().is_err(), "the agent is not asked a hundred times");
}

#[test]
fn a_processs_counters_count_once_and_stay_after_its_end() {
    let bed = Bed::new(Limits::default());
    let told = |bed: &Bed| {
        let all = bed.usage.lock().by_name();
        all.get("nginx").map(|nginx| (nginx.processes, nginx.counts[Counted::PassedOn as usize]))
    };
    let count = |program: &Connection, value| {
        let page = program.counts().unwrap().unwrap();
        usage::write_name(&page, "nginx");
        usage::write_count(&page, Counted::PassedOn, value);
        page
    };
    let (first, second) = (bed.program(), bed.program());
    count(&first, 10);
    let page = count(&second, 12);
    wait_for("they are one process", || told(&bed) == Some((1, 12))).unwrap();
    usage::write_count(&page, Counted::PassedOn, 20);
    drop(second);
    wait_for("the last word counts", || told(&bed) == Some((1, 20))).unwrap();
    drop(first);
    wait_for("it has ended", || told(&bed) == Some((0, 20))).unwrap();
    let another = bed.program();
    count(&another, 3);
    wait_for("another one begins", || told(&bed) == Some((1, 23))).unwrap();
    assert!(another.counts().is_err(), "a second time makes no sense");
}

#[test]
fn a_program_whose_store_has_ended_puts_nothing_there_any_more() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    assert!(writer.is_served() && writer.put(&[IoSlice::new(b"x")]).is_some());
    bed.orders.stop();
    wait_for("it has ended", || !writer.is_served()).unwrap();
}

#[test]
fn a_files_bytes_are_those_of_when_it_was_put() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let body = bytes(7, 200_000);
    file.write_all(&body).unwrap();
    let reference = writer.put_file(file.as_fd(), 1000, 150_000).unwrap();
    file.set_len(0).unwrap();
    assert_fetched(&bed.holders(), &reference, &body[1000..151_000], "the payload");
    assert!(writer.put_file(file.as_fd(), 0, 10).is_none(), "nothing is there any more");
}

#[test]
fn payloads_outlive_their_program_and_go_with_the_last_share() {
    let limits = Limits { bytes: 9 << 20, segment_bytes: 8 << 20, ..Limits::default() };
    let bed = Bed::new(limits);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    assert!(bed.program().lease().unwrap().is_none(), "there is room for one segment only");
    let body = bytes(8, 100_000);
    let reference = writer.put(&[IoSlice::new(&body)]).unwrap();
    drop((writer, program));
    let holders = bed.holders();
    assert_fetched(&holders, &reference, &body, "the payload");
    let other = bed.program();
    assert!(other.lease().unwrap().is_none(), "somebody may still ask for it");

    let returns = Arc::new(Returns::default());
    let hold = Hold::new(reference.payload, reference.weight, reference.length, &returns);
    let forwarded = hold.refer(10, 20).unwrap();
    drop(hold);
    holders.send_returns(&returns);
    assert_fetched(&holders, &forwarded, &body[10..30], "half of the share is still out");
    drop(Hold::new(forwarded.payload, forwarded.weight, forwarded.length, &returns));
    wait_for("the segment is free", || !holders.send_returns(&returns) && other.lease().unwrap().is_some()).unwrap();
    assert!(matches!(fetch(&holders, &forwarded), Err(FetchError::Gone(_))));
}

#[test]
fn pages_are_used_again_when_the_shares_are_back_and_never_before() {
    let limits = Limits { segment_bytes: 1 << 20, ..Limits::default() };
    let bed = Bed::new(limits);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    // A reader that gives back shares and fetches over one connection, so that the store sees a returned share before
    // the next fetch.
    let holders = bed.strange_holders();
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
        assert_fetched(&holders, &reference, &body, format_args!("round {round}"));
        returns.give(reference.payload, reference.weight);
        holders.send_returns(&returns);
        let gone = |reference: &Reference| matches!(fetch(&holders, reference), Err(FetchError::Gone(_)));
        assert!(gone(&reference), "its last share is back");
    }
    assert!(full > 100, "the segment was full {full} times only");
    for (reference, body) in &out {
        assert_fetched(&holders, reference, body, "the payload");
    }
}

#[test]
fn nobody_gets_a_byte_without_the_secret_or_beyond_the_end() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let reference = writer.put(&[IoSlice::new(&bytes(9, 5000))]).unwrap();
    for holders in [bed.holders(), bed.strange_holders()] {
        guess(&reference, &holders);
    }
}

fn guess(reference: &Reference, holders: &Holders) {
    let reference = *reference;
    let mut wrong = vec![reference; 6];
    wrong[0].payload.secret ^= 1;
    wrong[1].payload.slot += 1;
    wrong[2].payload.slot = u32::MAX;
    wrong[3].payload.segment ^= 77;
    wrong[4].offset = 1;
    wrong[5].offset = 5000;
    for wrong in &wrong {
        assert!(matches!(fetch(holders, wrong), Err(FetchError::Gone(_))), "{wrong:?}");
    }
    let returns = Returns::default();
    returns.give(wrong[0].payload, Weight::WHOLE);
    holders.send_returns(&returns);
    assert_fetched(holders, &reference, &bytes(9, 5000), "only who has the secret gives shares back");
}

#[test]
fn a_lease_ends_and_then_a_fetch_says_so() {
    let bed = Bed::new(Limits { lease_ms: 200, ..Limits::default() });
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let reference = writer.put(&[IoSlice::new(&bytes(10, 5000))]).unwrap();
    let holders = bed.holders();
    wait_for("the lease has ended", || matches!(fetch(&holders, &reference), Err(FetchError::Gone(_)))).unwrap();
    assert_eq!(writer.payloads(), 0);
}

#[test]
fn a_store_that_takes_nothing_more_gives_what_it_has() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let body = bytes(12, 5000);
    let reference = writer.put(&[IoSlice::new(&body)]).unwrap();
    let counters = Arc::clone(&bed.counters);
    let payloads = || counters.payloads.load(Ordering::Relaxed);
    wait_for("it is counted", || payloads() == 1).unwrap();
    bed.orders.close();
    wait_for("its program knows", || !writer.is_served()).unwrap();
    assert!(bed.program().lease().unwrap().is_none(), "no other is let begin");
    let holders = bed.strange_holders();
    assert_fetched(&holders, &reference, &body, "the payload");
    let returns = Returns::default();
    returns.give(reference.payload, reference.weight);
    wait_for("nothing is left", || !holders.send_returns(&returns) && payloads() == 0).unwrap();
}

#[test]
fn a_reader_that_reads_nothing_or_talks_nonsense_stops_nobody_else() {
    let bed = Bed::new(Limits::default());
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let body = bytes(11, 4 << 20);
    let reference = writer.put(&[IoSlice::new(&body)]).unwrap();
    let (mut idle, theirs) = UnixStream::pair().unwrap();
    bed.orders.serve(theirs.into(), Sealing::new_zeroed(), bed.orders.places().take(1).unwrap());
    let request = [&[1, 0, 0, 0, 0, 0, 0, 0][..], &reference.emit(), &[0; 16]].concat();
    for _ in 0..100 {
        idle.write_all(&request).unwrap();
    }
    for sealing in [Sealing::new_zeroed(), sealings()[0]] {
        let (mut nonsense, theirs) = UnixStream::pair().unwrap();
        bed.orders.serve(theirs.into(), sealing, bed.orders.places().take(1).unwrap());
        let _ = nonsense.write_all(&[0xff; 640]);
        let mut end = Vec::new();
        let _ = nonsense.read_to_end(&mut end);
        assert!(end.is_empty(), "no answer to nonsense");
    }
    assert_fetched(&bed.strange_holders(), &reference, &body, "the payload");
    // The idle reader gets each of the hundred answers as a whole.
    let mut answer = vec![0; 16 + body.len()];
    for turn in 0..100 {
        idle.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], [1, 0, 0, 0]);
        assert_same_bytes(&answer[16..], &body, format_args!("turn {turn}"));
    }
}
