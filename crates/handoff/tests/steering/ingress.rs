//! Tests of fe_in, the frontend's program on ingress: who gets which client packet (table in bpf/decisions/arrivals.h),
//! and in whose sequence numbers. The frontend's kernel (LOCAL), the client (CLIENT) and the backend each have their
//! own. A *flow* is the record of a client connection. A *region* is a range of the connection's CLIENT numbers that a
//! backend sends: one payload. A *copy* is a client's packet as fe_in rewrites it for the backend.

use super::programs::*;
use super::segment::*;
use shunt_handoff::bpf::*;
use shunt_wire::flow::FlowState;

/// End of the header and start of the payload. LOCAL and CLIENT numbers are equal up to here.
const START: u32 = 5_000;
const LENGTH: u32 = 100_000;
const END: u32 = START + LENGTH;
/// Next byte expected from the client, as the frontend last acknowledged it.
const RCV_NXT: u32 = 77_000;

/// A flow whose first region has just begun.
fn active() -> Flow {
    active_at(START, LENGTH.into())
}

fn active_at(start: u32, length: u64) -> Flow {
    let mut flow = Flow { server_ack: RCV_NXT, client_ack: start.wrapping_sub(300), handoff: 41, ..Default::default() };
    flow.server_edge = RCV_NXT + 100_000;
    begin(&mut flow, start, start, length, PEER);
    flow
}

/// A flow in the middle of a payload: a part is acknowledged, and the frontend knows that the header before the payload
/// has arrived.
fn under_way() -> Flow {
    let mut flow = active();
    flow.spaces.acked = 1000;
    flow.client_ack = START + 1000;
    flow.flags |= FLOW_START_ACKED as u8;
    flow
}

fn finished() -> Flow {
    let mut flow = under_way();
    complete(&mut flow);
    flow.client_ack = END;
    flow.edge = END + 5000;
    flow
}

/// Start of the second payload, in CLIENT numbers. The 400 bytes between the two payloads are a header, whose LOCAL
/// numbers are 5000..5400.
const SECOND: u32 = END + 400;
fn second() -> Flow {
    let mut flow = finished();
    begin(&mut flow, START + 400, SECOND, 50_000, OTHER_PEER);
    flow.client_ack = SECOND;
    flow
}

fn from_client(ack: u32) -> Segment {
    Segment::ack(client(), server(), RCV_NXT, ack)
}

/// The copy that the backend gets of a client's packet: without data, from the client. Its sequence number is the
/// frontend's ACK number.
fn steered(ack: u32) -> Segment {
    Segment::ack(client(), peer(), RCV_NXT, ack)
}

#[test]
fn a_segment_outside_the_window_is_the_frontends_alone() {
    let mut fe = Frontend::with_flow(&active());
    let before = fe.flow().spaces;
    let inside = from_client(START + 1000);
    for offset in [1 << 24, 1 << 31, (1u32 << 24).wrapping_neg()] {
        let strange = Segment { seq: inside.seq.wrapping_add(offset), ..inside.clone() };
        let out = fe.fe_in(&strange);
        assert_eq!(out.verdict, PASS, "its kernel drops it, and says what it expects");
        assert_eq!((fe.flow().spaces.acked, fe.flow().spaces.status), (before.acked, before.status), "{offset:#x}");
    }
    assert_eq!(fe.counted(), [("fe_in_server", 3), ("fe_in_strange", 3)].into());
}

#[test]
fn a_packet_of_no_flow_passes_untouched() {
    let mut fe = Frontend::with_flow(&active());
    let mut stranger = from_client(START + 5);
    stranger.from.set_port(40_001);
    let out = fe.fe_in(&stranger.clone());
    assert_eq!((out.verdict, out.segment()), (PASS, stranger));
    assert!(fe.counted().is_empty());
}

#[test]
fn an_ack_at_or_below_the_start_goes_to_the_frontend() {
    let mut fe = Frontend::with_flow(&active());
    for ack in [START - 200, START] {
        let out = fe.fe_in(&from_client(ack));
        assert_eq!((out.verdict, out.segment()), (PASS, from_client(ack)));
        assert_eq!(fe.counted(), once(&["fe_in_server"]));
    }
    assert!(fe.copies(0).is_empty());
    assert_eq!(fe.flow().client_ack, START);
    assert_eq!(fe.flow().spaces.acked, 0);
}

