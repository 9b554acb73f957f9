//! The decisions of the steering programs, as Rust functions: which packet goes where, how far it is believed, and how
//! a flow changes. They call the C code of crates/handoff/bpf/decisions, which documents each decision. This crate
//! compiles that code for this machine, so that it can be tested without a kernel, a million times a second. The rest
//! of the programs is not here: reading and rewriting packets, and the maps. A *flow* is the record of a client
//! connection at its frontend. A *region* is a range of the connection's sequence numbers that a *peer*, a backend's
//! agent, sends: one payload. A *break* is the flow's record of one region. A *copy* is a client's packet, rewritten
//! for a backend. A *sender* is a backend's socket for a client, and a *slot* its record. The programs are fe_in and
//! fe_out at the frontend, and be_in and be_out at the backend, on ingress and egress.
//!
//! Sequence numbers and counts are in host order. Times are in nanoseconds of any clock that does not go back. Nothing
//! here allocates or panics.

use std::ptr;

#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case, missing_docs, clippy::all, dead_code)]
#[allow(clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
mod native {
    include!(concat!(env!("OUT_DIR"), "/native.rs"));
}

pub use native::{
    ANCHOR_BYTES, BREAKS, CLAIM_MAX, END_CLAIMED, END_DELIVERED, END_WORD, FLOW_CLIENT_FIN, FLOW_QUEUES, FLOW_RESET,
    FLOW_SEEN_IN, FLOW_SEEN_OUT, FLOW_SERVER_FIN, FLOW_START_ACKED, FLOW_TIMESTAMPS, HANDSHAKE_SECONDS, IDLE_NS,
    LATE_MAX, NO_BREAK, SACK_BLOCKS_MAX, SENDER_LIVE, SENDER_WORD, SHUNT_EVENT_COMPLETE, SHUNT_EVENT_RESET,
    SHUNT_EVENT_STATE, SHUNT_OPTION_SACK, SHUNT_OPTION_TIMESTAMPS, SHUNT_OPTION_WORD, SHUNT_OPTION_WSCALE,
    SHUNT_REGION_ACTIVE, SHUNT_REGION_CANCELLED, SHUNT_REGION_COMPLETE, SHUNT_REGION_NONE, SHUNT_TAKE_ALWAYS,
    SHUNT_TAKE_NONE, SHUNT_TAKE_WHOLE, SILENCE_NS, STEP_MAX, STEP_MAX_RESET, TH_ACK, TH_CWR, TH_ECE, TH_FIN, TH_PSH,
    TH_RST, TH_SYN, TH_URG, UNHEARD_NS,
};
pub use native::{
    bpf_tcp_sock as Socket, cites as Cites, connection as Connection, copy as Copied, departure as Departure,
    fate as Fate, flow as Flow, flow_break as Break, flow_key as FlowKey, handshake as Handshake, packet as Packet,
    region as Region, route as Route, sack as Sack, sender_slot as SenderSlot, shunt_begin as Begin,
    shunt_move as Move, shunt_state as State, spaces as Spaces, steer_counter as Counter,
};

/// State of a server's socket when it asks for a region.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The socket, as bpf_tcp_sock() describes it.
    pub socket: &'a Socket,
    /// The connection, as read from the kernel's own structures.
    pub connection: &'a Connection,
    /// Whether the connection's flow is new, and its handshake proves ([`is_handshake_of`]) that its packets pass fe_in
    /// and fe_out with the socket's numbers.
    pub seen_to_begin: bool,
}

impl Asked<'_> {
    fn native(&self) -> native::asked {
        native::asked {
            key: FlowKey::default(),
            ring: ptr::null_mut(),
            // The C code only reads the socket, though the field in `struct asked` is no pointer to `const`.
            tcp: ptr::from_ref(self.socket).cast_mut(),
            connection: *self.connection,
            seen_to_begin: self.seen_to_begin,
        }
    }
}

