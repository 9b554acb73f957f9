//! Tests of the checks with synthetic captures: each test writes a connection segment by segment, most with one fault.

use std::time::Duration;

use super::*;
use crate::pcap::{self, Packet};
use crate::segment::{Options, build};

const CLIENT: &str = "10.77.0.10:40000";
const SERVER: &str = "10.77.0.1:80";
/// Initial sequence numbers just below 2^32, so that sequence numbers wrap in the tests.
const CLIENT_ISS: u32 = u32::MAX - 50;
const SERVER_ISS: u32 = u32::MAX - 1500;

struct Script(Vec<Segment>);

impl Script {
    /// The handshake, a request of 100 bytes and its acknowledgment.
    fn open() -> Self {
        let mut script = Self(Vec::new());
        script.client(0, 0, 0).flags(flag::SYN).options.window_scale = Some(7);
        script.server(0, 0, 1).flags(flag::SYN | flag::ACK);
        script.client(1, 0, 1);
        script.client(1, 100, 1);
        script.server(1, 0, 101);
        script
    }

    /// Adds a segment of the client. `start` and `ack` count from the initial sequence numbers. The window is 512 << 7
    /// bytes.
    fn client(&mut self, start: u32, length: u32, ack: u32) -> &mut Segment {
        self.add(CLIENT, SERVER, CLIENT_ISS.wrapping_add(start), SERVER_ISS.wrapping_add(ack), length)
    }

    fn server(&mut self, start: u32, length: u32, ack: u32) -> &mut Segment {
        self.add(SERVER, CLIENT, SERVER_ISS.wrapping_add(start), CLIENT_ISS.wrapping_add(ack), length)
    }

    fn add(&mut self, source: &str, destination: &str, sequence: u32, acknowledgment: u32, bytes: u32) -> &mut Segment {
        let tick = u32::try_from(self.0.len()).unwrap();
        self.0.push(Segment {
            time: Duration::from_millis(u64::from(tick)),
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            sequence,
            acknowledgment,
            flags: flag::ACK,
            window: 512,
            payload_bytes: bytes,
            options: Options { timestamps: Some((1000 + tick, 0)), ..Options::default() },
        });
        self.0.last_mut().unwrap()
    }

    /// Writes the segments as a pcap file, and checks what is read from this file, as for a real capture.
    fn verdict(&self, expect: &Expect) -> Verdict {
        let packets = self.0.iter().map(|segment| {
            let (kept, original_bytes) = build::frame(segment);
            Packet { time: segment.time, kept, original_bytes }
        });
        let file = pcap::write(&packets.collect::<Vec<_>>());
        Capture::read_from(file.as_slice()).unwrap().check(expect)
    }

    fn judged(&self) -> Verdict {
        self.verdict(&Expect::of(std::net::Ipv4Addr::new(10, 77, 0, 10)).connections(1))
    }

    fn violations(&self) -> String {
        self.judged().violations.join("\n")
    }
}

impl Segment {
    fn flags(&mut self, flags: u8) -> &mut Self {
        self.flags = flags;
        self
    }
}

#[test]
fn a_whole_connection_has_no_violation() {
    let mut script = Script::open();
    script.server(1, 1448, 101);
    script.server(1449, 1448, 101);
    script.client(101, 0, 2897);
    script.server(2897, 0, 101).flags(flag::ACK | flag::FIN);
    script.client(101, 0, 2898).flags(flag::ACK | flag::FIN);
    script.server(2898, 0, 102);
    let verdict = script.judged();
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    let flow = &verdict.flows[0];
    assert_eq!((flow.server_bytes, flow.client_bytes), (2896, 100));
    assert_eq!((flow.server_segments, flow.client_segments), (6, 5));
    assert_eq!((flow.retransmissions, flow.out_of_order, flow.sacks), (0, 0, 0));
    assert_eq!(flow.longest_silence, Duration::from_millis(1));
}

#[test]
fn loss_and_retransmission_are_in_order() {
    let mut script = Script::open();
    script.server(1449, 1448, 101);
    script.client(101, 0, 1).options.sack = vec![(SERVER_ISS.wrapping_add(1449), SERVER_ISS.wrapping_add(2897))];
    script.server(1, 1448, 101);
    script.client(101, 0, 2897);
    script.server(1449, 1448, 101);
    script.client(101, 0, 2897).options.sack = vec![(SERVER_ISS.wrapping_add(1449), SERVER_ISS.wrapping_add(2897))];
    let verdict = script.judged();
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    let flow = &verdict.flows[0];
    assert_eq!((flow.out_of_order, flow.retransmissions), (1, 1));
    assert_eq!((flow.sacks, flow.duplicate_sacks), (2, 1));
    assert_eq!(flow.ignored.get(&Ignored::OldDuplicate), Some(&1));
    let strict = Expect::of(std::net::Ipv4Addr::new(10, 77, 0, 10)).duplicates(0);
    assert!(script.verdict(&strict).violations[0].contains("acknowledged before"));
}