#[test]
fn the_first_ack_past_the_start_goes_to_both_clamped_for_the_frontend() {
    let mut fe = Frontend::with_flow(&active());
    let out = fe.fe_in(&from_client(START + 1460));
    assert_eq!((out.verdict, out.segment()), (PASS, from_client(START)));
    assert_eq!(fe.copies(1), [steered(START + 1460)]);
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_clamped"]));
    assert_eq!(out.mark, 0, "the original keeps its mark");
    let flow = fe.flow();
    assert_eq!(flow.spaces.acked, 1460);
    assert_eq!(flow.client_ack, START + 1460);
    assert!(u32::from(flow.flags) & FLOW_START_ACKED != 0);
    assert!(flow.last_seen_ns > 0);
}

#[test]
fn later_pure_acks_go_to_the_backend_only_duplicates_and_window_updates_too() {
    let mut fe = Frontend::with_flow(&under_way());
    let window_update = Segment { window: 9000, ..from_client(START + 2920) };
    for (packet, ack) in [
        (from_client(START + 2920), START + 2920),
        (from_client(START + 2920), START + 2920),
        (window_update, START + 2920),
        (from_client(START + 1460), START + 1460),
    ] {
        let out = fe.fe_in(&packet);
        assert_eq!(out.verdict, REDIRECT);
        assert_eq!(out.segment(), Segment { window: packet.window, ..steered(ack) });
        assert_eq!(out.frame[22], 64, "a packet that starts here");
        assert_eq!(fe.counted(), once(&["fe_in_backend"]));
    }
    let flow = fe.flow();
    assert_eq!((flow.spaces.acked, flow.client_ack, flow.client_window), (1460, START + 1460, 500), "the newest");
}

#[test]
fn the_ack_at_the_end_completes_once_and_goes_to_both() {
    let mut fe = Frontend::with_flow(&under_way());
    let out = fe.fe_in(&from_client(END));
    assert_eq!((out.verdict, out.segment()), (PASS, from_client(START)));
    assert_eq!(fe.copies(1), [steered(END)]);
    assert_eq!(fe.events(), [(42, LENGTH.into(), 1)]);
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_completed"]));
    assert_eq!(fe.flow().spaces.status, COMPLETE);

    let out = fe.fe_in(&from_client(END));
    assert_eq!((out.verdict, out.segment()), (PASS, from_client(START)), "again: to the frontend alone");
    assert_eq!(fe.counted(), once(&["fe_in_server"]));
    assert!(fe.copies(0).is_empty() && fe.events().is_empty());
}

#[test]
fn one_ack_of_header_and_whole_payload_completes() {
    let fe = Frontend::with_flow(&active());
    let out = fe.fe_in(&from_client(END));
    assert_eq!((out.verdict, out.segment()), (PASS, from_client(START)));
    assert_eq!(fe.copies(1), [steered(END)]);
    assert_eq!(fe.events().len(), 1);
}

#[test]
fn an_ack_past_the_end_of_an_active_region_is_dropped() {
    let mut fe = Frontend::with_flow(&under_way());
    let before = fe.flow();
    assert_eq!(fe.fe_in(&from_client(END + 1)).verdict, SHOT);
    assert_eq!(fe.counted(), once(&["fe_drop_bad_ack"]));
    assert_eq!(fe.flow().client_ack, before.client_ack);
    assert_eq!(fe.flow().spaces.status, ACTIVE);
}

#[test]
fn after_completion_acks_get_the_new_delta() {
    let mut fe = Frontend::with_flow(&finished());
    for (ack, local) in [(END + 400, START + 400), (END + 1, START + 1), (END, START), (END - 1, START), (START, START)]
    {
        let out = fe.fe_in(&from_client(ack));
        assert_eq!((out.verdict, out.segment()), (PASS, from_client(local)), "ACK {ack}");
    }
    assert_eq!(fe.fe_in(&from_client(START - 7)).segment(), from_client(START - 7));
    assert!(fe.copies(0).is_empty());
    assert_eq!(fe.counted(), [("fe_in_server", 6)].into());
}

#[test]
fn data_goes_to_the_frontend_and_its_ack_part_to_the_backend() {
    let mut fe = Frontend::with_flow(&under_way());
    let request = from_client(START + 2000).flags(ACK | PSH).payload(b"GET /next").timestamps(900, 800);
    let out = fe.fe_in(&request);
    assert_eq!(out.verdict, PASS);
    assert_eq!(out.segment(), Segment { ack: START, ..request.clone() });
    assert_eq!(fe.copies(1), [steered(START + 2000).timestamps(900, 800)]);
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_clamped", "fe_in_stripped"]));
}

