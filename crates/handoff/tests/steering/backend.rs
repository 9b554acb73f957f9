//! Tests of be_out and be_in, the backend's programs on egress and on ingress. A *sender* is a backend's socket for a
//! client. be_out gives the sender's segments the frontend's address. be_in gives the sender *copies* of its client's
//! ACKs. fe_in, at the frontend, makes these copies. Each copy has half of the connection's *token*, a random number.

use super::programs::*;
use super::segment::*;
use shunt_handoff::bpf::*;
use shunt_wire::Endpoint;
use std::net::SocketAddr;

const SEQ_DELTA: u32 = 0x9000_0000;
const TS_DELTA: u32 = 1_000;
const START: u32 = 0x1000u32.wrapping_add(SEQ_DELTA);
const RCV_NXT: u32 = 400;
const INDEX: u32 = 12;

fn us() -> SocketAddr {
    "10.1.0.1:7001".parse().unwrap()
}

fn slot(server: SocketAddr) -> SenderSlot {
    let server = Endpoint::from(server);
    SenderSlot {
        server_address: server.address.0,
        server_port: u16::from_ne_bytes(server.port_be),
        live: 1,
        start: START,
        seq_delta: SEQ_DELTA,
        ts_delta: TS_DELTA,
        rcv_nxt: RCV_NXT,
        ack: 90_000,
        ts_recent: 55,
        acked: 0x1000,
        sent: 0x1000 + 8000,
        edge: 0x1000 + 8000,
        ..Default::default()
    }
}

/// Loads the backend's programs, with one sender.
fn with_sender() -> Backend {
    let backend = Backend::new();
    backend.set_sender(client(), 7001, INDEX, &slot(server()));
    backend
}

fn data(seq: u32) -> Segment {
    Segment::ack(us(), client(), seq, RCV_NXT).payload(b"payload").timestamps(50, 60)
}

/// A copy as fe_in makes it: with half of the token in the urgent pointer. The socket's rcv_nxt is the token.
fn arriving(seq: u32, ack: u32) -> Segment {
    Segment { urgent: RCV_NXT as u16, ..Segment::ack(client(), us(), seq, ack) }
}

/// The packet that the socket gets. CWR keeps the kernel's header prediction from matching it.
fn steered(seq: u32, ack: u32) -> Segment {
    Segment::ack(client(), us(), seq, ack).flags(ACK | CWR)
}

#[test]
fn a_senders_data_goes_out_as_the_frontends() {
    let mut be = with_sender();
    let out = be.be_out(&data(0x1000));
    assert_eq!(out.verdict, PASS);
    let sent = Segment { from: server(), ack: 90_000, seq: START, options: Vec::new(), ..data(0) };
    assert_eq!(out.segment(), sent.timestamps(50 + TS_DELTA, 60));
    assert_eq!(be.counted(), once(&["be_out_sent"]));
}

#[test]
fn the_clients_newest_timestamp_is_echoed_from_the_first_segment_on() {
    let be = with_sender();
    for (tsecr, sent) in [(0, 55), (54, 55), (55, 55), (56, 56)] {
        let segment = Segment { options: Vec::new(), ..data(0x1000) }.timestamps(50, tsecr);
        assert_eq!(be.be_out(&segment).segment().timestamp_values(), Some((50 + TS_DELTA, sent)));
    }
}

#[test]
fn a_senders_fin_reset_or_syn_never_leaves() {
    let mut be = with_sender();
    for flags in [ACK | FIN, RST, RST | ACK, SYN] {
        assert_eq!(be.be_out(&data(0x1001).flags(flags).payload(b"")).verdict, SHOT);
        assert_eq!(be.counted(), once(&["be_drop_fin"]));
    }
    for flags in [RST | ACK, SYN] {
        assert_eq!(be.be_out(&data(0x1000).flags(flags)).verdict, SHOT);
        assert_eq!(be.counted(), once(&["be_drop_fin"]));
    }
}

#[test]
fn the_bytes_that_a_fin_comes_with_leave_without_it() {
    let mut be = with_sender();
    let out = be.be_out(&data(0x1000).flags(ACK | PSH | FIN));
    assert_eq!(out.verdict, PASS);
    assert_eq!(out.segment(), be.be_out(&data(0x1000).flags(ACK | PSH)).segment());
    assert_eq!(be.counted(), [("be_out_sent", 2)].into());
}

