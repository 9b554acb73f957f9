//! Tests of fe_out, the frontend's program on egress: the frontend's own segments are moved from the sequence numbers
//! of its kernel (LOCAL) to those that the client sees (CLIENT). A *flow* is the record of a client connection. A
//! *region* is a range of the connection's CLIENT numbers that a backend sends: one payload. fe_in is the program on
//! ingress.

use super::programs::*;
use super::segment::*;
use shunt_handoff::bpf::*;

const LOCAL: u32 = 5_000;
const START: u32 = 8_000; /* a payload of 3000 bytes went before */
const LENGTH: u32 = 100_000;
const OLDER: u32 = 4_000;

fn active() -> Flow {
    let mut flow = Flow { server_ack: 77_000, ..Default::default() };
    begin(&mut flow, OLDER, OLDER, 3000, PEER);
    complete(&mut flow);
    begin(&mut flow, LOCAL, START, LENGTH.into(), PEER);
    flow.client_ack = START + 2000;
    flow.client_window = 700;
    flow.snd_wscale = 3;
    flow.spaces.acked = 2000;
    flow.flags |= FLOW_START_ACKED as u8;
    flow
}

fn finished() -> Flow {
    let mut flow = active();
    complete(&mut flow);
    flow
}

fn cancelled() -> Flow {
    let mut flow = active();
    flow.spaces.status = CANCELLED;
    flow
}

fn from_server(seq: u32) -> Segment {
    Segment::ack(server(), client(), seq, 77_000)
}

/// CLIENT number of the first byte that the client of [`active`] has no room for.
const EDGE: u32 = START + 2000 + (700 << 3);

/// Runs fe_out with a segment in whose place three resets leave, and returns the resets. Their sequence numbers are the
/// client's newest ACK number, the number before the edge of the client's window, and the edge itself.
fn resets(fe: &Frontend, segment: &Segment) -> Vec<Segment> {
    let out = fe.fe_out(segment);
    assert_eq!((out.verdict, out.mark), (PASS, 0), "the original keeps its mark");
    let mut resets = fe.host.arrived(2, |arrived| arrived.to == client());
    resets.push(out.segment());
    resets
}

fn at_each_place(reset: &Segment) -> [Segment; 3] {
    [START + 2000, EDGE - 1, EDGE].map(|seq| Segment { seq, ..reset.clone() })
}

#[test]
fn segments_of_no_flow_pass_untouched() {
    let mut fe = Frontend::with_flow(&active());
    let mut stranger = from_server(LOCAL + 5).payload(b"x");
    stranger.to.set_port(1);
    let out = fe.fe_out(&stranger);
    assert_eq!((out.verdict, out.segment()), (PASS, stranger));
    assert!(fe.counted().is_empty());
}

#[test]
fn headers_sent_again_keep_the_delta_of_their_place() {
    let mut fe = Frontend::with_flow(&active());
    for (seq, client_seq) in [(OLDER - 200, OLDER - 200), (OLDER, OLDER + 3000), (LOCAL - 100, START - 100)] {
        let header = from_server(seq).payload(&[7; 100]);
        let out = fe.fe_out(&header);
        assert_eq!((out.verdict, out.segment()), (PASS, Segment { seq: client_seq, ..header }));
        assert_eq!(fe.counted(), once(&["fe_out_translated"]));
    }
}

/// The client's ACK of the header passed fe_in, and was lost before it reached the kernel. Without another ACK the
/// kernel would repeat the header, and give up in the end.
#[test]
fn a_header_that_is_sent_again_opens_the_way_for_its_ack() {
    let fe = Frontend::with_flow(&Flow { flags: FLOW_START_ACKED as u8, ..active() });
    assert_eq!(fe.fe_out(&from_server(LOCAL - 100).payload(&[7; 100])).verdict, PASS);
    assert_eq!(u32::from(fe.flow().flags) & FLOW_START_ACKED, 0);
}

#[test]
fn writing_during_a_handoff_is_dropped_and_counted() {
    let mut fe = Frontend::with_flow(&active());
    for segment in [from_server(LOCAL).payload(b"x"), from_server(LOCAL - 50).payload(&[7; 51])] {
        assert_eq!(fe.fe_out(&segment).verdict, SHOT);
        assert_eq!(fe.counted(), once(&["fe_drop_early_write"]));
    }
    assert_eq!(fe.flow().spaces.status, ACTIVE);
}

