//! Which claims of a client's packet are believed (bpf/claims.h).

use super::programs::*;
use super::segment::*;
use shunt_handoff::bpf::*;

const START: u32 = 5_000;
const LENGTH: u32 = 10_000_000;
const RCV_NXT: u32 = 77_000;
/// The frontend's kernel has room for so much.
const SERVER_WINDOW: u32 = 200_000;
/// What the client has acknowledged, and has offered to take since.
const ACKED: u32 = 50_000;
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

/// What a packet may change.
fn noted(flow: &Flow) -> (u64, u32, u16, u32, u32, u32) {
    (flow.spaces.acked, flow.client_ack, flow.client_window, flow.edge, flow.client_tsval, flow.client_tsecr)
}

#[test]
fn an_ack_past_what_the_client_had_room_for_is_dropped() {
    let mut fe = frontend!(under_way());
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
    let fe = frontend!(under_way());
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
    let fe = frontend!(under_way());
    let shrunk = Segment { window: 0, ..from_client(START + ACKED) };
    assert_eq!(fe.fe_in(&shrunk).verdict, REDIRECT);
    assert_eq!((fe.flow().edge, fe.flow().client_window), (EDGE, 0));
    assert_eq!(fe.fe_in(&from_client(EDGE)).verdict, REDIRECT, "what was sent before it did");
}

#[test]
fn a_packet_with_a_block_past_that_is_dropped() {
    let mut fe = frontend!(under_way());
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
fn a_connection_without_a_region_is_its_kernels() {
    let mut flow = under_way();
    complete(&mut flow);
    let mut fe = frontend!(flow);
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
    let mut fe = frontend!(under_way());
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
    // A client that uploads may be told of two windows.
    fe.set_flow(&Flow { rcv_nxt: RCV_NXT - 1000, ..under_way() });
    assert!(!strange(&mut fe, RCV_NXT - 1001, b"") && strange(&mut fe, RCV_NXT - 1002, b""));
    fe.set_flow(&Flow { rcv_nxt: RCV_NXT.wrapping_sub(1 << 30), ..under_way() });
    let least = RCV_NXT.wrapping_sub(SERVER_WINDOW + 1);
    assert!(!strange(&mut fe, least, b"") && strange(&mut fe, least.wrapping_sub(1), b""));
    // What backends' segments offer counts, too.
    fe.set_flow(&Flow { server_edge: RCV_NXT, ..under_way() });
    assert!(!strange(&mut fe, RCV_NXT + 65_535, b"") && strange(&mut fe, RCV_NXT + 65_536, b""));
    // And what the frontend's kernel says from now on.
    let says = Segment { window: 50_000, ..Segment::ack(server(), client(), START, RCV_NXT + 40_000) };
    fe.fe_out(&says);
    assert_eq!(fe.flow().server_edge, RCV_NXT + 90_000);
    fe.fe_out(&Segment { window: 0, ..says });
    assert_eq!(fe.flow().server_edge, RCV_NXT + 90_000, "never back");
}

#[test]
fn the_newest_ack_counts_and_not_the_highest() {
    let fe = frontend!(under_way());
    for at in [EDGE, START + ACKED, START + ACKED + 10, START + ACKED - 10, START] {
        fe.fe_in(&from_client(at));
        assert_eq!((fe.flow().client_ack, fe.flow().spaces.acked), (at, (at - START).into()));
    }
}

#[test]
fn an_ack_that_is_older_than_a_window_is_not_noted() {
    let fe = frontend!(under_way());
    let before = noted(&fe.flow());
    for back in [ROOM + 1, 1 << 20, 1 << 30] {
        fe.fe_in(&from_client((START + ACKED).wrapping_sub(back)).timestamps(5000, 5000));
        assert_eq!(noted(&fe.flow()), before, "{back} bytes back");
    }
    fe.fe_in(&from_client((START + ACKED).wrapping_sub(ROOM)).timestamps(5000, 5000));
    assert_eq!((fe.flow().client_tsval, fe.flow().client_tsecr), (5000, 5000));
}