#[test]
fn a_reserved_port_without_live_sender_is_silent_both_ways() {
    let mut be = with_sender();
    let mut stray = data(0x1000);
    stray.from.set_port(7002);
    assert_eq!(be.be_out(&stray.payload(b"")).verdict, SHOT);
    let mut stray = steered(1, 2);
    stray.to.set_port(7009);
    assert_eq!(be.be_in(&stray).verdict, SHOT);
    assert_eq!(be.counted(), once(&["be_drop_stray_out", "be_drop_stray_in"]));

    be.set_sender(client(), 7001, INDEX, &SenderSlot { live: 0, ..slot(server()) });
    assert_eq!(be.be_out(&data(0x1000).payload(b"")).verdict, SHOT);
    assert_eq!(be.be_in(&arriving(1, 2)).verdict, SHOT);
    assert_eq!(be.be_in(&arriving(1, 2).flags(SYN)).verdict, SHOT);
    assert_eq!(be.counted(), [("be_drop_stray_out", 1), ("be_drop_stray_in", 2)].into());
}

/// The reset that the socket gets in answer to its own segment.
fn reset(seq: u32) -> Segment {
    Segment::ack(client(), us(), RCV_NXT, seq).flags(RST | ACK).timestamps(50, 60)
}

#[test]
fn a_fin_after_the_last_acknowledgement_comes_back_as_a_reset() {
    let mut be = with_sender();
    let fin = data(0x1007).flags(ACK | FIN).payload(b"");
    assert_eq!(be.be_out(&fin).verdict, SHOT, "the payload is on its way");
    be.be_in(&arriving(90_000, START + 7));
    assert_eq!(be.slot(INDEX).acked, 0x1007);
    be.counted();
    let out = be.be_out(&fin);
    assert_eq!((out.verdict, out.segment()), (REDIRECT, reset(0x1007)));
    assert_eq!(be.counted(), once(&["be_drop_fin", "be_orphan_reset"]));
}

#[test]
fn segments_of_an_ended_agents_socket_come_back_as_resets() {
    let mut be = with_sender();
    be.set_sender(client(), 7001, INDEX, &SenderSlot { live: 0, ..slot(server()) });
    for segment in [data(0x1000), data(0x1000).flags(ACK | FIN), data(0x1000).flags(ACK | FIN).payload(b"")] {
        let out = be.be_out(&segment);
        assert_eq!((out.verdict, out.segment()), (REDIRECT, Segment { payload: segment.payload, ..reset(0x1000) }));
        assert_eq!(be.counted(), once(&["be_drop_stray_out", "be_orphan_reset"]));
    }
}

#[test]
fn other_ports_are_not_ours() {
    let mut be = with_sender();
    for port in [6999, 7010] {
        let mut out = data(0x1000);
        out.from.set_port(port);
        assert_eq!((be.be_out(&out).verdict, be.be_out(&out).segment()), (PASS, out));
        let mut arriving = steered(1, 2);
        arriving.to.set_port(port);
        assert_eq!((be.be_in(&arriving).verdict, be.be_in(&arriving).segment()), (PASS, arriving));
    }
    assert!(be.counted().is_empty());
}

#[test]
fn a_steered_ack_comes_in_as_the_clients() {
    let mut be = with_sender();
    let sack = [(START + 5000, START + 6000)];
    let steered_ack = arriving(90_500, START + 1460).timestamps(7, 60 + TS_DELTA).sack(&sack);
    let out = be.be_in(&steered_ack);
    assert_eq!(out.verdict, PASS);
    assert_eq!(
        out.segment(),
        steered(RCV_NXT, 0x1000 + 1460).timestamps(7, 60).sack(&[(0x1000 + 5000, 0x1000 + 6000)])
    );
    assert_eq!(be.slot(INDEX).ack, 90_500, "what our segments acknowledge from here on");
    assert_eq!(be.slot(INDEX).window, steered_ack.window, "what the socket takes for the client's window");
    assert_eq!(be.counted(), once(&["be_in_steered"]));
    be.be_in(&arriving(90_400, START));
    assert_eq!(be.slot(INDEX).ack, 90_400, "the newest counts");
    assert_eq!(be.be_out(&data(0x1000)).segment().ack, 90_400);
}

#[test]
fn a_late_ack_of_an_older_payload_is_one_of_the_start() {
    let be = with_sender();
    assert_eq!(be.be_in(&arriving(90_000, START - 400)).segment().ack, 0x1000);
}

