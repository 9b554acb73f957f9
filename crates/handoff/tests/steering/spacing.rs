//! Tests of which ACKs still go to a backend that has said how far apart its ACKs may be (`ack_may_wait` in
//! bpf/decisions/arrivals.h). This distance, in payload bytes, is the *spacing*. A *flow* is the record of a client
//! connection.

use rustix::time::{ClockId, clock_gettime};
use shunt_handoff::bpf::*;
use shunt_wire::Endpoint;

use super::programs::*;
use super::segment::*;

const START: u32 = 5_000;
const LENGTH: u32 = 1_000_000;
const RCV_NXT: u32 = 77_000;
/// Number of payload bytes that are acknowledged already.
const ACKED: u32 = 100_000;
const SPACING: u32 = 20_000;

/// Current time in ns by the clock of bpf_ktime_get_coarse_ns, which moves once in each jiffy.
fn tick() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A flow in the middle of a payload. The last ACK that was passed on is that of the first ACKED bytes. The time when
/// it was passed on (`passed_ns`) is left to the caller.
fn spaced() -> Flow {
    let mut flow = Flow { server_ack: RCV_NXT, client_window: 60_000, snd_wscale: 2, ..Default::default() };
    begin(&mut flow, START, START, LENGTH.into(), PEER);
    flow.flags |= FLOW_START_ACKED as u8;
    flow.spaces.acked = ACKED.into();
    flow.client_ack = START + ACKED;
    flow.ack_spacing = SPACING;
    flow.hold_until = (ACKED + SPACING).into();
    flow
}

/// Makes an ACK of the first `bytes` bytes of the payload.
fn ack_of(bytes: u32) -> Segment {
    Segment { window: 60_000, ..Segment::ack(client(), server(), RCV_NXT, START + bytes) }
}

/// Runs a packet in the tick in which the last ACK was passed on. Repeats the run if the clock has ticked meanwhile.
fn at_once(fe: &mut Frontend, flow: Flow, packet: &Segment) -> (Outcome, Flow) {
    loop {
        let passed_ns = tick();
        fe.set_flow(&Flow { passed_ns, ..flow });
        fe.counted();
        let out = fe.fe_in(packet);
        if tick() == passed_ns {
            return (out, fe.flow());
        }
        fe.copies(0);
    }
}

#[test]
fn an_ack_that_only_advances_ends_at_the_frontend() {
    let mut fe = Frontend::with_flow(&spaced());
    for bytes in [ACKED + 1, ACKED + 2896, ACKED + SPACING - 1] {
        let (out, flow) = at_once(&mut fe, spaced(), &ack_of(bytes));
        assert_eq!(out.verdict, SHOT, "{bytes} bytes");
        assert_eq!(fe.counted(), once(&["fe_in_held"]));
        assert_eq!((flow.spaces.acked, flow.client_ack), (bytes.into(), START + bytes), "the frontend counts it");
        assert_eq!((flow.ack_spacing, flow.hold_until), (SPACING, (ACKED + SPACING).into()));
    }
    assert!(fe.copies(0).is_empty());
}

#[test]
fn one_ack_in_each_spacing_is_passed_on() {
    let mut fe = Frontend::with_flow(&spaced());
    let (out, flow) = at_once(&mut fe, spaced(), &ack_of(ACKED + SPACING));
    assert_eq!(out.verdict, REDIRECT);
    assert_eq!(flow.hold_until, (ACKED + 2 * SPACING).into());
    assert_eq!(fe.counted(), once(&["fe_in_backend"]));
}

#[test]
fn no_more_than_a_quarter_of_the_clients_window_is_held() {
    let mut fe = Frontend::with_flow(&spaced());
    let narrow = Segment { window: 1000, ..ack_of(ACKED + SPACING) };
    let (_, flow) = at_once(&mut fe, spaced(), &narrow);
    assert_eq!(flow.hold_until, u64::from(ACKED + SPACING) + 1000);
    let closed = Segment { window: 0, ..ack_of(ACKED + SPACING) };
    let (_, flow) = at_once(&mut fe, spaced(), &closed);
    assert_eq!(flow.hold_until, u64::from(ACKED + SPACING), "every ACK goes");
}

#[test]
fn a_sign_of_loss_is_passed_on_and_so_is_every_ack_after_it() {
    const ECE: u8 = 0x40;
    let mut fe = Frontend::with_flow(&spaced());
    let at = START + ACKED;
    let signs = [
        ("duplicate", ack_of(ACKED)),
        ("SACK", ack_of(ACKED + 100).sack(&[(at + 5000, at + 6000)])),
        ("duplicate report", ack_of(ACKED + 100).sack(&[(at - 3000, at - 2000)])),
        ("ECN echo", ack_of(ACKED + 100).flags(ACK | ECE)),
    ];
    for (what, packet) in signs {
        let (out, flow) = at_once(&mut fe, spaced(), &packet);
        assert_eq!(out.verdict, REDIRECT, "{what}");
        assert_eq!(flow.ack_spacing, 0, "{what}");
        let (out, _) = at_once(&mut fe, flow, &ack_of(ACKED + 200));
        assert_eq!(out.verdict, REDIRECT, "the next after {what}");
    }
}