#[test]
fn bytes_written_early_leave_when_they_are_retransmitted() {
    let fe = Frontend::with_flow(&finished());
    let footer = from_server(LOCAL).payload(b"footer").flags(ACK | FIN);
    assert_eq!(fe.fe_out(&footer).segment(), Segment { seq: START + LENGTH, ..footer.clone() });
    assert!(u32::from(fe.flow().flags) & FLOW_SERVER_FIN != 0);
}

#[test]
fn pure_acks_move_to_the_right_edge_of_the_clients_window() {
    let mut fe = Frontend::with_flow(&active());
    let ack = Segment { ack: 77_500, ..from_server(LOCAL) };
    let out = fe.fe_out(&ack);
    assert_eq!((out.verdict, out.segment()), (PASS, Segment { seq: EDGE, ..ack }));
    assert_eq!(fe.counted(), once(&["fe_out_ack_moved"]));
    assert_eq!(fe.flow().server_ack, 77_500);
    let older = Segment { ack: 77_400, ..from_server(LOCAL) };
    fe.fe_out(&older);
    assert_eq!(fe.flow().server_ack, 77_500, "the highest counts");
}

#[test]
fn acks_wait_for_the_first_of_the_payload() {
    let begun = Flow { rcv_nxt: 77_000, ..active() };
    let mut fe = Frontend::with_flow(&Flow { spaces: Spaces { acked: 0, ..begun.spaces }, ..begun });
    let ack = |bytes: u32| Segment { ack: 77_000 + bytes, ..from_server(LOCAL) };
    assert_eq!(fe.fe_out(&ack(16_384)).verdict, PASS);
    assert_eq!(fe.fe_out(&ack(16_385)).verdict, SHOT);
    assert_eq!(fe.counted(), once(&["fe_out_ack_moved", "fe_out_ack_held"]));
    assert_eq!(fe.flow().server_ack, 77_000 + 16_385, "the backend's segments will carry it");
    fe.set_flow(&begun);
    assert_eq!(fe.fe_out(&ack(16_385)).verdict, PASS);
}

#[test]
fn a_keepalive_probe_opens_the_way_for_its_answer() {
    let mut fe = Frontend::with_flow(&active());
    let probe = from_server(LOCAL - 1);
    assert_eq!(fe.fe_out(&probe).segment(), from_server(START - 1));
    let answer = Segment::ack(client(), server(), 77_000, START + 2000);
    assert_eq!(fe.fe_in(&answer).verdict, PASS, "the frontend must see that its client lives");
    assert_eq!(fe.fe_in(&answer).verdict, REDIRECT);
    assert_eq!(fe.counted()["fe_in_clamped"], 1);
}

#[test]
fn a_fin_during_a_handoff_becomes_a_reset() {
    let mut fe = Frontend::with_flow(&active());
    for payload in [&b""[..], b"odd", b"even"] {
        fe.set_flow(&active());
        let fin = from_server(LOCAL).flags(ACK | FIN | PSH).payload(payload).timestamps(4, 5);
        assert_eq!(resets(&fe, &fin), at_each_place(&from_server(0).flags(ACK | RST).timestamps(4, 5)));
        assert_eq!(fe.counted(), once(&["fe_out_fin_to_rst", "fe_cancelled"]));
        assert_eq!(fe.flow().spaces.status, CANCELLED);
    }
    let again = resets(&fe, &from_server(LOCAL).flags(ACK | FIN));
    assert_eq!(again, at_each_place(&from_server(0).flags(ACK | RST)), "sent again: again");
    assert_eq!(fe.counted(), once(&["fe_out_fin_to_rst"]));
}