#[test]
fn an_ack_of_what_another_sender_has_sent_is_one_of_all_that_this_one_has() {
    let mut be = with_sender();
    let slot = SenderSlot { sent: 0x1000, edge: 0x1000 + 5000, ..slot(server()) };
    be.set_sender(client(), 7001, INDEX, &slot);
    assert_eq!(be.be_in(&arriving(90_000, START + 5000)).segment().ack, 0x1000, "nothing has been sent");
    be.be_out(&data(0x1000));
    be.be_out(&data(0x1000).payload(b"pay"));
    assert_eq!(be.slot(INDEX).sent, 0x1007, "a segment that is sent again takes nothing back");
    assert_eq!(be.be_in(&arriving(90_000, START + 5000)).segment().ack, 0x1007);
    assert_eq!(be.be_in(&arriving(90_000, START + 6)).segment().ack, 0x1006);
    assert_eq!(be.counted(), [("be_in_ahead", 2), ("be_in_steered", 3), ("be_out_sent", 2)].into());

    be.be_in(&arriving(90_000, START + 5000));
    let before = be.slot(INDEX);
    assert_eq!(be.be_in(&arriving(90_001, START + 5001)).verdict, SHOT, "nor can that one have sent more");
    assert_eq!((be.slot(INDEX).ack, be.slot(INDEX).acked), (before.ack, before.acked));
    be.be_out(&data(0x1000 + 5000).payload(b"pay"));
    assert_eq!((be.slot(INDEX).sent, be.slot(INDEX).edge), (0x1000 + 5003, 0x1000 + 5003));
}

#[test]
fn an_ack_of_what_has_not_been_sent_is_dropped() {
    let mut be = with_sender();
    let nothing_sent = SenderSlot { sent: 0x1000, edge: 0x1000, ..slot(server()) };
    be.set_sender(client(), 7001, INDEX, &nothing_sent);
    for ahead in [1, 7, 1 << 20, 1 << 30] {
        assert_eq!(be.be_in(&arriving(90_000, START.wrapping_add(ahead))).verdict, SHOT, "{ahead} bytes ahead");
        assert_eq!(be.counted(), once(&["be_drop_unsent"]));
        let slot = be.slot(INDEX);
        assert_eq!((slot.acked, slot.window, slot.ack), (0x1000, nothing_sent.window, nothing_sent.ack));
    }
    be.be_out(&data(0x1000));
    assert_eq!(be.be_in(&arriving(90_000, START + 8)).verdict, SHOT);
    assert_eq!(be.be_in(&arriving(90_000, START + 7)).segment().ack, 0x1007);
    assert_eq!(be.counted(), once(&["be_drop_unsent", "be_in_steered", "be_out_sent"]));
    let reset = be.be_in(&arriving(90_000, START + 9000).flags(RST | ACK));
    assert_eq!((reset.verdict, reset.segment().ack), (PASS, 0x1007), "a reset is one, whatever it acknowledges");
}

#[test]
fn the_ack_of_an_awaited_end_is_reported() {
    let mut be = with_sender();
    let end = 0x1000 + 5000;
    let awaited = SenderSlot { live: (SENDER_LIVE | SENDER_WORD) as u16, end, ..slot(server()) };
    be.set_sender(client(), 7001, INDEX, &awaited);
    be.be_in(&arriving(90_000, START + 4999));
    be.be_in(&arriving(90_000, START + 8001));
    be.be_in(&arriving(90_000u32.wrapping_add(1 << 25), START + 5000));
    assert!(be.reports().is_empty(), "not all of it, of what has not been sent, and by a stranger");
    be.counted();
    be.be_in(&arriving(90_000, START + 5000));
    assert_eq!(be.counted(), once(&["be_in_steered", "be_delivered"]));
    let report = be.reports()[0];
    let client = Endpoint::from(client());
    assert_eq!((report.client_address, report.client_port.to_ne_bytes()), (client.address.0, client.port_be));
    assert_eq!(u16::from_be(report.port), 7001);
    be.set_sender(super::programs::client(), 7001, INDEX, &slot(server()));
    be.be_in(&arriving(90_000, START + 5000));
    assert!(be.reports().is_empty(), "nobody waits for it");
}

/// The test also covers payloads longer than half of the sequence space. In such a payload, an ACK number compares as
/// later than the payload's start at first, and then as earlier.
#[test]
fn acks_are_judged_over_the_whole_sequence_space() {
    let be = with_sender();
    let (first, step) = (0x1000u32, 1u32 << 29);
    be.set_sender(client(), 7001, INDEX, &SenderSlot { sent: first, edge: first, ..slot(server()) });
    for sent in (1..30).map(|n| first.wrapping_add(step.wrapping_mul(n))) {
        be.be_out(&data(sent.wrapping_sub(7)));
        let ack = |own: u32| be.be_in(&arriving(90_000, own.wrapping_add(SEQ_DELTA)));
        assert_eq!(ack(sent.wrapping_add(1)).verdict, SHOT, "of one byte too many at {sent:#x}");
        let good = ack(sent);
        assert_eq!((good.verdict, good.segment().ack), (PASS, sent));
        assert_eq!(
            ack(sent.wrapping_sub(1000)).segment().ack,
            sent.wrapping_sub(1000),
            "an older one is none of the start"
        );
    }
}

#[test]
fn a_reset_is_acceptable_to_the_socket() {
    let be = with_sender();
    assert_eq!(
        be.be_in(&arriving(90_000, START).flags(RST | ACK)).segment(),
        steered(RCV_NXT, 0x1000).flags(RST | ACK | CWR)
    );
}