#[test]
fn acks_that_do_not_advance_are_passed_on() {
    let mut fe = Frontend::with_flow(&spaced());
    let window_update = Segment { window: 61_000, ..ack_of(ACKED) };
    for packet in [window_update, ack_of(ACKED - 2000)] {
        let (out, flow) = at_once(&mut fe, spaced(), &packet);
        assert_eq!((out.verdict, flow.ack_spacing), (REDIRECT, SPACING));
    }
}

#[test]
fn data_probes_and_the_end_go_to_both() {
    let mut fe = Frontend::with_flow(&spaced());
    let ack = ack_of(ACKED + 100);
    let probe = Segment { seq: RCV_NXT - 1, ..ack.clone() };
    for packet in [ack.clone().payload(b"GET /"), ack.flags(ACK | FIN), probe, ack_of(LENGTH)] {
        let (out, _) = at_once(&mut fe, spaced(), &packet);
        assert_eq!(out.verdict, PASS);
        assert!(fe.counted().contains_key("fe_in_both"));
    }
}

#[test]
fn a_new_region_has_its_first_ack_passed_on() {
    let mut fe = Frontend::with_flow(&spaced());
    let mut flow = spaced();
    flow.flags &= !(FLOW_START_ACKED as u8);
    flow.spaces.acked = 0;
    (flow.client_ack, flow.hold_until) = (START, 0);
    let (out, flow) = at_once(&mut fe, flow, &ack_of(1448));
    assert_eq!((out.verdict, out.segment().ack), (PASS, START));
    assert_eq!(flow.hold_until, u64::from(1448 + SPACING));
}

#[test]
fn one_ack_is_passed_on_in_each_tick_of_the_clock() {
    let fe = Frontend::with_flow(&spaced());
    fe.set_flow(&Flow { passed_ns: tick() - 4_000_000, ..spaced() });
    assert_eq!(fe.fe_in(&ack_of(ACKED + 100)).verdict, REDIRECT);
    assert_eq!(fe.flow().ack_spacing, SPACING);
}

#[test]
fn after_a_silence_every_ack_is_passed_on() {
    let fe = Frontend::with_flow(&spaced());
    fe.set_flow(&Flow { passed_ns: tick() - 150_000_000, ..spaced() });
    assert_eq!(fe.fe_in(&ack_of(ACKED + 100)).verdict, REDIRECT);
    assert_eq!(fe.flow().ack_spacing, 0, "the sender may have timed out");
}

#[test]
fn a_silence_of_a_round_trip_says_nothing() {
    let fe = Frontend::with_flow(&spaced());
    for (silence_ns, spacing) in [(1_900_000_000, SPACING), (2_500_000_000, 0)] {
        fe.set_flow(&Flow { passed_ns: tick() - silence_ns, srtt_us: 2_000_000, ..spaced() });
        assert_eq!(fe.fe_in(&ack_of(ACKED + 100)).verdict, REDIRECT);
        assert_eq!(fe.flow().ack_spacing, spacing, "{silence_ns} ns");
    }
}

/// Returns the frame with which the agent runs the program fe_spacing, to ask for ACKs that are `bytes` bytes apart.
fn spacing(peer: u32, bytes: u32, port: u16) -> Vec<u8> {
    let (client, server) = (Endpoint::from(client()), Endpoint::from(server()));
    let mut frame = vec![0; 14];
    frame.extend(client.address.0);
    frame.extend(server.address.0);
    frame.extend(port.to_be_bytes());
    frame.extend(server.port_be);
    frame.extend(peer.to_ne_bytes());
    frame.extend(bytes.to_ne_bytes());
    frame
}

#[test]
fn only_the_newest_regions_sender_says_what_it_needs() {
    let fe = Frontend::with_flow(&Flow { ack_spacing: 0, ..spaced() });
    let say = |frame: &[u8]| run(&fe.skel.progs.fe_spacing, 1, frame, 0).verdict;
    let port = client().port();
    assert_eq!(say(&spacing(OTHER_PEER, 9000, port)), SHOT);
    assert_eq!(say(&spacing(PEER, 9000, port + 1)), SHOT);
    assert_eq!(say(&spacing(PEER, 9000, port)[..40]), SHOT);
    assert_eq!(fe.flow().ack_spacing, 0);
    assert_eq!(say(&spacing(PEER, 9000, port)), PASS);
    assert_eq!(fe.flow().ack_spacing, 9000);
}