/// A client may have more bytes than its ACKs have said, so it expects a later number than the resets have. It answers
/// a reset with an ACK if the reset's number lies elsewhere in its window (RFC 5961, 3.2).
#[test]
fn a_challenge_ack_draws_a_reset_at_its_very_number() {
    let mut fe = Frontend::with_flow(&active());
    resets(&fe, &from_server(LOCAL).flags(ACK | FIN));
    fe.counted();
    for (number, data) in [&b""[..], b"odd", b"even"].into_iter().enumerate() {
        let next = START + 3000 + number as u32;
        let challenge = Segment::ack(client(), server(), 77_000, next).timestamps(8, 9).payload(data);
        let out = fe.fe_in(&challenge);
        assert_eq!(out.verdict, REDIRECT);
        let reset = Segment::ack(server(), client(), next, 77_000).flags(ACK | RST).timestamps(8, 9);
        assert_eq!(out.segment(), Segment { window: challenge.window, ..reset });
        assert_eq!(out.frame[..12], [&challenge.to_frame()[6..12], &challenge.to_frame()[..6]].concat());
        assert_eq!(fe.counted(), once(&["fe_in_ended"]));
        let repeated = resets(&fe, &from_server(LOCAL).flags(ACK | FIN));
        assert_eq!(repeated[0].seq, next, "and the next repetition knows");
        fe.counted();
    }
    assert_eq!(fe.fe_in(&Segment::ack(client(), server(), 77_000, START + 3002).flags(RST)).verdict, PASS);
    assert_eq!(fe.counted(), once(&["fe_in_both"]), "no reset for a reset");
}

/// The server has given up the region, but not the connection: the client's packets go to the server's kernel.
#[test]
fn a_cancelled_region_alone_answers_nobody() {
    let mut fe = Frontend::with_flow(&cancelled());
    assert_eq!(fe.fe_in(&Segment::ack(client(), server(), 77_000, START + 3000)).verdict, PASS);
    assert_eq!(fe.counted(), once(&["fe_in_server"]));
}

#[test]
fn a_reset_has_a_number_that_the_client_accepts_or_that_draws_that_number() {
    for (flow, counted) in [(active(), &["fe_out_rst_moved", "fe_cancelled"][..]), (cancelled(), &["fe_out_rst_moved"])]
    {
        let mut fe = Frontend::with_flow(&flow);
        let sent = resets(&fe, &from_server(LOCAL).flags(RST | ACK));
        assert_eq!(sent, at_each_place(&from_server(0).flags(RST | ACK)));
        assert_eq!(fe.counted(), once(counted));
        assert!(u32::from(fe.flow().flags) & FLOW_RESET != 0);
        // The kernel answers later packets with resets that are made from the client's own numbers.
        let answer = from_server(START + 3000).flags(RST);
        assert_eq!(fe.fe_out(&answer).segment(), answer);
    }
}

#[test]
fn a_reset_after_completion_is_translated() {
    let fe = Frontend::with_flow(&finished());
    assert_eq!(fe.fe_out(&from_server(LOCAL + 10).flags(RST)).segment(), from_server(START + LENGTH + 10).flags(RST));
}

/// After the cancel, the frontend's data and window probes leave as resets.
#[test]
fn after_a_cancel_only_acks_and_resets_leave() {
    let mut fe = Frontend::with_flow(&cancelled());
    let header = from_server(LOCAL - 100).payload(&[7; 100]);
    assert_eq!(fe.fe_out(&from_server(LOCAL)).segment(), from_server(EDGE));
    assert_eq!(fe.counted(), once(&["fe_out_ack_moved"]));
    for segment in [header, from_server(LOCAL - 1), from_server(LOCAL).payload(b"x")] {
        assert_eq!(resets(&fe, &segment), at_each_place(&from_server(0).flags(ACK | RST)), "{segment:?}");
        assert_eq!(fe.counted(), once(&["fe_out_fin_to_rst"]));
    }
    assert_eq!(fe.fe_in(&Segment::ack(client(), server(), 77_000, START + 2500)).verdict, REDIRECT);
    assert_eq!(fe.counted(), once(&["fe_in_ended"]));
}

#[test]
fn a_segment_on_both_sides_of_a_break_is_dropped() {
    let mut fe = Frontend::with_flow(&finished());
    for seq in [LOCAL - 50, OLDER - 50] {
        assert_eq!(fe.fe_out(&from_server(seq).payload(&[7; 100])).verdict, SHOT);
        assert_eq!(fe.counted(), once(&["fe_drop_early_write"]));
    }
    assert_eq!(fe.fe_out(&from_server(LOCAL - 50).payload(&[7; 50])).verdict, PASS);
}

