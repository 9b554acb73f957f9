//! Tests of what writers learn about simulated receivers. A payload is sent as *real* bytes, or by *reference*: then it
//! stays with its writer, and the receiver fetches what it reads. The real bytes before and after a reference are its
//! *head* and *tail*. A *probe* is a payload that is sent by reference only to see whether it is still read. Each
//! payload is sent as the plan says, and the receiver's reads come back as a report.

use std::collections::VecDeque;

use proptest::prelude::*;
use shunt_odb::learnt::{Learnt, Note, PROBE_EVERY, Plan, Report, Sent, TABLE_BYTES, Table};
use shunt_odb::touched::Touched;
use shunt_sys::shared::SharedMemory;
use zerocopy::{FromBytes, IntoBytes};

const LONG: usize = 64 << 10;

/// Parts of a payload that a receiver reads.
#[derive(Clone, Copy, Debug)]
enum Looks {
    Nowhere,
    Everywhere,
    /// This many bytes at the payload's beginning, and this many at its end.
    Ends(usize, usize),
}

/// Time of a fetch in quarters of a microsecond, as measured once: 15 us.
const FETCH: u32 = 60;

/// Report of a receiver that reads these parts of a payload of `bytes` bytes. The first `head` and the last `tail`
/// bytes of the payload are sent as real bytes.
fn touched(looks: Looks, bytes: usize, head: usize, tail: usize) -> Touched {
    let length = bytes - head - tail;
    let page = length.min(4096) as u32;
    let length = length as u32;
    match looks {
        Looks::Nowhere => Touched::default(),
        Looks::Everywhere => {
            Touched { first: 0, end: length, bytes: length, waited: FETCH * (1 + length / (32 << 10)) }
        }
        Looks::Ends(first, last) => {
            let none = Touched::default();
            let begin = Touched { first: 0, end: page, bytes: page, waited: FETCH };
            let end = Touched { first: length - page, end: length, bytes: page, waited: FETCH };
            let begin = if first > head { begin } else { none };
            begin.and(if last > tail { &end } else { &none })
        }
    }
}

/// Sends a payload as planned. If that is by reference, returns the reference's length, the head and tail, and the
/// bytes that are touched; else `None`.
fn send(learnt: &mut Learnt, looks: Looks, bytes: usize, random: u8) -> Option<(u32, Sent, Touched)> {
    match learnt.plan(bytes, random) {
        Plan::Real => None,
        Plan::Reference { head, tail, sent, .. } => {
            Some(((bytes - head - tail) as u32, sent, touched(looks, bytes, head, tail)))
        }
    }
}

/// Sends payloads, each reported at once. Returns how many were sent by reference, and how many of those were touched.
fn send_all(learnt: &mut Learnt, looks: Looks, bytes: usize, payloads: usize) -> (usize, usize) {
    let (mut references, mut faults) = (0, 0);
    for turn in 0..payloads {
        if let Some((length, sent, touched)) = send(learnt, looks, bytes, (turn * 37) as u8) {
            references += 1;
            faults += usize::from(!touched.is_nothing());
            learnt.learn(length, sent, &touched);
        }
    }
    (references, faults)
}

#[test]
fn bodies_that_nobody_reads_go_by_reference_from_the_first_on() {
    for bytes in [8 << 10, LONG, 1 << 20] {
        assert_eq!(send_all(&mut Learnt::new(false), Looks::Nowhere, bytes, 1000), (1000, 0));
    }
}

#[test]
fn bodies_that_are_read_go_as_bytes_after_the_first_except_probes() {
    for bytes in [8 << 10, LONG, 1 << 20] {
        let mut learnt = Learnt::new(false);
        assert_eq!(send_all(&mut learnt, Looks::Everywhere, bytes, 2), (1, 1));
        let (probes, _) = send_all(&mut learnt, Looks::Everywhere, bytes, 100 * usize::from(PROBE_EVERY));
        assert!((90..=110).contains(&probes), "{probes} probes of {bytes} bytes");
    }
}

#[test]
fn a_receiver_that_changes_is_followed() {
    for bytes in [8 << 10, LONG, 1 << 20] {
        let mut learnt = Learnt::new(false);
        for _ in 0..3 {
            send_all(&mut learnt, Looks::Nowhere, bytes, 500);
            let (references, _) = send_all(&mut learnt, Looks::Everywhere, bytes, 100);
            assert!(references <= 20, "{references} payloads of {bytes} bytes were fetched before it was known");
            send_all(&mut learnt, Looks::Everywhere, bytes, 500);
            // A probe has to come first, and then a few payloads directly after it.
            send_all(&mut learnt, Looks::Nowhere, bytes, 100);
            let (references, _) = send_all(&mut learnt, Looks::Nowhere, bytes, 100);
            assert_eq!(references, 100, "of {bytes} bytes");
        }
    }
}

#[test]
fn ends_that_are_read_go_as_bytes_and_the_rest_by_reference() {
    for (first, last) in [(8, 0), (300, 0), (3000, 0), (9000, 0), (0, 2), (10, 2), (4000, 100)] {
        let mut learnt = Learnt::new(false);
        let (references, faults) = send_all(&mut learnt, Looks::Ends(first, last), LONG, 60);
        assert_eq!(references, 60, "{first} and {last} bytes");
        assert!(faults <= 6, "{faults} faults for {first} and {last} bytes");
    }
}

