//! Tests with long histories of one connection. An honest client, a stranger, and a server that hands off one payload
//! after another take part. The stranger knows the connection's addresses, and guesses numbers near the true ones. The
//! *stream* is all bytes that the client gets. The backend's *word* confirms that its socket has got the ACK of a
//! payload's end.

use std::collections::VecDeque;

use proptest::prelude::*;
use shunt_decisions::*;

use super::connection::*;

const ROOM: u32 = 1 << 18;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The server writes a header and hands off a payload, if it may.
    Respond { header: u32, payload: u64 },
    /// The backend sends up to this many bytes of the newest payload, as far as the client has room.
    Send(u32),
    /// The client takes the bytes that have come, and sends an ACK.
    Acknowledge,
    /// The n-th of the client's packets that are on their way arrives. All packets before it are lost.
    Arrive(usize),
    /// A stranger's packet arrives, with numbers at this distance from the client's.
    Guess { seq: i32, ack: i32, flags: u8 },
    /// The backend gives its word, if its socket has the ACK of the end.
    Deliver,
}

fn step() -> impl Strategy<Value = Step> {
    let payload = prop_oneof![1u64..3000, 10_000u64..2_000_000, Just(5u64 << 30)];
    prop_oneof![
        2 => (1u32..2000, payload).prop_map(|(header, payload)| Step::Respond { header, payload }),
        8 => (1u32..100_000).prop_map(Step::Send),
        8 => Just(Step::Acknowledge),
        10 => (0usize..4).prop_map(Step::Arrive),
        3 => (-100_000i32..100_000, -500_000i32..500_000, prop::sample::select(vec![TH_ACK, TH_ACK | TH_FIN]))
            .prop_map(|(seq, ack, flags)| Step::Guess { seq, ack, flags: flags as u8 }),
        4 => Just(Step::Deliver),
    ]
}

struct History {
    server: Server,
    first: u32,
    /// Number of bytes of the whole stream that have been sent.
    sent: u64,
    /// Stream offset at which the newest payload ends.
    region_end: Option<u64>,
    /// Number of bytes of the stream that the client has.
    taken: u64,
    /// For each of the client's packets that are on their way: number of bytes of the stream that it acknowledges.
    on_their_way: VecDeque<u64>,
    /// Highest stream offset that any of the client's arrived packets acknowledges.
    heard: u64,
    /// Stream offset and length of each payload.
    payloads: Vec<(u64, u64)>,
}

impl History {
    fn new(first: u32) -> Self {
        Self {
            server: Server::new(first, ROOM),
            first,
            sent: 0,
            region_end: None,
            taken: 0,
            on_their_way: VecDeque::new(),
            heard: 0,
            payloads: Vec::new(),
        }
    }

    fn number(&self, offset: u64) -> u32 {
        self.first.wrapping_add(offset as u32)
    }

    /// Number of the frontend's own bytes among the first `offset` bytes of the stream.
    fn own(&self, offset: u64) -> u64 {
        offset - self.payloads.iter().map(|(at, length)| offset.saturating_sub(*at).min(*length)).sum::<u64>()
    }

    fn is_active(&self) -> bool {
        self.server.flow.spaces.status == SHUNT_REGION_ACTIVE
    }

    fn respond(&mut self, header: u32, payload: u64) {
        if self.is_active() || self.region_end.is_some_and(|end| self.sent < end) {
            return;
        }
        let departure = self.server.send(header);
        assert_eq!((departure.fate, departure.seq), (Fate::TRANSLATED, self.number(self.sent)));
        self.sent += u64::from(header);
        if self.server.begin(payload) == Counter::FE_BEGUN {
            assert_eq!(self.server.start(), self.number(self.sent));
            self.payloads.push((self.sent, payload));
            self.region_end = Some(self.sent + payload);
        }
    }

    fn send(&mut self, bytes: u32) {
        if let Some(end) = self.region_end {
            let room = self.heard + u64::from(ROOM);
            self.sent = (self.sent + u64::from(bytes)).min(end).min(room.max(self.sent));
        }
    }

    /// The client's packet, as it was sent when the client had `taken` bytes.
    fn packet(&self, taken: u64) -> Packet {
        self.server.ack(self.number(taken))
    }

    fn arrive(&mut self, which: usize) {
        let Some(taken) = self.on_their_way.get(which).copied() else { return };
        self.on_their_way.drain(..=which);
        let route = self.server.route(&self.packet(taken));
        assert!(!route.nobody && !route.strange && !route.ended, "an honest client is heard: {route:?}");
        if route.server {
            let local = self.number(self.own(taken));
            assert_eq!(route.ack, local, "its server hears of its own bytes, at {taken}");
            self.server.socket.snd_una = local;
        }
        self.heard = self.heard.max(taken);
        self.check_end(&route);
    }

    fn check_end(&self, route: &Route) {
        if route.event.kind != SHUNT_EVENT_COMPLETE {
            return;
        }
        let newest = self.server.newest();
        assert_eq!(route.event.acked, newest.length);
        if newest.length > u64::from(CLAIM_MAX) {
            assert_ne!(newest.end & END_DELIVERED, 0, "a long one is complete by its backend's word alone");
        }
    }

    fn step(&mut self, step: Step) {
        self.server.now += 1_000_000;
        match step {
            Step::Respond { header, payload } => self.respond(header, payload),
            Step::Send(bytes) => self.send(bytes),
            Step::Acknowledge => {
                self.taken = self.sent;
                self.on_their_way.push_back(self.taken);
            }
            Step::Arrive(which) => self.arrive(which),
            Step::Guess { seq, ack, flags } => {
                let mut packet = self.packet(self.taken);
                packet.seq = packet.seq.wrapping_add_signed(seq);
                packet.ack = packet.ack.wrapping_add_signed(ack);
                packet.flags = flags;
                let route = self.server.route(&packet);
                self.check_end(&route);
            }
            Step::Deliver => {
                let all = self.region_end.is_some_and(|end| self.heard >= end && self.sent >= end);
                if all && let Some(route) = deliver(&mut self.server.flow, PEER, HANDOFF) {
                    self.check_end(&route);
                }
            }
        }
        assert!(self.server.flow.spaces.acked <= self.server.newest().length || self.server.flow.spaces.made == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn an_honest_client_is_always_heard(first in any::<u32>(), steps in prop::collection::vec(step(), 1..400)) {
        let mut history = History::new(first);
        for step in steps {
            history.step(step);
        }
    }
}