#[test]
fn timestamps_do_not_fall_behind_what_the_client_has_seen() {
    let mut fe = Frontend::with_flow(&Flow { client_tsecr: 9_000, ..finished() });
    let segment = from_server(LOCAL).payload(b"x").timestamps(8_500, 5);
    assert_eq!(fe.fe_out(&segment).segment().timestamp_values(), Some((8_500, 5)), "nothing echoed yet");
    fe.counted();
    fe.set_flow(&Flow { client_tsecr: 9_000, flags: FLOW_TIMESTAMPS as u8, ..finished() });
    for (tsval, sent) in [(8_500, 9_000), (9_000, 9_000), (9_001, 9_001)] {
        let segment = from_server(LOCAL).payload(b"x").timestamps(tsval, 5);
        assert_eq!(fe.fe_out(&segment).segment().timestamp_values(), Some((sent, 5)));
    }
    assert_eq!(fe.counted(), [("fe_out_translated", 3), ("fe_out_ts_raised", 1)].into());
}

/// If the client got a segment of the server with a timestamp far ahead, it would drop all that a backend sends later
/// (RFC 7323, 5.3).
#[test]
fn a_made_up_echo_raises_no_timestamp_far() {
    let fe = Frontend::with_flow(&finished());
    for far in [8_500u32 + 8192, 8_500 + (1 << 20), 8_499 + (1 << 31)] {
        fe.set_flow(&Flow { client_tsecr: far, flags: FLOW_TIMESTAMPS as u8, ..finished() });
        let segment = from_server(LOCAL).payload(b"x").timestamps(8_500, 5);
        assert_eq!(fe.fe_out(&segment).segment().timestamp_values(), Some((8_500, 5)));
    }
}

/// The server may write behind the region, and nobody notices that the region's sender is gone: the backend's agent is
/// gone, and so is the frontend's.
#[test]
fn a_client_that_gets_nothing_for_a_minute_is_reset_when_its_server_has_more_to_say() {
    let mut fe = Frontend::with_flow(&active());
    let queues = |idle_ns| Flow { flags: FLOW_QUEUES as u8, idle_acked: 2000, idle_ns, mss: 1448, ..active() };
    let long_ago = 1;
    let closed = from_server(LOCAL).flags(ACK | FIN);
    for segment in [closed.clone(), from_server(LOCAL).payload(b"more"), from_server(LOCAL - 1)] {
        fe.set_flow(&queues(long_ago));
        let all = resets(&fe, &segment);
        assert_eq!(all, at_each_place(&Segment { payload: Vec::new(), ..segment.flags(ACK | RST) }));
        assert_eq!(fe.flow().spaces.status, CANCELLED);
    }
    fe.counted();
    // The client is not reset if it has no room, or if it has acknowledged something in that minute. It is not reset
    // either if the beginning of its wait (`idle_ns`) is unset (0), or lies in the future because of another core's
    // clock.
    let mut got = queues(long_ago);
    got.idle_acked = 1999;
    for flow in [Flow { client_window: 0, ..queues(long_ago) }, got, queues(0), queues(u64::MAX >> 1)] {
        fe.set_flow(&flow);
        assert_eq!(fe.fe_out(&closed).verdict, SHOT);
        let flow = fe.flow();
        assert_eq!((flow.spaces.status, flow.idle_acked), (ACTIVE, 2000));
        assert!(flow.idle_ns > 1);
        assert_eq!(fe.counted()["fe_out_waits"], 1);
    }
}

#[test]
fn a_relayed_stream_longer_than_half_the_sequence_space_keeps_its_delta() {
    let fe = Frontend::with_flow(&finished());
    let delta = START - LOCAL + LENGTH;
    let mut sent = 0u64;
    while sent < 5 << 30 {
        let local = LOCAL.wrapping_add(sent as u32);
        let segment = from_server(local).payload(b"x");
        let seq = local.wrapping_add(delta);
        assert_eq!(fe.fe_out(&segment).segment(), Segment { seq, ..segment }, "{sent} bytes on");
        let ack = Segment::ack(client(), server(), 77_000, seq.wrapping_add(1));
        assert_eq!(fe.fe_in(&ack).segment(), Segment { ack: local.wrapping_add(1), ..ack });
        // An older ACK that comes late is translated, too.
        let behind = Segment::ack(client(), server(), 77_000, seq.wrapping_sub(1 << 20));
        let local = if sent == 0 { None } else { Some(local.wrapping_sub(1 << 20)) };
        if let Some(local) = local {
            assert_eq!(fe.fe_in(&behind).segment(), Segment { ack: local, ..behind });
        }
        sent += 300 << 20;
    }
    assert!(fe.copies(0).is_empty());
}