#[test]
fn a_probe_is_answered_by_the_frontend() {
    let mut fe = Frontend::with_flow(&under_way());
    // A keepalive probe (RFC 9293, 3.8.4), its repetition, and a probe with the data byte that some stacks send.
    let probe = Segment { seq: RCV_NXT - 1, ..from_client(START + 1000) };
    for probe in [probe.clone(), probe.clone(), probe.clone().payload(&[0])] {
        let out = fe.fe_in(&probe);
        assert_eq!((out.verdict, out.segment()), (PASS, Segment { ack: START, ..probe }));
        assert_eq!(fe.copies(1), [steered(START + 1000)]);
        let counted = fe.counted();
        assert_eq!((counted["fe_in_both"], counted["fe_in_clamped"]), (1, 1));
    }
    assert_eq!((fe.flow().spaces.acked, fe.flow().spaces.status), (1000, ACTIVE));
    fe.fe_in(&from_client(START + 1000));
    assert_eq!(fe.counted(), once(&["fe_in_backend"]), "what is no probe is the backend's alone");
}

#[test]
fn long_odd_and_empty_payloads_are_stripped_with_good_checksums() {
    let fe = Frontend::with_flow(&under_way());
    for bytes in [1, 2, 3, 1447, 1448] {
        let data: Vec<u8> = (0..bytes).map(|n| (n * 37) as u8).collect();
        fe.fe_in(&from_client(START + 2000).payload(&data));
        assert_eq!(fe.copies(1), [steered(START + 2000)], "{bytes} bytes");
    }
}

#[test]
fn data_that_completes_goes_to_both() {
    let fe = Frontend::with_flow(&under_way());
    let request = from_client(END).flags(ACK | PSH).payload(b"GET /next");
    let out = fe.fe_in(&request);
    assert_eq!((out.verdict, out.segment()), (PASS, Segment { ack: START, ..request.clone() }));
    assert_eq!(fe.copies(1), [steered(END)]);
    assert_eq!(fe.events(), [(42, LENGTH.into(), 1)]);
}

#[test]
fn urgent_data_goes_to_both_and_no_urgent_pointer_to_the_backend() {
    let fe = Frontend::with_flow(&under_way());
    let urgent = Segment { urgent: 3, ..from_client(START + 2000).flags(ACK | URG).payload(b"abc") };
    assert_eq!(fe.fe_in(&urgent).segment(), Segment { ack: START, ..urgent.clone() });
    assert_eq!(fe.copies(1), [steered(START + 2000)]);
}

#[test]
fn a_fin_goes_to_both_and_not_as_a_fin_to_the_backend() {
    let mut fe = Frontend::with_flow(&under_way());
    let fin = from_client(START + 2000).flags(ACK | FIN);
    assert_eq!(fe.fe_in(&fin).segment(), Segment { ack: START, ..fin.clone() });
    assert_eq!(fe.copies(1), [steered(START + 2000)]);
    assert!(u32::from(fe.flow().flags) & FLOW_CLIENT_FIN != 0);
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_clamped"]));
}

#[test]
fn a_reset_at_the_next_sequence_number_ends_the_region_and_goes_to_both() {
    let mut fe = Frontend::with_flow(&under_way());
    for flags in [RST, RST | ACK] {
        fe.set_flow(&under_way());
        let reset = from_client(START + 1000).flags(flags);
        let out = fe.fe_in(&reset);
        assert_eq!(out.verdict, PASS);
        let ack = if flags & ACK != 0 { START } else { START + 1000 };
        assert_eq!(out.segment(), Segment { ack, ..reset });
        assert_eq!(fe.copies(1), [steered(START + 1000).flags(RST | ACK)]);
        assert_eq!(fe.events(), [(42, 1000, 2)]);
        assert_eq!(fe.counted(), once(&["fe_in_both", "fe_client_reset"]));
        let flow = fe.flow();
        assert_eq!(flow.spaces.status, CANCELLED);
        assert!(u32::from(flow.flags) & FLOW_RESET != 0);

        let late = from_client(START + 3000);
        assert_eq!(fe.fe_in(&late).segment(), late, "a kernel without socket answers with the client's own numbers");
        assert!(fe.counted().is_empty());
    }
}