#[test]
fn an_acknowledged_gap_is_told() {
    let mut script = Script::open();
    script.server(1, 1000, 101);
    script.server(2001, 1000, 101);
    script.client(101, 0, 3001);
    assert!(script.violations().contains("acknowledged bytes 1001 to 2001, which never came"));
}

#[test]
fn a_gap_that_stays_is_told() {
    let mut script = Script::open();
    script.server(1001, 1000, 101);
    assert!(script.violations().contains("bytes 1 to 1001 of the server's never came"));
}

#[test]
fn a_reset_is_told_unless_expected() {
    let mut script = Script::open();
    script.server(1, 0, 101).flags(flag::RST | flag::ACK);
    assert!(script.violations().contains("1 resets"));
    let expect = Expect::of(std::net::Ipv4Addr::new(10, 77, 0, 10)).resets();
    assert!(script.verdict(&expect).violations.is_empty());
}

#[test]
fn a_stale_sequence_number_is_told() {
    let mut script = Script::open();
    script.server(1, 1448, 101);
    script.client(101, 0, 1449);
    script.client(101, 50, 1449);
    script.server(1, 0, 151);
    let verdict = script.judged();
    assert_eq!(verdict.flows[0].ignored.get(&Ignored::StaleSequence), Some(&1));
    assert!(verdict.violations[0].contains("stale sequence number"), "{:?}", verdict.violations);
}

#[test]
fn a_probe_one_below_is_in_order() {
    let mut script = Script::open();
    script.server(1, 1448, 101);
    script.client(101, 0, 1449);
    script.server(1448, 0, 101);
    assert!(script.judged().violations.is_empty());
}

#[test]
fn data_beyond_the_window_is_told() {
    let mut script = Script::open();
    script.server(1, 60_000, 101);
    script.server(60_001, 6_000, 101);
    assert!(script.violations().contains("beyond the advertised window"));
}

#[test]
fn an_ack_of_unsent_data_is_told() {
    let mut script = Script::open();
    script.server(1, 10, 102);
    assert!(script.violations().contains("acknowledges data never sent"));
}

#[test]
fn a_timestamp_that_goes_back_is_told() {
    let mut script = Script::open();
    script.server(1, 10, 101);
    script.server(11, 10, 101).options.timestamps = Some((900, 0));
    let verdict = script.judged();
    assert!(verdict.violations.iter().any(|words| words.contains("TSval went back")), "{:?}", verdict.violations);
    assert_eq!(verdict.flows[0].ignored.get(&Ignored::OldTimestamp), Some(&1));
}

#[test]
fn missing_and_invented_timestamps_are_told() {
    let mut script = Script::open();
    script.server(1, 10, 101).options.timestamps = None;
    script.server(11, 10, 101).options.timestamps = Some((2000, 5000));
    let told = script.violations();
    assert!(told.contains("without the timestamps"), "{told}");
    assert!(told.contains("echoed TSval 5000"), "{told}");
}

#[test]
fn another_connection_is_counted() {
    let mut script = Script::open();
    let syn = script.client(0, 0, 0).flags(flag::SYN);
    syn.sequence = 77;
    assert!(script.violations().contains("2 connections instead of 1"));
}

#[test]
fn other_hosts_are_left_out() {
    let script = Script::open();
    let verdict = script.verdict(&Expect::of(std::net::Ipv4Addr::new(10, 77, 0, 11)));
    assert!(verdict.flows.is_empty() && verdict.violations.is_empty());
}

#[test]
fn a_capture_from_the_middle_is_followed() {
    let mut script = Script::open();
    script.server(1, 1448, 101);
    script.client(101, 0, 1449);
    script.0.drain(..4);
    assert!(script.judged().violations.is_empty(), "{}", script.violations());
}

#[test]
fn four_gigabytes_pass() {
    let mut script = Script::open();
    let mut at = 1_u32;
    for _ in 0..80_000 {
        script.server(at, 60_000, 101);
        at = at.wrapping_add(60_000);
        script.client(101, 0, at);
    }
    let verdict = script.judged();
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    assert_eq!(verdict.flows[0].server_bytes, 4_800_000_000);
}
