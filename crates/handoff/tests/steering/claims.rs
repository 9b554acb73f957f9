//! Tests of how far fe_in, the frontend's program on ingress, believes a client's *claims* (bpf/decisions/claims.h). By
//! the ACK number and the SACK blocks of its packets, a client claims that it has received bytes. A *flow* is the
//! record of a client connection. A *region* is a range of the connection's sequence numbers that a backend sends: one
//! payload. The backend's *word* confirms that its socket has got the ACK of the payload's end.

use super::programs::*;
use super::segment::*;
use shunt_handoff::bpf::*;

const START: u32 = 5_000;
const LENGTH: u32 = 10_000_000;
const RCV_NXT: u32 = 77_000;
/// Window that the frontend's kernel has offered to the client, in bytes.
const SERVER_WINDOW: u32 = 200_000;
/// Number of payload bytes that the client has acknowledged.
const ACKED: u32 = 50_000;
/// Number of bytes that the client has room for beyond those that it has acknowledged.
const ROOM: u32 = 64_000;
const EDGE: u32 = START + ACKED + ROOM;

fn under_way() -> Flow {
    let mut flow = Flow { server_ack: RCV_NXT, ..Default::default() };
    begin(&mut flow, START, START, LENGTH.into(), PEER);
    flow.server_edge = RCV_NXT + SERVER_WINDOW;
    flow.spaces.acked = ACKED.into();
    (flow.client_ack, flow.client_window, flow.edge) = (START + ACKED, ROOM as u16, EDGE);
    (flow.client_tsval, flow.client_tsecr) = (1000, 1000);
    flow.flags |= (FLOW_START_ACKED | FLOW_TIMESTAMPS) as u8;
    flow
}

fn from_client(ack: u32) -> Segment {
    Segment { window: ROOM as u16, ..Segment::ack(client(), server(), RCV_NXT, ack) }
}

/// Returns the fields of a flow that a client's packet may change.
fn noted(flow: &Flow) -> (u64, u32, u16, u32, u32, u32) {
    (flow.spaces.acked, flow.client_ack, flow.client_window, flow.edge, flow.client_tsval, flow.client_tsecr)
}

#[test]
fn an_ack_past_what_the_client_had_room_for_is_dropped() {
    let mut fe = Frontend::with_flow(&under_way());
    let before = noted(&fe.flow());
    for ahead in [1, 7, ROOM, 1 << 20, LENGTH - ACKED - ROOM] {
        for packet in [from_client(EDGE + ahead), from_client(EDGE + ahead).payload(b"GET")] {
            assert_eq!(fe.fe_in(&packet.timestamps(2000, 2000)).verdict, SHOT, "{ahead} bytes ahead");
            assert_eq!(fe.counted(), once(&["fe_drop_bad_ack"]));
            assert_eq!(noted(&fe.flow()), before);
        }
    }
    assert!(fe.copies(0).is_empty() && fe.events().is_empty());
}

#[test]
fn one_packet_moves_a_region_on_by_no_more_than_a_window() {
    let fe = Frontend::with_flow(&under_way());
    let mut edge = EDGE;
    for _ in 0..100 {
        assert_eq!(fe.fe_in(&from_client(edge + 1)).verdict, SHOT);
        assert_eq!(fe.fe_in(&from_client(edge)).verdict, REDIRECT, "which the backend judges");
        assert_eq!(fe.flow().edge, edge + ROOM);
        edge += ROOM;
    }
}

#[test]
fn a_client_may_take_room_back() {
    let fe = Frontend::with_flow(&under_way());
    let shrunk = Segment { window: 0, ..from_client(START + ACKED) };
    assert_eq!(fe.fe_in(&shrunk).verdict, REDIRECT);
    assert_eq!((fe.flow().edge, fe.flow().client_window), (EDGE, 0));
    assert_eq!(fe.fe_in(&from_client(EDGE)).verdict, REDIRECT, "what was sent before it did");
}

#[test]
fn a_packet_with_a_block_past_that_is_dropped() {
    let mut fe = Frontend::with_flow(&under_way());
    let good = (START + ACKED + 1000, EDGE);
    assert_eq!(fe.fe_in(&from_client(START + ACKED).sack(&[good])).verdict, REDIRECT);
    fe.counted();
    let before = noted(&fe.flow());
    for blocks in
        [vec![(EDGE - 1000, EDGE + 1)], vec![good, (EDGE + 1, EDGE + 2)], vec![good, good, good, (1, EDGE + 9)]]
    {
        assert_eq!(fe.fe_in(&from_client(START + ACKED).sack(&blocks)).verdict, SHOT, "{blocks:?}");
        assert_eq!(fe.counted(), once(&["fe_drop_bad_ack"]));
        assert_eq!(noted(&fe.flow()), before);
    }
}