/// A client whose socket is gone answers a backend's segment with a reset at the number that the segment acknowledges.
/// After the client's FIN that number is one too low: the frontend has acknowledged the FIN, but the backend has not
/// heard of it.
#[test]
fn a_reset_at_what_the_backend_acknowledges_is_one() {
    let fe = Frontend::with_flow(&under_way());
    for copied in [[RCV_NXT, RCV_NXT - 9], [RCV_NXT + 1, RCV_NXT]] {
        fe.set_flow(&Flow { server_ack: RCV_NXT + 1, copied, ..under_way() });
        let reset = from_client(START + 1000).flags(RST);
        let out = fe.fe_in(&reset);
        assert_eq!((out.verdict, out.segment()), (PASS, Segment { seq: RCV_NXT + 1, ..reset }), "its kernel takes it");
        let copy = steered(START + 1000).flags(RST | ACK);
        assert_eq!(fe.copies(1), [Segment { seq: RCV_NXT + 1, ..copy }]);
        assert_eq!((fe.events(), fe.flow().spaces.status), (vec![(42, 1000, 2)], CANCELLED));
    }
}

/// While a client has no room, it is not expected to acknowledge anything. If that time counted, its server's next
/// segment would reset the client (decisions/behind.h).
#[test]
fn a_client_that_has_room_again_has_just_come_back() {
    let fe = Frontend::with_flow(&Flow { mss: 1448, client_window: 0, idle_ns: 1, idle_acked: 1000, ..under_way() });
    fe.fe_in(&from_client(START + 1000));
    assert_eq!(fe.flow().idle_ns, 0);
    fe.set_flow(&Flow { mss: 1448, client_window: 9000, idle_ns: 1, idle_acked: 1000, ..under_way() });
    fe.fe_in(&from_client(START + 1000));
    assert_eq!(fe.flow().idle_ns, 1, "it had room all the time");
}

#[test]
fn copies_have_the_token_and_are_remembered() {
    let fe = Frontend::with_flow(&Flow { token: 0x1234_5678, ..under_way() });
    let out = fe.fe_in(&from_client(START + 2000));
    assert_eq!(out.segment(), Segment { urgent: 0x5678, ..steered(START + 2000) });
    assert_eq!(fe.flow().copied, [RCV_NXT, 0]);
}

#[test]
fn a_reset_elsewhere_in_the_window_resets_nothing() {
    let mut fe = Frontend::with_flow(&under_way());
    let blind = Segment { seq: RCV_NXT + 100, ..from_client(START + 1000).flags(RST) };
    assert_eq!(fe.fe_in(&blind).verdict, PASS);
    assert_eq!(fe.flow().spaces.status, ACTIVE);
    assert!(fe.copies(0).is_empty() && fe.events().is_empty());
    assert_eq!(fe.counted(), once(&["fe_in_server"]));
}

#[test]
fn sack_blocks_inside_the_region_go_to_the_backend() {
    let mut fe = Frontend::with_flow(&under_way());
    let blocks = [(START + 5000, START + 6000), (START + 8000, START + 9000)];
    let out = fe.fe_in(&from_client(START + 2000).timestamps(1, 2).sack(&blocks));
    assert_eq!(out.verdict, REDIRECT);
    assert_eq!(out.segment(), steered(START + 2000).timestamps(1, 2).sack(&blocks));
    assert_eq!(fe.counted(), once(&["fe_in_backend"]));
}

/// Without SACK, only an ACK of the region's start that comes again says that the payload's first segment is missing.
#[test]
fn a_repeated_ack_of_the_start_goes_to_the_backend_of_a_client_without_sack() {
    let again = from_client(START);
    let flow = Flow { client_ack: START, client_window: again.window, ack_spacing: 5000, ..active() };
    let with_sack = Flow { options: FlowState::SACK, ..flow };
    let first = Flow { client_ack: START - 300, ..flow };
    let mut fe = Frontend::with_flow(&flow);
    for (what, flow, packet, copies) in [
        ("again", flow, again.clone(), 1),
        ("with SACK", with_sack, again.clone(), 0),
        ("for the first time", first, again.clone(), 0),
        ("below the start", flow, from_client(START - 1), 0),
        ("another window", flow, Segment { window: again.window + 1, ..again.clone() }, 0),
        ("with data", flow, again.clone().payload(b"GET /next"), 0),
        ("a probe", flow, Segment { seq: RCV_NXT - 1, ..again.clone() }, 0),
    ] {
        fe.set_flow(&flow);
        fe.counted();
        let out = fe.fe_in(&packet);
        assert_eq!((out.verdict, out.segment()), (PASS, packet), "{what}: the frontend's stack gets it in any case");
        assert_eq!(fe.copies(copies), vec![steered(START); copies], "{what}");
        assert_eq!(fe.flow().ack_spacing, if copies > 0 { 0 } else { 5000 }, "{what}: a sign of loss");
    }
}

