//! Tests that the steering programs decide in a kernel as crates/decisions does, for any flow (the record of a client
//! connection) and any packet, in both directions. crates/decisions has the same decisions as ordinary functions. A
//! *copy* is a client's packet as fe_in, the program on ingress, rewrites it for a backend. A *region* is a range of
//! sequence numbers that a backend sends: one payload. A *break* is the record of a region.

use proptest::prelude::*;
use shunt_decisions as decisions;
use shunt_handoff::bpf::*;

use super::programs::*;
use super::seeded::many;
use super::segment::*;

/// Sequence numbers near which the numbers of most cases lie. LOCAL is one of the frontend's kernel, CLIENT one that
/// the client sees, RCV_NXT one of the client's own bytes.
const LOCAL: u32 = 4_294_960_000;
const CLIENT: u32 = 5000;
const RCV_NXT: u32 = 4_294_967_000;

fn near(number: u32) -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => (-3000i32..3000).prop_map(move |by| number.wrapping_add_signed(by)),
        1 => (-200_000i32..200_000).prop_map(move |by| number.wrapping_add_signed(by)),
        1 => any::<u32>(),
    ]
}

fn a_break() -> impl Strategy<Value = FlowBreak> {
    let length = prop_oneof![Just(0u64), 1u64..5000, 1u64 << 31..1u64 << 33];
    (near(LOCAL), near(CLIENT), length, prop::sample::select(vec![PEER, OTHER_PEER]), 0u32..8)
        .prop_map(|(local, start, length, peer, end)| FlowBreak { local, start, length, peer, end })
}

fn flow() -> impl Strategy<Value = Flow> {
    let spaces = (0u32..7, ACTIVE..=CANCELLED, prop::array::uniform4(a_break()), 0.0..1.0f64);
    let numbers = (near(CLIENT), near(CLIENT), near(CLIENT + 60_000), near(RCV_NXT), near(RCV_NXT), near(LOCAL));
    let small = (any::<u8>(), any::<u16>(), 0u8..14, 0u32..100_000, 0u16..4, 0u16..4, 0u8..8, 0u32..2);
    let clocks = (near(1_000_000), near(1_000_000));
    (spaces, numbers, small, clocks, near(CLIENT)).prop_map(|(spaces, numbers, small, clocks, start)| {
        let (made, status, breaks, part) = spaces;
        let (client_ack, furthest_ack, edge, server_ack, rcv_nxt, server_end) = numbers;
        let (flags, client_window, snd_wscale, ahead, asked, answered, options, ack_spacing) = small;
        let mut flow =
            Flow { client_ack, furthest_ack, edge, server_ack, rcv_nxt, server_end, start, ..Flow::default() };
        // Without a break no region is open. `acked` is at most the length of the newest break.
        flow.spaces = Spaces { made, status: if made == 0 { COMPLETE } else { status }, acked: 0, breaks };
        flow.spaces.acked = (part * breaks[(made.wrapping_sub(1) % BREAKS) as usize].length as f64) as u64;
        (flow.flags, flow.client_window, flow.snd_wscale, flow.ahead) = (flags, client_window, snd_wscale, ahead);
        (flow.asked, flow.answered, flow.options, flow.ack_spacing) = (asked, answered, options, ack_spacing * 5000);
        (flow.client_tsval, flow.client_tsecr) = clocks;
        (flow.server_edge, flow.rcv_wscale, flow.mss) = (server_ack.wrapping_add(60_000), 7, 1448);
        flow.copied = [server_ack, server_ack.wrapping_sub(100)];
        (flow.ring, flow.handoff, flow.token) = (RING, 9, 0x1234_5678);
        flow
    })
}

#[derive(Clone, Debug)]
struct Said {
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    data: bool,
    clocks: Option<(u32, u32)>,
    blocks: Vec<(u32, u32)>,
}

fn said(seq: u32, ack: u32) -> impl Strategy<Value = Said> {
    let flags = prop::sample::select(vec![ACK, ACK, ACK, ACK | PSH, ACK | FIN, ACK | URG, RST, RST | ACK, 0]);
    let clocks = prop::option::of((near(1_000_000), near(1_000_000)));
    let blocks = prop::collection::vec((near(ack), near(ack)), 0..3);
    (near(seq), near(ack), flags, any::<u16>(), any::<bool>(), clocks, blocks).prop_map(
        |(seq, ack, flags, window, data, clocks, blocks)| Said { seq, ack, flags, window, data, clocks, blocks },
    )
}

impl Said {
    fn segment(&self, from_client: bool) -> Segment {
        let (from, to) = if from_client { (client(), server()) } else { (server(), client()) };
        let mut segment = Segment::ack(from, to, self.seq, self.ack).flags(self.flags);
        segment.window = self.window;
        if let Some((tsval, tsecr)) = self.clocks {
            segment = segment.timestamps(tsval, tsecr);
        }
        if !self.blocks.is_empty() && from_client {
            segment = segment.sack(&self.blocks);
        }
        if self.data { segment.payload(b"some") } else { segment }
    }

