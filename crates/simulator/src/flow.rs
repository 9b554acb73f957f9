//! A client's connection at its frontend: the kernel's socket, and the *flow*, which is the steering programs' (BPF)
//! state of the connection. A *region* is a range of sequence numbers of a client's connection, which one payload
//! takes. The payload is sent by a *peer*, the agent of a backend. A *handoff* is a payload that a server has left to a
//! peer to send. A *ring* is a BPF ring buffer by which the kernel tells a server that the client has acknowledged a
//! payload. A *token* is a connection's random number. Each copy of a client's packet for a backend has half of the
//! token, as a proof that the copy comes from the frontend. A *payload* is the body of a response.

use std::time::Duration;

use shunt_decisions::{
    self as decisions, Asked, Begin, Connection, Counter, FLOW_QUEUES, Fate, Flow, Move, NO_BREAK, Packet, Route,
    SHUNT_EVENT_COMPLETE, SHUNT_REGION_ACTIVE, SHUNT_TAKE_ALWAYS, SHUNT_TAKE_NONE, Sack, Socket, TH_ACK,
};
use shunt_logic::machine::ActiveRegion;
use shunt_wire::Endpoint;
use shunt_wire::flow::FlowState;
use zerocopy::FromZeros;

use crate::client::{WINDOW, WSCALE};
use crate::content::{Run, Stream};

/// Largest segment, in bytes. One segment here stands for several packets of a real network.
pub const SEGMENT: u64 = 57_920;
/// Maximum segment size of the connection, in bytes, for decisions that count in segments.
const MSS: u16 = 1448;
/// Sequence number of the client's next byte. It never changes, because the client only sends ACKs.
const RCV_NXT: u32 = 1;

/// A copy of a client's packet, for the backend of a region.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// Number of the peer that sends the region's payload.
    pub peer: u32,
    /// The packet, as the frontend rewrites it. Its sequence number is the highest ACK number of the frontend's kernel.
    /// Its ACK number lies in the region.
    pub packet: Packet,
    /// Half of the connection's token. It proves that the copy comes from the frontend.
    pub token: u16,
}

/// Effects of a client's packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrived {
    /// A copy for a backend.
    pub copy: Option<Copy>,
    /// Number of the handoff that the packet has completed, and number of the ring of the handoff's server.
    pub complete: Option<(u64, u32)>,
}

/// A client's connection.
pub struct Connected {
    /// The client's end.
    pub client: Endpoint,
    /// The frontend's end.
    pub server: Endpoint,
    first: u32,
    /// Bytes that the server has written itself, counted from `first` in the socket's own sequence space.
    written: Stream,
    /// Number of bytes of `written` that are acknowledged, and number that are sent.
    acked: u64,
    sent: u64,
    socket: Socket,
    connection: Connection,
    /// The steering programs' state of the connection. `None` before the first region.
    flow: Option<Flow>,
    token: u32,
    /// Time at which the last region has begun.
    begun: Duration,
    /// The kernel has reset the connection, because nobody sends the payload of the connection's region any more.
    is_reset: bool,
}

fn nanoseconds(now: Duration) -> u64 {
    // The steering programs' clock starts at 1 s, so that no event has the time 0.
    now.as_nanos() as u64 + 1_000_000_000
}

impl Connected {
    /// Returns a connection whose handshake has passed the steering programs. `first` is the sequence number of the
    /// server's first byte.
    pub fn new(client: Endpoint, server: Endpoint, first: u32, token: u32) -> Self {
        let socket = Socket {
            snd_una: first,
            snd_nxt: first,
            rcv_nxt: RCV_NXT,
            snd_cwnd: 10,
            snd_ssthresh: u32::MAX,
            srtt_us: 8 * 20_000,
            mss_cache: MSS.into(),
            ..Socket::default()
        };
        let connection = Connection {
            write_seq: first,
            snd_wnd: WINDOW,
            rcv_edge: RCV_NXT + 65536,
            snd_wscale: WSCALE,
            rcv_wscale: WSCALE,
            usable: true,
            ..Connection::default()
        };
        Self {
            client,
            server,
            first,
            written: Stream::default(),
            acked: 0,
            sent: 0,
            socket,
            connection,
            flow: None,
            token,
            begun: Duration::ZERO,
            is_reset: false,
        }
    }