#[test]
fn a_lost_header_is_the_frontends_and_the_blocks_behind_it_the_backends() {
    let mut fe = Frontend::with_flow(&active());
    // One block spans the second half of the header and the payload's beginning. The other lies in the payload.
    let blocks = [(START - 100, START + 3000), (START + 4000, START + 5000)];
    let out = fe.fe_in(&from_client(START - 200).sack(&blocks));
    assert_eq!(out.verdict, PASS);
    assert_eq!(out.segment().ack, START - 200);
    assert_eq!(out.segment().sack_blocks(), [(START - 100, START)]);
    let copies = fe.copies(1);
    assert_eq!(copies[0].ack, START);
    assert_eq!(copies[0].sack_blocks(), [(START + 1, START + 3000), (START + 4000, START + 5000)]);
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_sack"]));
    assert_eq!(fe.flow().spaces.acked, 0);
}

/// If the header is lost, the room that the backend sees must end where its client's room ends, and not later by the
/// header's length. Otherwise the client would take and acknowledge bytes beyond its room, and the frontend would not
/// believe the ACKs.
#[test]
fn a_raised_ack_number_makes_the_window_smaller() {
    for (scale, window, left) in [(0, 500, 300), (0, 200, 0), (0, 100, 0), (7, 500, 498), (7, 1, 0), (14, 84, 83)] {
        let fe = Frontend::with_flow(&Flow { snd_wscale: scale, edge: START + 100_000, ..active() });
        let packet = Segment { window, ..from_client(START - 200).sack(&[(START, START + 1000)]) };
        assert_eq!(fe.fe_in(&packet).segment().window, window, "the frontend's kernel knows its header");
        assert_eq!(fe.copies(1)[0].window, left, "{window} << {scale}");
    }
    let fe = Frontend::with_flow(&Flow { snd_wscale: 7, ..active() });
    fe.fe_in(&from_client(START + 1460));
    assert_eq!(fe.copies(1)[0].window, from_client(0).window, "of an ACK that is not raised");
}

#[test]
fn a_sack_of_the_header_alone_stays_at_the_frontend() {
    let mut fe = Frontend::with_flow(&active());
    let packet = from_client(START - 200).sack(&[(START - 100, START - 50)]);
    assert_eq!(fe.fe_in(&packet).segment(), packet);
    assert!(fe.copies(0).is_empty());
    assert_eq!(fe.counted(), once(&["fe_in_server", "fe_in_sack"]));
}

#[test]
fn a_sack_that_is_all_the_others_becomes_nops() {
    let fe = Frontend::with_flow(&active());
    let blocks = [(START, START + 3000), (START + 4000, START + 5000), (START + 6000, START + 7000)];
    let out = fe.fe_in(&from_client(START - 200).sack(&blocks)).segment();
    assert_eq!(out.options, vec![1; 28]);
}

#[test]
fn options_in_any_order_and_at_odd_offsets_are_found() {
    let fe = Frontend::with_flow(&active());
    let block = (START - 100, START + 3000);
    // NOP, SACK option at offset 21, timestamps at offset 31: the fields are at odd offsets.
    let mut options = vec![1];
    options.extend(sack_option(&[block]));
    options.extend([8, 10, 0, 0, 1, 0, 0, 0, 2, 0, 0]);
    options.resize(24, 0);
    let out = fe.fe_in(&from_client(START - 200).options(&options)).segment();
    assert_eq!(out.sack_blocks(), [(START - 100, START)]);
    assert_eq!(fe.flow().client_tsecr, 0x0200);
    let copies = fe.copies(1);
    assert_eq!(copies[0].sack_blocks(), [(START + 1, START + 3000)]);
}