/// Decides at fe_in who gets a client's packet, and notes in the flow what the packet says.
pub fn route(flow: &mut Flow, packet: &Packet, sack: &Sack, now: u64) -> Route {
    let mut route = Route { copy: NO_BREAK, ..Route::default() };
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_route(flow, packet, sack, now, &mut route) };
    route
}

/// Returns the numbers of a copy for the backend of break `index` ([`Route::copy`]), and notes the copy in the flow.
pub fn copy(flow: &mut Flow, packet: &Packet, index: u32) -> Copied {
    let mut copied = Copied::default();
    // SAFETY: all pointers are to whole values that live as long as the call. Any index is valid, because it is taken
    // modulo the number of breaks.
    unsafe { native::native_copy(flow, packet, index, &mut copied) };
    copied
}

/// Returns the part of a client's SACK blocks that lies in a region, for a copy that acknowledges `ack`.
pub fn blocks_of_region(region: &Region, ack: u32, mut sack: Sack) -> Sack {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_blocks_of_region(region, ack, &mut sack) };
    sack
}

/// Converts a client's SACK blocks to the numbers of the frontend's kernel.
pub fn blocks_to_local(spaces: &Spaces, mut sack: Sack) -> Sack {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_blocks_to_local(spaces, &mut sack) };
    sack
}

/// Returns where the packet that a router's report cites begins: at a byte of the server, in outstanding payload, or in
/// other payload.
pub fn cites(flow: &Flow, seq: u32) -> Cites {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_cites(flow, seq) }
}

/// Decides at fe_out what becomes of a segment of the frontend's kernel, and notes in the flow what the segment says.
pub fn depart(flow: &mut Flow, packet: &Packet, now: u64) -> Departure {
    let mut departure = Departure { fate: Fate::TRANSLATED, ..Departure::default() };
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_depart(flow, packet, now, &mut departure) };
    departure
}

/// Whether a handshake that was seen is this socket's, and was answered within HANDSHAKE_SECONDS before `now`.
pub fn is_handshake_of(seen: &Handshake, socket: &Socket, now: u64) -> bool {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_is_handshake_of(seen, socket, now) }
}

/// Makes the flow of a connection that has had no region yet. `token` is a random number: each copy has half of it, so
/// that be_in recognizes copies.
pub fn new_flow(asked: &Asked<'_>, token: u32) -> Flow {
    let mut flow = Flow::default();
    // SAFETY: all pointers are to whole values that live as long as the call, the socket included.
    unsafe { native::native_new_flow(&asked.native(), token, &mut flow) };
    flow
}

/// Decides on a server's setsockopt(SHUNT_BEGIN) (include/shunt.h), which asks that the next bytes of its connection
/// come from a peer. If they may, makes the region in the flow, and returns FE_BEGUN. Otherwise returns the counter of
/// the reason for the refusal.
pub fn begin(flow: &mut Flow, begin: &Begin, asked: &Asked<'_>) -> Counter {
    // SAFETY: all pointers are to whole values that live as long as the call, the socket included.
    unsafe { native::native_begin(flow, begin, &asked.native()) }
}

/// Decides on a server's setsockopt(SHUNT_APPEND). It makes a region as SHUNT_BEGIN does, but the server may write
/// behind the region; or it makes the handoff's active region longer. Returns FE_BEGUN or FE_APPENDED, or the counter
/// of the reason for the refusal.
pub fn append(flow: &mut Flow, begin: &Begin, asked: &Asked<'_>) -> Counter {
    // SAFETY: all pointers are to whole values that live as long as the call, the socket included.
    unsafe { native::native_append(flow, begin, &asked.native()) }
}

/// Decides on a server's setsockopt(SHUNT_UNDO), which removes the region that SHUNT_APPEND has made for a handoff. It
/// is refused if the client has acknowledged some of the region, or the server has written behind it. Returns
/// FE_UNDONE, or the counter of the reason for the refusal.
pub fn undo(flow: &mut Flow, handoff: u64, connection: &Connection) -> Counter {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_undo(flow, handoff, connection) }
}