    fn asked(&self) -> Asked<'_> {
        Asked { socket: &self.socket, connection: &self.connection, seen_to_begin: true }
    }

    /// Appends bytes that the server writes.
    pub fn write(&mut self, run: Run) {
        self.written.push(run);
        self.connection.write_seq = self.first.wrapping_add(self.written.end() as u32);
    }

    /// Returns whether all bytes that the server has written are sent.
    pub fn has_sent_all(&self) -> bool {
        self.sent == self.written.end()
    }

    /// Returns whether all bytes that the server has written are acknowledged.
    pub fn is_quiet(&self) -> bool {
        self.acked == self.written.end()
    }

    /// Sends as much as the client's window allows. After a loss (`again`), it begins at the first byte that is not
    /// acknowledged. Returns the segments as the client gets them: sequence number and contents.
    pub fn send(&mut self, again: bool, now: Duration) -> Vec<(u32, Run)> {
        let mut segments = Vec::new();
        let mut at = if again { self.acked } else { self.sent };
        let room = self.acked + u64::from(WINDOW);
        while at < room
            && let Some(run) = self.written.at(at)
        {
            let length = run.length.min(SEGMENT).min(room - at);
            let packet = Packet {
                seq: self.first.wrapping_add(at as u32),
                ack: RCV_NXT,
                window: 256,
                payload_bytes: length as u32,
                flags: TH_ACK as u8,
                ..Packet::default()
            };
            // The steering program fe_out may drop a segment, which is then sent again later. Or it lets this segment
            // and all later ones wait, or resets the connection.
            let departed = match &mut self.flow {
                None => Some(packet.seq),
                Some(flow) => match decisions::depart(flow, &packet, nanoseconds(now)) {
                    departure if departure.cancelled => {
                        self.is_reset = true;
                        break;
                    }
                    departure if departure.fate == Fate::WAITS => break,
                    departure => (departure.fate == Fate::TRANSLATED).then_some(departure.seq),
                },
            };
            segments.extend(departed.map(|seq| (seq, run.part(0, length))));
            at += length;
            self.sent = self.sent.max(at);
            self.socket.snd_nxt = self.first.wrapping_add(self.sent as u32);
        }
        segments
    }

    /// Begins a region (SHUNT_BEGIN). Returns the counter that the steering programs would raise: FE_BEGUN, or that of
    /// the reason for a refusal.
    pub fn begin(&mut self, peer: u32, ring: u32, handoff: u64, length: u64, now: Duration) -> Counter {
        let mut flow = self.flow.unwrap_or_else(|| decisions::new_flow(&self.asked(), self.token));
        let begun = decisions::begin(&mut flow, &Begin { peer, ring, length, handoff }, &self.asked());
        self.flow = Some(flow);
        self.begun = now;
        begun
    }

    /// Begins a region behind which the server may write (SHUNT_APPEND). Returns the counter that the steering programs
    /// would raise: FE_BEGUN, or that of the reason for a refusal.
    pub fn append(&mut self, peer: u32, ring: u32, handoff: u64, length: u64, now: Duration) -> Counter {
        let mut flow = self.flow.unwrap_or_else(|| decisions::new_flow(&self.asked(), self.token));
        let begun = decisions::append(&mut flow, &Begin { peer, ring, length, handoff }, &self.asked());
        self.flow = Some(flow);
        self.begun = now;
        begun
    }

    /// Removes the region of a handoff, if nothing was written behind it and the client has nothing of it (SHUNT_UNDO).
    /// Returns whether it was removed.
    pub fn undo(&mut self, handoff: u64) -> bool {
        let flow = self.flow.as_mut();
        flow.is_some_and(|flow| decisions::undo(flow, handoff, &self.connection) == Counter::FE_UNDONE)
    }

    /// Has another peer send the active region from byte `to.from` on (SHUNT_MOVE). Returns false if that is refused.
    pub fn move_on(&mut self, to: &Move) -> bool {
        let Some(mut flow) = self.flow else { return false };
        let moved = decisions::move_on(&mut flow, to, &self.asked()) == Counter::FE_MOVED;
        self.flow = Some(flow);
        moved
    }

    /// Cancels the region of a handoff. Returns whether it was active.
    pub fn cancel(&mut self, handoff: u64) -> bool {
        self.flow.as_mut().is_some_and(|flow| decisions::cancel(flow, handoff))
    }

    /// Notes how many payload bytes may lie between two ACKs that the frontend passes on to a backend. Returns false if
    /// this backend does not send the newest region.
    pub fn space_acks(&mut self, peer: u32, bytes: u32) -> bool {
        self.flow.as_mut().is_some_and(|flow| decisions::space_acks(flow, peer, bytes))
    }

    /// Returns the connection's state, with which the backend makes its own socket for the client. The kernel returns
    /// this state after SHUNT_BEGIN.
    pub fn state(&self) -> FlowState {
        let mut state = FlowState::new_zeroed();
        let Some(flow) = &self.flow else { return state };
        let told = decisions::describe(flow).flow;
        (state.client_address, state.client_port) = (self.client.address, self.client.port_be);
        (state.server_address, state.server_port) = (self.server.address, self.server.port_be);
        (state.start, state.rcv_nxt, state.snd_wnd) = (told.start, told.rcv_nxt, told.snd_wnd);
        (state.snd_cwnd, state.snd_ssthresh, state.srtt_us) = (told.snd_cwnd, told.snd_ssthresh, told.srtt_us);
        (state.ack_spacing, state.ahead, state.token) = (told.ack_spacing, told.ahead, told.token);
        (state.mss, state.snd_wscale, state.rcv_wscale) = (told.mss, told.snd_wscale, told.rcv_wscale);
        (state.options, state.first) = (told.options, told.first);
        state
    }

    /// Ends the active region of a handoff at the last byte that the client has acknowledged (SHUNT_TAKE). Returns the
    /// number of acknowledged payload bytes, or `None` if the handoff has no active region.
    pub fn take(&mut self, handoff: u64) -> Option<u64> {
        self.take_when(handoff, SHUNT_TAKE_ALWAYS)
    }

    /// Ends the active region of a handoff if the client has nothing of it. Returns whether it has ended.
    pub fn take_none(&mut self, handoff: u64) -> bool {
        self.take_when(handoff, SHUNT_TAKE_NONE).is_some()
    }

    fn take_when(&mut self, handoff: u64, when: u32) -> Option<u64> {
        let flow = self.flow.as_mut()?;
        let taken = decisions::take(flow, handoff, when) == Counter::FE_TAKEN;
        taken.then_some(flow.spaces.acked)
    }

    /// Handles an ACK of the client.
    pub fn arrive(&mut self, ack: u32, now: Duration) -> Arrived {
        let packet =
            Packet { seq: RCV_NXT, ack, window: (WINDOW >> WSCALE) as u16, flags: TH_ACK as u8, ..Packet::default() };
        let Some(flow) = &mut self.flow else {
            self.acknowledge(ack);
            return Arrived::default();
        };
        let route = decisions::route(flow, &packet, &Sack::default(), nanoseconds(now));
        let copy = (route.copy != NO_BREAK).then(|| {
            let index = route.copy as u32;
            let copied = decisions::copy(flow, &packet, index);
            let packet = Packet { seq: copied.server_ack, ack: copied.ack, window: copied.window, ..packet };
            let peer = flow.spaces.breaks[index as usize].peer;
            Copy { peer, packet, token: copied.token }
        });
        if route.server && !route.strange {
            self.acknowledge(route.ack);
        }
        Arrived { copy, complete: completed(&route) }
    }

    fn acknowledge(&mut self, ack: u32) {
        let known = self.first.wrapping_add(self.acked as u32);
        let more = ack.wrapping_sub(known).cast_signed();
        if more > 0 && self.acked + more as u64 <= self.sent {
            self.acked += more as u64;
            self.socket.snd_una = ack;
            self.written.forget(self.acked);
        }
    }

    /// Handles a backend's message that the client has acknowledged the whole payload. Returns the numbers of the
    /// handoff and of its server's ring, if the handoff is now complete.
    pub fn deliver(&mut self, peer: u32, handoff: u64) -> Option<(u64, u32)> {
        let flow = self.flow.as_mut()?;
        completed(&decisions::deliver(flow, peer, handoff)?)
    }

    /// Returns whether the kernel has reset the connection, because nobody sends the payload of the connection's region
    /// any more.
    pub fn is_reset(&self) -> bool {
        self.is_reset
    }

    /// Returns the connection's token, by which a backend recognises copies of the connection's packets.
    pub fn token(&self) -> u32 {
        self.token
    }

    /// Returns the connection's active region.
    pub fn region(&self, now: Duration) -> Option<ActiveRegion> {
        let flow = self.flow.as_ref().filter(|flow| flow.spaces.status == SHUNT_REGION_ACTIVE)?;
        let told = decisions::describe(flow);
        let newest = flow.spaces.breaks[(flow.spaces.made.wrapping_sub(1) % decisions::BREAKS) as usize];
        Some(ActiveRegion {
            client: self.client,
            server: self.server,
            handoff: flow.handoff,
            peer: newest.peer,
            acked: flow.spaces.acked,
            is_shut: told.shut != 0,
            round_trip: Duration::from_micros(flow.srtt_us.into()),
            quiet: Duration::from_nanos(nanoseconds(now).saturating_sub(flow.last_seen_ns)),
            queues: flow.flags & FLOW_QUEUES as u8 != 0,
            ring: flow.ring,
        })
    }

    /// Returns whether a handoff's region is the newest one of the connection, and is over.
    pub fn is_over(&self, handoff: u64, ring: u32) -> bool {
        let is_it = |flow: &&Flow| (flow.handoff, flow.ring) == (handoff, ring);
        self.flow.as_ref().filter(is_it).is_some_and(|flow| flow.spaces.status != SHUNT_REGION_ACTIVE)
    }

    /// Returns whether a handoff's region is active, with this peer and ring.
    pub fn is_active(&self, handoff: u64, peer: u32, ring: u32) -> bool {
        self.flow.as_ref().is_some_and(|flow| {
            let newest = flow.spaces.breaks[(flow.spaces.made.wrapping_sub(1) % decisions::BREAKS) as usize];
            let is_it = (flow.handoff, newest.peer, flow.ring) == (handoff, peer, ring);
            is_it && flow.spaces.status == SHUNT_REGION_ACTIVE
        })
    }
}

fn completed(route: &Route) -> Option<(u64, u32)> {
    (route.event.kind == SHUNT_EVENT_COMPLETE).then_some((route.event.handoff, route.ring))
}