#[test]
fn forty_bytes_of_nops_and_a_broken_option_are_survived() {
    let fe = Frontend::with_flow(&under_way());
    for options in [vec![1; 40], vec![5, 0, 0, 0], vec![5, 200, 0, 0], vec![8, 9, 0, 0], vec![1, 1, 1, 5], vec![8; 40]]
    {
        let out = fe.fe_in(&from_client(START + 2000).options(&options));
        assert_eq!((out.verdict, out.segment()), (REDIRECT, steered(START + 2000).options(&options)));
    }
}

#[test]
fn the_second_regions_frontend_sees_neither_payload() {
    let fe = Frontend::with_flow(&second());
    let out = fe.fe_in(&from_client(SECOND + 1000)).segment();
    assert_eq!(out, from_client(START + 400));
    assert_eq!(fe.copies(1), [Segment { to: other_peer(), ..steered(SECOND + 1000) }]);
    assert_eq!(fe.fe_in(&from_client(SECOND - 100)).segment(), from_client(START + 300));
    assert_eq!(fe.fe_in(&from_client(END - 100)).segment(), from_client(START));
}

#[test]
fn late_duplicates_of_an_older_region_are_reported_to_its_backend() {
    let mut fe = Frontend::with_flow(&second());
    let packet = from_client(SECOND - 400).sack(&[(END - 1448, END)]);
    let out = fe.fe_in(&packet);
    assert_eq!(out.verdict, PASS);
    assert_eq!(out.segment().options, vec![1; 12]);
    let copies = fe.copies(1);
    assert_eq!(copies[0], steered(END).sack(&[(END - 1448, END)]));
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_sack", "fe_in_dsack"]));

    fe.set_flow(&finished());
    fe.fe_in(&from_client(END + 400).sack(&[(END - 1448, END)]));
    assert_eq!(fe.copies(1), [steered(END).sack(&[(END - 1448, END)])]);
    fe.fe_in(&from_client(END + 400).sack(&[(END + 10, END + 20)]));
    assert!(fe.copies(0).is_empty(), "the frontend's own duplicates are its own");
}

#[test]
fn a_cancelled_region_is_the_frontends_alone() {
    let mut flow = under_way();
    flow.spaces.status = CANCELLED;
    let fe = Frontend::with_flow(&flow);
    assert_eq!(fe.fe_in(&from_client(START + 3000)).segment(), from_client(START));
    assert!(fe.copies(0).is_empty());
    assert_eq!(fe.flow().client_ack, START + 3000, "a reset will need it");
}

#[test]
fn sequence_numbers_wrap() {
    let start = u32::MAX - 999;
    let fe = Frontend::with_flow(&active_at(start, 5000));
    assert_eq!(fe.fe_in(&from_client(start - 1)).segment(), from_client(start - 1));
    assert_eq!(fe.fe_in(&from_client(start + 900)).segment(), from_client(start));
    assert_eq!(fe.copies(1), [steered(start + 900)]);
    let out = fe.fe_in(&from_client(3000).sack(&[(3500, 3600)]));
    assert_eq!((out.verdict, out.segment()), (REDIRECT, steered(3000).sack(&[(3500, 3600)])));
    assert_eq!(fe.flow().spaces.acked, 4000);
    assert_eq!(fe.fe_in(&from_client(4000)).segment(), from_client(start));
    assert_eq!(fe.flow().spaces.status, COMPLETE);
    assert_eq!(fe.fe_in(&from_client(4001)).segment(), from_client(start + 1));
}

#[test]
fn a_region_longer_than_the_sequence_space_completes_at_its_end_only() {
    let length = (1u64 << 33) + 12_345;
    let fe = Frontend::with_flow(&active_at(START, length));
    let mut at = 0u64;
    let has_room = |at: u64| fe.set_flow(&Flow { edge: START.wrapping_add(at as u32), ..fe.flow() });
    while at + (1 << 30) < length {
        at += 1 << 30;
        has_room(at);
        fe.fe_in(&from_client(START.wrapping_add(at as u32)));
        assert_eq!(fe.flow().spaces.acked, at);
        assert_eq!(fe.flow().spaces.status, ACTIVE);
    }
    fe.copies(1);
    let end = START.wrapping_add(length as u32);
    has_room(length + 9);
    let out = fe.fe_in(&from_client(end));
    assert_eq!(out.segment(), from_client(START));
    assert_eq!(fe.events(), [(42, length, 1)]);
    assert_eq!(fe.fe_in(&from_client(end.wrapping_add(9))).segment(), from_client(START + 9));
    assert_eq!(fe.fe_in(&from_client(end.wrapping_sub(9))).segment(), from_client(START));
}