#[test]
fn a_connection_without_a_region_is_left_to_its_kernel() {
    let mut flow = under_way();
    complete(&mut flow);
    let mut fe = Frontend::with_flow(&flow);
    let before = noted(&fe.flow());
    for packet in [from_client(START + LENGTH + 1), from_client(EDGE).sack(&[(EDGE, START + LENGTH + 1)])] {
        assert_eq!(fe.fe_in(&packet.timestamps(2000, 2000)).verdict, PASS);
        let counted = fe.counted();
        assert_eq!((counted["fe_in_server"], counted["fe_in_strange"]), (1, 1));
        assert_eq!(noted(&fe.flow()), before, "nothing of it is noted");
    }
}

#[test]
fn sequence_numbers_are_the_windows_as_the_kernel_has_it() {
    let mut fe = Frontend::with_flow(&under_way());
    let strange = |fe: &mut Frontend, seq: u32, payload: &[u8]| {
        let packet = Segment { seq, ..from_client(START + ACKED) };
        fe.fe_in(&if payload.is_empty() { packet } else { packet.payload(payload) });
        fe.counted().contains_key("fe_in_strange")
    };
    for (seq, payload, expected) in [
        (RCV_NXT, &b""[..], false),
        (RCV_NXT - 2, b"", true),
        (RCV_NXT - 100, &[0; 99], false),
        (RCV_NXT - 100, &[0; 98], true),
        (RCV_NXT + SERVER_WINDOW, b"", false),
        (RCV_NXT + SERVER_WINDOW + 1, b"", true),
        (RCV_NXT.wrapping_add(1 << 31), b"", true),
    ] {
        assert_eq!(
            strange(&mut fe, seq, payload),
            expected,
            "{} with {} bytes",
            seq.wrapping_sub(RCV_NXT) as i32,
            payload.len()
        );
    }
    // During an upload, a client may use numbers from before the frontend's ACK number, because the backend's segments
    // offer a smaller window.
    fe.set_flow(&Flow { rcv_nxt: RCV_NXT - 1000, ..under_way() });
    assert!(!strange(&mut fe, RCV_NXT - 1001, b"") && strange(&mut fe, RCV_NXT - 1002, b""));
    fe.set_flow(&Flow { rcv_nxt: RCV_NXT.wrapping_sub(1 << 30), ..under_way() });
    let least = RCV_NXT.wrapping_sub(SERVER_WINDOW + 1);
    assert!(!strange(&mut fe, least, b"") && strange(&mut fe, least.wrapping_sub(1), b""));
    // The window that a backend's segments offer counts, too.
    fe.set_flow(&Flow { server_edge: RCV_NXT, ..under_way() });
    assert!(!strange(&mut fe, RCV_NXT + 65_535, b"") && strange(&mut fe, RCV_NXT + 65_536, b""));
    // Each new window that the frontend's kernel offers counts, too.
    let says = Segment { window: 50_000, ..Segment::ack(server(), client(), START, RCV_NXT + 40_000) };
    fe.fe_out(&says);
    assert_eq!(fe.flow().server_edge, RCV_NXT + 90_000);
    fe.fe_out(&Segment { window: 0, ..says });
    assert_eq!(fe.flow().server_edge, RCV_NXT + 90_000, "never back");
}

/// Two sequence numbers can be compared only if they are less than 2^31 apart. Here the client sends more than that
/// many bytes after the last region began.
#[test]
fn packets_are_noted_however_much_the_client_uploads_behind_a_payload() {
    let mut flow = under_way();
    complete(&mut flow);
    (flow.client_ack, flow.edge) = (START + LENGTH, START + LENGTH + ROOM);
    let mut fe = Frontend::with_flow(&flow);
    let mut seq = RCV_NXT;
    for upload in 1..=12 {
        seq = seq.wrapping_add(1 << 29);
        fe.fe_out(&Segment::ack(server(), client(), START, seq));
        fe.fe_in(&Segment { seq, window: upload, ..from_client(START + LENGTH) });
        assert!(!fe.counted().contains_key("fe_in_strange"), "{upload} times 512 MiB");
        assert_eq!(fe.flow().client_window, upload);
    }
}

#[test]
fn the_newest_ack_counts_and_not_the_highest() {
    let fe = Frontend::with_flow(&under_way());
    for at in [EDGE, START + ACKED, START + ACKED + 10, START + ACKED - 10, START] {
        fe.fe_in(&from_client(at));
        assert_eq!((fe.flow().client_ack, fe.flow().spaces.acked), (at, (at - START).into()));
    }
}

