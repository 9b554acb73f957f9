//! Tests of who gets which client packet, as the table of crates/handoff/bpf/decisions/arrivals.h says. A *region* is a
//! range of the client's sequence numbers that a backend sends: one payload. A *copy* is a client's packet, rewritten
//! for the backend.

use shunt_decisions::*;

use super::connection::*;

const START: u32 = 0xffff_ff00;
const ROOM: u32 = 1 << 20;
/// Length of a short payload, which is complete by the client's ACK alone.
const LENGTH: u64 = 100_000;

/// Makes a server with an active region. The client has the header, and the server's kernel knows that.
fn active(length: u64) -> Server {
    let mut server = Server::with_region(START.wrapping_sub(100), ROOM, length);
    let header_acked = server.ack(server.start());
    let route = server.route(&header_acked);
    assert!(route.server && route.copy == NO_BREAK && route.ack == START);
    server
}

/// Makes a server with an active region, after the client's first ACK inside it.
fn under_way(length: u64) -> Server {
    let mut server = active(length);
    let first = server.ack(START.wrapping_add(1000));
    assert!(server.route(&first).clamped);
    server
}

#[test]
fn an_ack_before_the_region_is_the_servers() {
    let mut server = Server::with_region(START.wrapping_sub(100), ROOM, LENGTH);
    let route = server.route(&server.ack(START.wrapping_sub(50)));
    assert!(route.server && !route.clamped && route.copy == NO_BREAK);
    assert_eq!(route.ack, START.wrapping_sub(50));
}

#[test]
fn blocks_in_the_region_are_for_its_backend_though_the_ack_is_not() {
    let mut server = active(LENGTH);
    let route = server.route_with(&server.ack(START), &[(START.wrapping_add(500), START.wrapping_add(900))]);
    assert!(route.server && route.copy != NO_BREAK);
}

#[test]
fn the_first_ack_inside_is_for_both_and_tells_the_server_of_its_header() {
    let mut server = active(LENGTH);
    let route = server.route(&server.ack(START.wrapping_add(1)));
    assert!(route.server && route.clamped && route.copy != NO_BREAK);
    assert_eq!(route.ack, START);
}

#[test]
fn later_acks_inside_are_for_the_backend_alone() {
    let mut server = under_way(LENGTH);
    for at in [2000, 2000, 99_999] {
        let route = server.route(&server.ack(START.wrapping_add(at)));
        assert!(!route.server && !route.held && route.copy != NO_BREAK, "{at}");
        assert_eq!(server.flow.spaces.acked, u64::from(at));
    }
}

#[test]
fn a_probe_is_for_both() {
    let mut server = under_way(LENGTH);
    let mut probe = server.ack(START.wrapping_add(2000));
    probe.seq = RCV_NXT.wrapping_sub(1);
    let route = server.route(&probe);
    assert!(route.server && route.clamped && route.copy != NO_BREAK);
}

#[test]
fn the_ack_of_the_end_completes_a_short_payload() {
    let mut server = under_way(LENGTH);
    let route = server.route(&server.ack(START.wrapping_add(LENGTH as u32)));
    assert_eq!((route.event.kind, route.event.handoff, route.event.acked), (SHUNT_EVENT_COMPLETE, HANDOFF, LENGTH));
    assert!(route.server && route.copy != NO_BREAK && !route.clamped);
    assert_eq!(route.ack, START);
    assert_eq!(server.flow.spaces.status, SHUNT_REGION_COMPLETE);
}