#[test]
fn the_newest_echoed_timestamp_is_remembered() {
    let fe = Frontend::with_flow(&under_way());
    for (tsecr, newest) in [(0xffff_fff0, 0xffff_fff0), (0xffff_ffe0, 0xffff_fff0), (5, 5)] {
        fe.fe_in(&from_client(START + 2000).timestamps(1, tsecr));
        assert_eq!(fe.flow().client_tsecr, newest);
    }
}

#[test]
fn a_syn_for_a_connection_that_is_gone_forgets_the_flow() {
    let fe = Frontend::with_flow(&finished());
    let syn = from_client(0).flags(SYN);
    assert_eq!(fe.fe_in(&syn).verdict, PASS);
    assert!(fe.find_flow().is_none() && fe.events().is_empty());
}

/// fe_in forgets the flow when the client opens a new connection from the same port. fe_in then reports the region as
/// reset, because nothing could report the region's end later.
#[test]
fn the_region_of_a_flow_that_is_forgotten_has_ended() {
    let mut fe = Frontend::with_flow(&under_way());
    assert_eq!(fe.fe_in(&from_client(0).flags(SYN)).verdict, PASS);
    assert!(fe.find_flow().is_none());
    assert_eq!((fe.events(), fe.counted()), (vec![(42, 1000, 2)], once(&["fe_client_reset"])));
}

#[test]
fn truncated_frames_are_not_touched() {
    let fe = Frontend::with_flow(&under_way());
    let frame = from_client(START + 2000).timestamps(1, 2).to_frame();
    for bytes in 34..frame.len() {
        let out = run(&fe.skel.progs.fe_in, fe.host.client_port, &frame[..bytes], 0);
        assert_eq!((out.verdict, out.frame.as_slice()), (PASS, &frame[..bytes]));
    }
}

#[test]
fn a_lost_event_is_counted() {
    let mut fe = Frontend::with_flow(&Flow { ring: 9, ..under_way() });
    fe.fe_in(&from_client(END));
    assert_eq!(fe.counted(), once(&["fe_in_both", "fe_completed", "fe_event_lost"]));
    assert_eq!(fe.flow().spaces.status, COMPLETE);
}

#[test]
fn a_marked_clone_of_a_flow_that_is_gone_is_dropped() {
    let fe = Frontend::with_flow(&under_way());
    let mut stranger = from_client(START + 2000);
    stranger.from.set_port(1);
    assert_eq!(run(&fe.skel.progs.fe_in, fe.host.client_port, &stranger.to_frame(), COPY_MARK).verdict, SHOT);
}

#[test]
fn a_clone_that_the_programs_of_another_layout_have_made_is_left_to_them() {
    let fe = Frontend::with_flow(&under_way());
    let mark = COPY_MARK ^ 3 << 8;
    let mut of_theirs = from_client(START + 2000);
    of_theirs.from.set_port(1);
    let out = run(&fe.skel.progs.fe_in, fe.host.client_port, &of_theirs.to_frame(), mark);
    assert_eq!((out.verdict, out.mark, out.frame), (PASS, mark, of_theirs.to_frame()));
}

#[test]
fn ipv6_is_steered_and_translated_alike() {
    let mut fe = Frontend::with_flow(&active());
    let (client, server, peer) =
        ("[fd00::2]:40000".parse().unwrap(), "[fd00::1]:80".parse().unwrap(), "[fd01::2]:7001".parse().unwrap());
    fe.set_peer(PEER, peer);
    fe.set_flow_of(client, server, &active());
    let packet = |ack| Segment::ack(client, server, RCV_NXT, ack).timestamps(3, 4);
    let steered = |ack| Segment::ack(client, peer, RCV_NXT, ack).timestamps(3, 4);

    let out = fe.fe_in(&packet(START + 1460).payload(b"request"));
    assert_eq!((out.verdict, out.segment()), (PASS, packet(START).payload(b"request")));
    assert_eq!(fe.copies(1), [steered(START + 1460)]);
    let out = fe.fe_in(&packet(START + 2000));
    assert_eq!((out.verdict, out.segment()), (REDIRECT, steered(START + 2000)));
    fe.fe_in(&packet(END));
    assert_eq!(fe.copies(1), [steered(END)]);
    assert_eq!(fe.fe_in(&packet(END + 9)).segment(), packet(START + 9));
    assert_eq!(fe.counted()["fe_completed"], 1);
}