#[test]
fn a_packet_with_a_guessed_sequence_number_is_dropped() {
    let mut be = with_sender();
    let (near, far) = (90_000u32 + (1 << 20), 90_000u32 + (1 << 25));
    assert_eq!(be.be_in(&arriving(near, START)).verdict, PASS);
    for strange in [far, far.wrapping_add(1 << 31), 90_000u32.wrapping_sub(1 << 25)] {
        assert_eq!(be.be_in(&arriving(strange, START + 1)).verdict, SHOT, "{strange}");
        assert_eq!(be.be_in(&arriving(strange, START).flags(RST | ACK)).verdict, SHOT, "{strange}");
    }
    assert_eq!(be.be_in(&arriving(near - 1, START).flags(RST | ACK)).verdict, SHOT, "a reset before the last");
    assert_eq!(be.slot(INDEX).ack, near, "what our segments acknowledge");
    assert_eq!(be.counted(), [("be_in_steered", 1), ("be_drop_strange", 7)].into());
}

/// A stranger may know all addresses, ports and sequence numbers of a connection. Without the token, this is of no use.
#[test]
fn a_packet_without_the_token_is_dropped() {
    let mut be = with_sender();
    for flags in [ACK, RST | ACK] {
        for urgent in [0, RCV_NXT as u16 + 1, !(RCV_NXT as u16)] {
            let made_up = Segment { urgent, ..arriving(90_000, START).flags(flags) };
            assert_eq!(be.be_in(&made_up).verdict, SHOT, "{urgent:#x}");
        }
    }
    assert_eq!(be.counted(), [("be_drop_strange", 6)].into());
}

/// A sequence number that a stranger has made up counts only until the next packet comes. Otherwise all later segments
/// of the socket would acknowledge bytes that the client has not sent, and the client would drop them for ever.
#[test]
fn a_made_up_number_is_gone_with_the_next_packet() {
    let be = with_sender();
    assert_eq!(be.be_in(&arriving(90_000 + (1 << 23), START)).verdict, PASS);
    assert_eq!(be.be_in(&arriving(90_010, START)).verdict, PASS);
    assert_eq!(be.slot(INDEX).ack, 90_010, "what our segments acknowledge");
}

#[test]
fn an_ack_of_long_ago_is_dropped() {
    let mut be = with_sender();
    for back in [1 << 25, 1 << 30, 0x7fff_ffff - 0x1000] {
        assert_eq!(be.be_in(&arriving(90_000, START.wrapping_sub(back))).verdict, SHOT, "{back:#x}");
    }
    assert_eq!(be.be_in(&arriving(90_000, START.wrapping_sub(1 << 23))).segment().ack, 0x1000);
    assert_eq!(be.counted(), [("be_drop_unsent", 3), ("be_in_steered", 1)].into());
}

#[test]
fn data_and_fin_are_kept_from_the_socket() {
    let mut be = with_sender();
    let arriving = arriving(90_000, START).flags(ACK | FIN | PSH).payload(b"where from?");
    assert_eq!(be.be_in(&arriving).segment(), steered(RCV_NXT, 0x1000));
    assert_eq!(be.counted(), once(&["be_in_steered", "be_stripped"]));
}

#[test]
fn timestamps_at_an_odd_offset_keep_the_checksum_good() {
    let be = with_sender();
    let odd = [1, 8, 10, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 60, 0];
    let out = be.be_out(&Segment { options: Vec::new(), ..data(0x1000) }.options(&odd)).segment();
    assert_eq!(out.timestamp_values(), Some((TS_DELTA - 1, 60)));
    let out = be.be_in(&arriving(90_000, START).options(&odd)).segment();
    assert_eq!(out.timestamp_values(), Some((u32::MAX, 60u32.wrapping_sub(TS_DELTA))));
}

#[test]
fn ipv6_goes_out_and_comes_in_alike() {
    let be = with_sender();
    let (client, server, us): (SocketAddr, SocketAddr, SocketAddr) =
        ("[fd00::2]:4000".parse().unwrap(), "[fd00::1]:80".parse().unwrap(), "[fd01::1]:7001".parse().unwrap());
    be.set_sender(client, 7001, INDEX, &slot(server));
    let sent = be.be_out(&Segment::ack(us, client, 0x1000, RCV_NXT).payload(b"six")).segment();
    assert_eq!(sent, Segment::ack(server, client, START, 90_000).payload(b"six"));
    let arriving = Segment { urgent: RCV_NXT as u16, ..Segment::ack(client, us, 90_001, START + 3) };
    let got = be.be_in(&arriving).segment();
    assert_eq!(got, Segment::ack(client, us, RCV_NXT, 0x1003).flags(ACK | CWR));
}