#[test]
fn a_long_payload_needs_its_backends_word_too_whichever_comes_last() {
    for word_first in [false, true] {
        let length = u64::from(CLAIM_MAX) + 1;
        let mut server = under_way(length);
        let mut walk = 0;
        if word_first {
            let told = deliver(&mut server.flow, PEER, HANDOFF).expect("it is its own");
            assert_eq!(told.event.kind, 0, "before the client has said so, nothing is complete");
        }
        let mut route = Route::default();
        while u64::from(walk) < length {
            walk = (walk + ROOM / 2).min(length as u32);
            route = server.route(&server.ack(START.wrapping_add(walk)));
        }
        if !word_first {
            assert_eq!(route.event.kind, 0);
            assert!(route.clamped && server.flow.spaces.status == SHUNT_REGION_ACTIVE);
            route = deliver(&mut server.flow, PEER, HANDOFF).expect("it is its own");
        }
        assert_eq!(route.event.kind, SHUNT_EVENT_COMPLETE);
        assert_eq!(server.flow.spaces.status, SHUNT_REGION_COMPLETE);
    }
}

#[test]
fn only_the_regions_own_peer_has_a_word() {
    let mut server = under_way(LENGTH);
    assert!(deliver(&mut server.flow, PEER + 1, HANDOFF).is_none());
    assert!(deliver(&mut server.flow, PEER, HANDOFF + 1).is_none());
    assert!(!space_acks(&mut server.flow, PEER + 1, 5000));
    assert!(!cancel(&mut server.flow, HANDOFF + 1));
    assert_eq!(server.flow.spaces.status, SHUNT_REGION_ACTIVE);
}

#[test]
fn an_ack_of_bytes_that_nobody_sent_is_dropped() {
    let mut server = under_way(LENGTH);
    assert!(server.route(&server.ack(START.wrapping_add(LENGTH as u32 + 1))).nobody, "past the end");

    let mut server = under_way(10 * u64::from(ROOM));
    let room = server.flow.edge.wrapping_sub(START);
    assert!(server.route(&server.ack(START.wrapping_add(room + 1))).nobody, "past the client's room");
    let inside = server.ack(START.wrapping_add(2000));
    let block = (START.wrapping_add(room), START.wrapping_add(room + 1));
    assert!(server.route_with(&inside, &[block]).nobody, "a block past the client's room");
    assert_eq!(server.flow.spaces.acked, 1000, "none of them was noted");
}

#[test]
fn data_and_a_fin_are_for_both() {
    for (payload_bytes, flags) in [(10, TH_ACK), (0, TH_ACK | TH_FIN), (0, TH_ACK | TH_URG)] {
        let mut server = under_way(LENGTH);
        let packet = Packet { payload_bytes, flags: flags as u8, ..server.ack(START.wrapping_add(2000)) };
        let route = server.route(&packet);
        assert!(route.server && route.clamped && route.copy != NO_BREAK, "{payload_bytes} {flags}");
        assert_eq!(u32::from(server.flow.flags) & FLOW_CLIENT_FIN != 0, flags & TH_FIN != 0);
    }
}

#[test]
fn a_reset_counts_at_the_next_number_alone() {
    let reset = |server: &Server, seq| Packet { seq, flags: TH_RST as u8, ..server.ack(0) };

    let mut server = under_way(LENGTH);
    let route = server.route(&reset(&server, RCV_NXT.wrapping_add(1)));
    assert!(route.server && route.copy == NO_BREAK && route.event.kind == 0);
    assert_eq!(server.flow.spaces.status, SHUNT_REGION_ACTIVE);

    let route = server.route(&reset(&server, RCV_NXT));
    assert!(route.server && route.copy != NO_BREAK && !route.behind);
    assert_eq!(route.event.kind, SHUNT_EVENT_RESET);
    assert_eq!(server.flow.spaces.status, SHUNT_REGION_CANCELLED);
    assert!(server.route(&server.ack(START)).untouched, "what follows is for a socket that is gone");
}

#[test]
fn a_client_whose_server_left_half_a_response_is_told_so() {
    let mut server = under_way(LENGTH);
    let fin = Packet { flags: (TH_FIN | TH_ACK) as u8, ..server.segment(0) };
    assert_eq!(server.depart(&fin).fate, Fate::FIN_TO_RST);
    assert!(server.route(&server.ack(START.wrapping_add(2000))).ended);
}