/// Decides on a server's setsockopt(SHUNT_MOVE), which has another peer continue the active region. Returns FE_MOVED,
/// or the counter of the reason for the refusal.
pub fn move_on(flow: &mut Flow, to: &Move, asked: &Asked<'_>) -> Counter {
    // SAFETY: all pointers are to whole values that live as long as the call, the socket included.
    unsafe { native::native_move(flow, to, &asked.native()) }
}

/// Decides on a server's setsockopt(SHUNT_TAKE), which ends a handoff's active region at what the client has
/// acknowledged. `when` is one of SHUNT_TAKE_*: how much of the region the client must have acknowledged. Returns
/// FE_TAKEN, or the counter of the reason for the refusal.
pub fn take(flow: &mut Flow, handoff: u64, when: u32) -> Counter {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_take(flow, handoff, when) }
}

/// Returns the answer to SHUNT_STATE, by which a server asks for the state of its connection. The addresses, the ports
/// and the kind of record are left out.
pub fn describe(flow: &Flow) -> State {
    let mut state = State::default();
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_describe(flow, &mut state) };
    state
}

/// Notes how many payload bytes may lie between two ACKs that go to a backend. Returns false if the backend does not
/// send the newest region.
pub fn space_acks(flow: &mut Flow, peer: u32, bytes: u32) -> bool {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_space_acks(flow, peer, bytes) }
}

/// Notes a backend's word that its socket has got the ACK of a payload's end. Returns the event that follows, in
/// [`Route::event`]; its kind is 0 while the client's own ACK is missing. Returns None if the word is not about the
/// active region, or that region is another peer's.
pub fn deliver(flow: &mut Flow, peer: u32, handoff: u64) -> Option<Route> {
    let mut route = Route { copy: NO_BREAK, ..Route::default() };
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_deliver(flow, peer, handoff, &mut route) }.then_some(route)
}

/// Cancels a handoff's region that nobody sends any more. Returns false if this handoff has no active region.
pub fn cancel(flow: &mut Flow, handoff: u64) -> bool {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_cancel(flow, handoff) }
}

/// Notes a sender's segment at be_out. The segment has the numbers of the socket's own sequence space.
pub fn note_sent(slot: &mut SenderSlot, packet: &Packet) {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_note_sent(slot, packet) }
}

/// Whether a copy at be_in cannot come from the frontend, by its token and sequence number. `token` is half of the
/// flow's token, as found in the copy.
pub fn is_made_up(slot: &SenderSlot, packet: &Packet, token: u16) -> bool {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_is_made_up(slot, packet, token) }
}

/// Whether a copy at be_in acknowledges bytes that have not been sent, or has a very old ACK number.
pub fn acknowledges_unsent(slot: &SenderSlot, packet: &Packet) -> bool {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_acknowledges_unsent(slot, packet) }
}

/// Converts an ACK number to the sequence space of a sender's socket, and notes it in the slot. Also returns whether
/// the client's number was ahead of what the socket has sent.
pub fn take_ack(slot: &mut SenderSlot, ack: u32) -> (u32, bool) {
    let mut ahead = false;
    // SAFETY: all pointers are to whole values that live as long as the call.
    let own = unsafe { native::native_take_ack(slot, ack, &mut ahead) };
    (own, ahead)
}

/// Converts a sequence number that the client sees to the sequence space of the frontend's kernel.
pub fn to_local(spaces: &Spaces, seq: u32) -> u32 {
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_to_local(spaces, seq) }
}

/// Returns where the client sees a segment `[seq, end)` of the frontend's kernel. None if the segment lies on both
/// sides of a payload.
pub fn to_client(spaces: &Spaces, seq: u32, end: u32) -> Option<u32> {
    let mut client = 0;
    // SAFETY: all pointers are to whole values that live as long as the call.
    unsafe { native::native_to_client(spaces, seq, end, &mut client) }.then_some(client)
}
