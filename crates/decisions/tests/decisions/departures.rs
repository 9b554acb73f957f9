//! Tests of what becomes of segments from a frontend's kernel, before, in and behind a region. A *region* is a range of
//! the client's sequence numbers that a backend sends: one payload.

use shunt_decisions::*;

use super::connection::*;

const START: u32 = 1000;
const ROOM: u32 = 1 << 20;

fn active() -> Server {
    Server::with_region(START - 100, ROOM, 5000)
}

fn repeated(server: &Server, seq: u32, bytes: u32) -> Packet {
    Packet { seq, payload_bytes: bytes, ..server.segment(0) }
}

#[test]
fn behind_a_payload_segments_move_by_its_length() {
    let mut server = active();
    assert_eq!(server.route(&server.ack(START + 5000)).event.kind, SHUNT_EVENT_COMPLETE);
    let departure = server.send(300);
    assert_eq!((departure.fate, departure.seq), (Fate::TRANSLATED, START + 5000));
}

#[test]
fn a_header_again_goes_where_it_was() {
    let mut server = active();
    let again = repeated(&server, START - 100, 100);
    let departure = server.depart(&again);
    assert_eq!((departure.fate, departure.seq), (Fate::TRANSLATED, START - 100));
}

#[test]
fn a_segment_on_both_sides_of_a_payload_has_no_place() {
    let mut server = active();
    server.route(&server.ack(START + 5000));
    server.send(300);
    let both = repeated(&server, START - 50, 100);
    assert_eq!(server.depart(&both).fate, Fate::DROPPED);
}

#[test]
fn bytes_that_a_server_writes_into_a_region_are_dropped() {
    assert_eq!(active().send(10).fate, Fate::DROPPED);
}

#[test]
fn an_ack_goes_to_the_edge_of_the_clients_window() {
    let mut server = active();
    server.route(&server.ack(START + 1000));
    let departure = server.depart(&server.segment(0));
    assert_eq!((departure.fate, departure.seq), (Fate::ACK_MOVED, START + 1000 + ROOM));
}

#[test]
fn an_ack_of_much_waits_until_the_client_has_some_of_the_payload() {
    let mut server = active();
    let much = Packet { ack: RCV_NXT.wrapping_add(16385), ..server.segment(0) };
    assert_eq!(server.depart(&much).fate, Fate::ACK_HELD);
    server.socket.rcv_nxt = much.ack;
    server.route(&server.ack(START + 1));
    assert_eq!(server.depart(&much).fate, Fate::ACK_MOVED);
}

#[test]
fn a_server_that_ends_in_a_region_resets_its_client() {
    for flags in [TH_FIN | TH_ACK, TH_RST] {
        let mut server = active();
        server.route(&server.ack(START + 1000));
        let end = Packet { flags: flags as u8, ..server.segment(0) };
        let departure = server.depart(&end);
        let expected = if flags & TH_RST != 0 { Fate::RST_MOVED } else { Fate::FIN_TO_RST };
        assert_eq!((departure.fate, departure.seq), (expected, START + 1000));
        assert!(departure.cancelled);
        assert_eq!(server.flow.spaces.status, SHUNT_REGION_CANCELLED);
    }
}

#[test]
fn timestamps_do_not_go_back_behind_what_the_client_has_echoed() {
    let mut server = active();
    let echoed = Packet { timestamps: 24, tsval: 9, tsecr: 5_000, ..server.ack(START + 1000) };
    server.route(&echoed);
    let old = Packet { timestamps: 24, tsval: 4_990, ..server.segment(0) };
    assert_eq!(server.depart(&old).tsval, 5_000);
    let very_old = Packet { tsval: 5_000u32.wrapping_sub(8192), ..old };
    assert_eq!(server.depart(&very_old).tsval, very_old.tsval, "made up: none is raised far");
}

/// If a server may write behind a payload (SHUNT_APPEND), its kernel keeps these bytes back.
#[test]
fn bytes_written_behind_a_growing_payload_wait() {
    let mut server = Server::new(START - 100, ROOM);
    server.send(100);
    let wanted = Begin { peer: PEER, ring: 0, length: 5000, handoff: HANDOFF };
    let mut flow = server.flow;
    assert_eq!(append(&mut flow, &wanted, &server.asked()), Counter::FE_BEGUN);
    server.flow = flow;

    assert_eq!(server.send(10).fate, Fate::WAITS);
    let route = server.route(&server.ack(START));
    assert_eq!(route.window, 0, "its kernel hears of no room behind the region");
    let fin_on_header = Packet { flags: (TH_ACK | TH_FIN) as u8, ..repeated(&server, START - 100, 100) };
    let departure = server.depart(&fin_on_header);
    assert!(departure.fate == Fate::TRANSLATED && departure.cut_fin, "a FIN lies behind, too: {departure:?}");

    server.route(&server.ack(START + 5000));
    let again = repeated(&server, START, 10);
    let departure = server.depart(&again);
    assert_eq!((departure.fate, departure.seq), (Fate::TRANSLATED, START + 5000));
}

/// A client is sent a probe only if nothing has come from it for a while. SHUNT_APPEND notes by an exact clock when the
/// client was last heard. fe_out reads a coarse clock, for which this time may lie in the future. That is no silence.
#[test]
fn what_is_written_right_after_a_region_began_asks_the_client_nothing() {
    let mut server = Server::new(START - 100, ROOM);
    server.send(100);
    let wanted = Begin { peer: PEER, ring: 0, length: 5000, handoff: HANDOFF };
    let mut flow = server.flow;
    append(&mut flow, &wanted, &server.asked());
    server.flow = Flow { last_seen_ns: server.now + 3_000_000, ..flow };
    let departure = server.send(10);
    assert!(departure.fate == Fate::WAITS && !departure.asks, "{departure:?}");
    server.now += u64::from(UNHEARD_NS) + 1;
    let departure = server.depart(&repeated(&server, START, 10));
    assert!(departure.fate == Fate::WAITS && departure.asks, "{departure:?}");
}

#[test]
fn a_client_that_has_room_and_gets_nothing_for_a_minute_is_reset() {
    let mut server = Server::new(START - 100, ROOM);
    server.send(100);
    let wanted = Begin { peer: PEER, ring: 0, length: 5000, handoff: HANDOFF };
    let mut flow = server.flow;
    append(&mut flow, &wanted, &server.asked());
    server.flow = flow;
    server.send(10);
    let again = repeated(&server, START, 10);
    server.now += IDLE_NS;
    let departure = server.depart(&again);
    assert!(departure.fate == Fate::WAITS && departure.asks, "{departure:?}");
    server.now += 1;
    assert_eq!(server.depart(&again).fate, Fate::FIN_TO_RST);
}