#[test]
fn an_ack_that_is_older_than_a_window_is_not_noted() {
    let fe = Frontend::with_flow(&under_way());
    let before = noted(&fe.flow());
    for back in [ROOM + 1, 1 << 20, 1 << 30] {
        fe.fe_in(&from_client((START + ACKED).wrapping_sub(back)).timestamps(5000, 5000));
        assert_eq!(noted(&fe.flow()), before, "{back} bytes back");
    }
    fe.fe_in(&from_client((START + ACKED).wrapping_sub(ROOM)).timestamps(5000, 5000));
    assert_eq!((fe.flow().client_tsval, fe.flow().client_tsecr), (5000, 5000));
}

/// A flow whose payload is complete only with the backend's word, like a payload that is longer than the client's
/// window.
fn needs_a_word() -> Flow {
    let mut flow = under_way();
    flow.spaces.breaks[0].end = END_WORD;
    flow
}

/// Acknowledges all of the payload in the client's name, a window at a time, as a forger would.
fn walk(fe: &Frontend) -> Outcome {
    let end = START + LENGTH;
    while fe.flow().edge < end {
        assert_eq!(fe.fe_in(&from_client(fe.flow().edge)).verdict, REDIRECT);
    }
    fe.fe_in(&from_client(end))
}

fn completion() -> Vec<(u64, u64, u32)> {
    vec![(needs_a_word().handoff, LENGTH.into(), 1)]
}

#[test]
fn a_client_that_walks_its_claims_completes_nothing() {
    let mut fe = Frontend::with_flow(&needs_a_word());
    let out = walk(&fe);
    assert_eq!((out.verdict, out.segment().ack), (PASS, START), "the frontend's kernel hears of its own bytes");
    assert_eq!(fe.copies(1)[0].ack, START + LENGTH, "and the backend judges");
    let counted = fe.counted();
    assert_eq!((counted["fe_in_clamped"], counted.contains_key("fe_completed")), (1, false));
    for _ in 0..3 {
        fe.fe_in(&from_client(START + LENGTH));
    }
    let flow = fe.flow();
    assert_eq!((flow.spaces.status, flow.spaces.acked), (ACTIVE, LENGTH.into()));
    assert!(fe.events().is_empty());
    // The ACKs of what the client really has complete nothing either.
    fe.fe_in(&from_client(START + LENGTH - 10));
    assert_eq!((fe.flow().spaces.status, fe.flow().spaces.acked), (ACTIVE, u64::from(LENGTH) - 10));
    assert!(fe.events().is_empty());
}

#[test]
fn a_claim_and_the_word_of_its_backend_complete_a_payload() {
    let mut fe = Frontend::with_flow(&needs_a_word());
    walk(&fe);
    assert!(fe.events().is_empty());
    fe.counted();
    assert_eq!(fe.deliver(client(), PEER, needs_a_word().handoff), PASS);
    assert_eq!(fe.counted(), once(&["fe_delivered", "fe_completed"]));
    assert_eq!((fe.events(), fe.flow().spaces.status), (completion(), COMPLETE));
    assert_eq!(fe.deliver(client(), PEER, needs_a_word().handoff), SHOT, "it is over");
    assert!(fe.events().is_empty());
    // The client's next packet is for the frontend.
    let request = fe.fe_in(&from_client(START + LENGTH).payload(b"GET"));
    assert_eq!((request.verdict, request.segment().ack), (PASS, START));
}

#[test]
fn a_word_before_the_claim_completes_nothing_by_itself() {
    let fe = Frontend::with_flow(&needs_a_word());
    assert_eq!(fe.deliver(client(), PEER, needs_a_word().handoff), PASS);
    assert_eq!((fe.events(), fe.flow().spaces.status), (vec![], ACTIVE));
    assert_eq!(walk(&fe).verdict, PASS);
    assert_eq!((fe.events(), fe.flow().spaces.status), (completion(), COMPLETE));
}

#[test]
fn only_a_payloads_backend_can_give_its_word() {
    let fe = Frontend::with_flow(&needs_a_word());
    walk(&fe);
    let mut other = client();
    other.set_port(1);
    let handoff = needs_a_word().handoff;
    for (client, peer, handoff) in
        [(client(), OTHER_PEER, handoff), (client(), PEER, handoff + 1), (other, PEER, handoff)]
    {
        assert_eq!(fe.deliver(client, peer, handoff), SHOT);
    }
    assert_eq!((fe.events(), fe.flow().spaces.breaks[0].end), (vec![], END_WORD | END_CLAIMED));
}

#[test]
fn an_older_ack_that_comes_late_takes_no_claim_back() {
    let fe = Frontend::with_flow(&needs_a_word());
    walk(&fe);
    fe.fe_in(&from_client(START + LENGTH - 5000));
    assert_eq!(fe.deliver(client(), PEER, needs_a_word().handoff), PASS);
    assert_eq!((fe.events(), fe.flow().spaces.acked), (completion(), LENGTH.into()));
}