#[test]
fn packets_outside_the_window_go_to_the_servers_kernel_only() {
    let mut server = under_way(LENGTH);
    let mut strange = server.ack(START.wrapping_add(2000));
    strange.seq = RCV_NXT.wrapping_add(1 << 20);
    let route = server.route(&strange);
    assert!(route.server && route.strange && route.copy == NO_BREAK);
    assert_eq!(server.flow.spaces.acked, 1000);
}

#[test]
fn acks_that_a_backend_does_not_need_go_no_further() {
    let mut server = under_way(LENGTH);
    assert!(space_acks(&mut server.flow, PEER, 20_000));
    assert!(!server.route(&server.ack(START.wrapping_add(2000))).held, "the first says where the next is due");
    assert!(server.route(&server.ack(START.wrapping_add(4000))).held);
    assert!(!server.route(&server.ack(START.wrapping_add(22_000))).held, "this one is due");
    assert!(server.route(&server.ack(START.wrapping_add(23_000))).held);
    server.now += 4_000_000;
    assert!(!server.route(&server.ack(START.wrapping_add(24_000))).held, "one in each tick");
    let duplicate = server.ack(START.wrapping_add(24_000));
    assert!(!server.route(&duplicate).held, "a duplicate may be a loss");
    assert!(!server.route(&server.ack(START.wrapping_add(25_000))).held, "and from then on each goes");
}

/// An ACK is no sign of silence if another core has passed on another ACK since this core read its clock.
#[test]
fn acks_on_two_cores_at_once_are_no_silence() {
    let mut server = under_way(LENGTH);
    assert!(space_acks(&mut server.flow, PEER, 20_000));
    assert!(!server.route(&server.ack(START.wrapping_add(2000))).held);
    server.now -= 4_000_000;
    assert!(!server.route(&server.ack(START.wrapping_add(4000))).held, "one in each tick");
    assert!(server.route(&server.ack(START.wrapping_add(5000))).held, "and no more than that");
}

#[test]
fn a_report_of_duplicates_goes_to_the_backend_of_the_older_region() {
    let mut server = under_way(LENGTH);
    let end = START.wrapping_add(LENGTH as u32);
    server.route(&server.ack(end));
    let route = server.route_with(&server.ack(end), &[(START, START.wrapping_add(1448))]);
    assert!(route.server && route.late && route.copy != NO_BREAK);
}

#[test]
fn a_copy_has_its_own_region_and_no_more() {
    let mut server = under_way(LENGTH);
    let packet = server.ack(START.wrapping_add(2000));
    let index = server.route(&packet).copy as u32;
    let copied = copy(&mut server.flow, &packet, index);
    assert_eq!((copied.ack, copied.server_ack), (START.wrapping_add(2000), RCV_NXT));
    assert_eq!((copied.window, copied.token), (packet.window, 0x5678));

    // For an ACK before the region, the copy's window is reduced, so that it ends where the client's room does.
    let before = server.ack(START.wrapping_sub(512));
    let copied = copy(&mut server.flow, &before, index);
    assert_eq!((copied.ack, copied.window), (START, packet.window - 2));
}

#[test]
fn a_routers_report_is_for_whoever_sent_what_it_cites() {
    let server = under_way(LENGTH);
    assert_eq!(cites(&server.flow, START.wrapping_sub(1)), Cites::SERVERS_BYTE);
    assert_eq!(cites(&server.flow, START.wrapping_add(999)), Cites::OTHER_PAYLOAD, "acknowledged");
    assert_eq!(cites(&server.flow, START.wrapping_add(1000)), Cites::OUTSTANDING_PAYLOAD);
    assert_eq!(cites(&server.flow, START.wrapping_add(LENGTH as u32)), Cites::SERVERS_BYTE);
}