#[test]
fn the_beginning_of_a_message_is_known_to_be_looked_at() {
    assert_eq!(send_all(&mut Learnt::new(true), Looks::Ends(200, 8), 12 << 10, 50), (50, 0));
    let Plan::Reference { head, tail, .. } = Learnt::new(true).plan(12 << 10, 0) else { panic!("by reference") };
    assert_eq!((head, tail), (512, 4096));
    // In a shorter payload, too little is left between head and tail: it is sent as real bytes without a probe.
    assert_eq!(send_all(&mut Learnt::new(true), Looks::Ends(200, 8), 8 << 10, 1000), (0, 0));
}

#[test]
fn ends_that_nobody_reads_any_more_go_by_reference_again() {
    let mut learnt = Learnt::new(false);
    send_all(&mut learnt, Looks::Ends(9000, 2), LONG, 60);
    send_all(&mut learnt, Looks::Nowhere, LONG, 500);
    let Plan::Reference { head, tail, .. } = learnt.plan(LONG, 0) else { panic!("by reference") };
    assert_eq!((head, tail), (0, 0));
}

/// Cost of sending a payload in microseconds, by measured costs of copies, fetches and faults.
fn cost(bytes: usize, report: Option<&Touched>) -> f64 {
    let pages = |bytes: usize| bytes as f64 / 4096.0;
    match report {
        None => 2.0 * pages(bytes),
        Some(touched) => f64::from(touched.waited) / 4.0 + 3.0 * pages(touched.bytes as usize),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Reports come some payloads late, and a part of the payloads is read. In the long run the plans cost little more
    /// than the better of two fixed methods: all payloads real, or all by reference.
    #[test]
    fn mixed_reading_settles_on_the_cheaper_way_of_sending(
        percent in 0u32..=100, bytes in 12usize..1000, late in 0usize..12, seed in any::<u64>(),
    ) {
        let bytes = bytes << 10;
        let mut learnt = Learnt::new(false);
        let mut random = seed;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as u32
        };
        let (mut ours, mut real, mut by_reference) = (0.0, 0.0, 0.0);
        let mut under_way = VecDeque::new();
        for payload in 0..6000 {
            let looks = if next() % 100 < percent { Looks::Everywhere } else { Looks::Nowhere };
            let sent = send(&mut learnt, looks, bytes, next() as u8);
            if payload >= 1000 {
                ours += cost(bytes, sent.as_ref().map(|(.., touched)| touched));
                real += cost(bytes, None);
                by_reference += cost(bytes, Some(&touched(looks, bytes, 0, 0)));
            }
            under_way.extend(sent);
            if under_way.len() > late {
                let (length, sent, touched) = under_way.pop_front().unwrap();
                learnt.learn(length, sent, &touched);
            }
        }
        let best = f64::min(real, by_reference);
        prop_assert!(ours <= 1.1 * best + 0.15 * real, "{ours} of {real} for real and {by_reference} by reference");
    }

    #[test]
    fn any_state_is_valid_and_any_report_changes_no_more_than_it(
        state in any::<[u8; 8]>(), reports in proptest::collection::vec((any::<u32>(), any::<[u64; 2]>()), 1..50),
        bytes in 8192usize..2_000_000,
    ) {
        let mut learnt = Learnt::read_from_bytes(&state).unwrap();
        for (length, said) in reports {
            let sent = match learnt.plan(bytes, said[0] as u8) {
                Plan::Real => Sent::default(),
                Plan::Reference { head, tail, sent, .. } => {
                    prop_assert!(head + tail < bytes);
                    sent
                }
            };
            learnt.learn(length, sent, &Touched::from_longs(said));
        }
        prop_assert_eq!(learnt.as_bytes().len(), 8);
        // Whatever the state was, and whatever was reported: in the end an honest receiver is believed.
        send_all(&mut learnt, Looks::Nowhere, LONG, 8000);
        prop_assert_eq!(send_all(&mut learnt, Looks::Nowhere, LONG, 100), (100, 0));
    }
}

fn table() -> Table {
    // The table lies behind other data, as in the memory that programs share.
    Table::new(SharedMemory::create("learnt", 4096 + TABLE_BYTES).unwrap()).unwrap()
}

/// Reports that payloads of a kind are read, until the plan is to send them as real bytes.
fn teach(table: &Table, kind: u64) {
    while let Plan::Reference { head, tail, sent, .. } = table.plan(kind, false, LONG, 0) {
        let bytes = (LONG - head - tail) as u32;
        table.learn(&Report {
            note: Note { kind, sent },
            bytes,
            touched: touched(Looks::Everywhere, LONG, head, tail),
        });
    }
}

#[test]
fn one_kind_is_learnt_without_another() {
    let table = table();
    teach(&table, 1);
    assert_eq!(table.plan(1, false, LONG, 0), Plan::Real);
    for other in [2, 1025, u64::MAX] {
        assert!(matches!(table.plan(other, false, LONG, 0), Plan::Reference { .. }), "{other}");
    }
}

#[test]
fn more_kinds_than_there_is_room_for_are_forgotten_and_no_more() {
    let table = table();
    for kind in 0..100_000u64 {
        teach(&table, kind.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    let report = Report { note: Note { kind: 77, sent: Sent::default() }, bytes: 1, touched: Touched::default() };
    table.learn(&report);
    assert!(matches!(table.plan(77, false, LONG, 0), Plan::Reference { .. }));
}