#[test]
fn room_that_an_old_ack_offers_is_nobodys() {
    let fe = Frontend::with_flow(&Flow { snd_wscale: 14, edge: START + ACKED + (1 << 20), ..under_way() });
    let before = noted(&fe.flow());
    fe.fe_in(&Segment { window: u16::MAX, ..from_client((START + ACKED).wrapping_sub(100 << 20)) });
    assert_eq!(noted(&fe.flow()), before);
}

#[test]
fn a_clients_answer_counts_however_far_ahead_a_strangers_claim_was() {
    let fe = Frontend::with_flow(&under_way());
    let honest = from_client(START + ACKED);
    for _ in 0..10 {
        fe.fe_in(&from_client(fe.flow().edge));
    }
    let walked = fe.flow().spaces.acked;
    fe.fe_in(&honest);
    assert_eq!(fe.flow().spaces.acked, walked, "older than a window");
    let probe = Segment::ack(server(), client(), START - 1, RCV_NXT);
    assert_eq!(fe.fe_out(&probe).segment().seq, START - 1, "a number that the client has acknowledged long ago");
    assert_eq!((fe.flow().asked, fe.flow().answered), (1, 0));
    fe.fe_in(&honest);
    assert_eq!((fe.flow().spaces.acked, fe.flow().client_ack), (ACKED.into(), START + ACKED));
    assert_eq!((fe.flow().asked, fe.flow().answered), (1, 1));
}

/// Number of consecutive values around `good` that `takes` accepts.
fn width(good: u32, takes: impl Fn(u32) -> bool) -> u64 {
    assert!(takes(good));
    // Distance of the last accepted value in one direction, by bisection: fewer than half of all numbers are accepted.
    let reach = |way: fn(u32, u32) -> u32| {
        let (mut taken, mut refused) = (0, 1 << 31);
        while refused - taken > 1 {
            let middle = taken + (refused - taken) / 2;
            if takes(way(good, middle)) { taken = middle } else { refused = middle }
        }
        u64::from(taken)
    };
    reach(u32::wrapping_add) + 1 + reach(u32::wrapping_sub)
}

/// Plain Linux accepts a sequence number in the window that it has offered, or one before it (tcp_sequence). It accepts
/// an ACK number from a window before the client's last one up to the end of what has been sent (tcp_ack). That end is
/// at most a window ahead of the client's last ACK number.
#[test]
fn a_stranger_has_to_guess_as_many_numbers_as_with_plain_linux() {
    let fe = Frontend::with_flow(&under_way());
    let moves = |seq: u32, ack: u32| {
        fe.set_flow(&under_way());
        fe.fe_in(&Segment { seq, window: 77, ..from_client(ack) });
        fe.flow().client_window == 77
    };
    let ack = START + ACKED + 1;
    let seqs = width(RCV_NXT, |seq| moves(seq, ack));
    let acks = width(ack, |ack| moves(RCV_NXT, ack));
    let all = 1u64 << 32;
    println!("{seqs} sequence numbers, {acks} ACK numbers: one packet in {} is taken", (all / seqs) * (all / acks));
    assert!(seqs <= u64::from(SERVER_WINDOW) + 2, "{seqs} sequence numbers");
    assert!(acks <= 2 * u64::from(ROOM) + 1, "{acks} ACK numbers");
}

/// The server has ended its region early (SHUNT_TAKE), and sends the rest of the payload itself.
#[test]
fn an_ack_of_what_a_server_has_not_sent_again_is_one_of_all_that_it_has() {
    let mut flow = under_way();
    flow.spaces.status = COMPLETE;
    flow.spaces.breaks[0].length = ACKED.into();
    (flow.start, flow.ahead) = (START + ACKED, ROOM);
    flow.server_end = START + 1000;
    let ack = |flow: &Flow, ack: u32| {
        let fe = Frontend::new();
        fe.set_flow(flow);
        fe.fe_in(&from_client(ack)).segment().ack
    };
    assert_eq!(ack(&flow, START + ACKED + 999), START + 999);
    assert_eq!(ack(&flow, START + ACKED + 1001), START + 1000, "it has that from the sender before");
    assert_eq!(ack(&flow, EDGE), START + 1000);
    assert_eq!(ack(&flow, EDGE + 1), START + ROOM + 1, "nobody has sent that: its kernel drops it");
    flow.flags |= FLOW_SERVER_FIN as u8;
    assert_eq!(ack(&flow, START + ACKED + 1001), START + 1001, "the server's FIN has a number, too");
}