    fn packet(&self) -> decisions::Packet {
        let (tsval, tsecr) = self.clocks.unwrap_or_default();
        decisions::Packet {
            seq: self.seq,
            ack: self.ack,
            window: self.window,
            flags: self.flags,
            payload_bytes: if self.data { 4 } else { 0 },
            timestamps: if self.clocks.is_some() { 24 } else { 0 },
            tsval,
            tsecr,
            ..decisions::Packet::default()
        }
    }

    fn sack(&self) -> decisions::Sack {
        let mut sack = decisions::Sack { blocks: self.blocks.len() as u32, ..decisions::Sack::default() };
        for (at, (left, right)) in self.blocks.iter().enumerate() {
            (sack.left[at], sack.right[at]) = (*left, *right);
        }
        sack
    }
}

/// The flow of a client whose newest ACK is that of the newest region's start, and a packet that repeats this ACK.
fn says_again(mut flow: Flow, mut said: Said) -> (Flow, Said) {
    flow.client_ack = flow.spaces.breaks[(flow.spaces.made.wrapping_sub(1) % BREAKS) as usize].start;
    flow.edge = flow.client_ack.wrapping_add(60_000);
    (flow.spaces.acked, said.ack, said.window) = (0, flow.client_ack, flow.client_window);
    (flow, said)
}

fn native(flow: &Flow) -> decisions::Flow {
    // SAFETY: both types are the same C struct, which consists of integers alone.
    unsafe { std::mem::transmute(*flow) }
}

/// Clears fields that may differ: times, and the notes of copies. A copy is noted when its clone passes fe_in, perhaps
/// after the comparison.
fn noted(mut flow: decisions::Flow) -> decisions::Flow {
    (flow.last_seen_ns, flow.passed_ns, flow.idle_ns, flow.copied) = (0, 0, 0, [0; 2]);
    flow
}

#[test]
fn a_kernel_routes_clients_packets_as_the_decisions_say() {
    let fe = Frontend::new();
    many(20_000, (flow(), said(RCV_NXT, CLIENT), prop::bool::weighted(0.2)), |(flow, said, again)| {
        let (flow, said) = if *again { says_again(*flow, said.clone()) } else { (*flow, said.clone()) };
        fe.set_flow(&flow);
        let outcome = fe.fe_in(&said.segment(true));
        let mut expected = native(&flow);
        let route = decisions::route(&mut expected, &said.packet(), &said.sack(), 1 << 40);
        let to_backend = !route.server && !route.untouched && !route.nobody && !route.held && !route.ended;
        let verdict = match () {
            () if route.untouched => PASS,
            () if route.nobody || route.held => SHOT,
            () if route.ended || to_backend => REDIRECT,
            () => PASS,
        };
        prop_assert_eq!(outcome.verdict, verdict, "{:?}", route);
        if verdict == PASS && !route.untouched {
            let seen = outcome.segment();
            prop_assert_eq!((seen.ack, seen.window), (route.ack, route.window));
        }
        if to_backend {
            let mut before = expected;
            let copied = decisions::copy(&mut before, &said.packet(), route.copy as u32);
            let seen = outcome.segment();
            prop_assert_eq!((seen.seq, seen.ack, seen.window), (copied.server_ack, copied.ack, copied.window));
            prop_assert_eq!(seen.urgent, copied.token);
        }
        prop_assert_eq!(noted(native(&fe.flow())), noted(expected));
        Ok(())
    });
}

#[test]
fn a_kernel_treats_servers_segments_as_the_decisions_say() {
    use decisions::Fate;

    let fe = Frontend::new();
    many(20_000, (flow(), said(LOCAL, RCV_NXT)), |(flow, said)| {
        fe.set_flow(flow);
        let outcome = fe.fe_out(&said.segment(false));
        let mut expected = native(flow);
        let departure = decisions::depart(&mut expected, &said.packet(), 1 << 40);
        let stays = matches!(departure.fate, Fate::DROPPED | Fate::ACK_HELD | Fate::WAITS);
        prop_assert_eq!(outcome.verdict, if stays { SHOT } else { PASS }, "{:?}", departure);
        if matches!(departure.fate, Fate::TRANSLATED | Fate::ACK_MOVED) {
            let seen = outcome.segment();
            prop_assert_eq!(seen.seq, departure.seq);
            prop_assert_eq!(seen.timestamp_values().map(|(tsval, _)| tsval), said.clocks.map(|_| departure.tsval));
        }
        prop_assert_eq!(noted(native(&fe.flow())), noted(expected));
        Ok(())
    });
}
