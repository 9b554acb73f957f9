//! The decisions of the steering programs, as functions: which packet goes where, what is believed of it, and what
//! becomes of a flow. The C is that of crates/handoff/bpf/decisions, which says what each is for; compiled for this
//! machine, so that it can be tried without a kernel, a million times a second. What the programs themselves add, the
//! reading and rewriting of packets and the maps, is not here.
//!
//! Sequence numbers and counts are in the machine's order; times are nanoseconds of any clock that does not go back.
//! Nothing here allocates or panics.

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

/// A server's socket, when it asks for a region.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// As bpf_tcp_sock() tells it.
    pub socket: &'a Socket,
    /// As the kernel's own structures tell it.
    pub connection: &'a Connection,
    /// Its flow is new, and its handshake is proof ([`is_handshake_of`]).
    pub seen_to_begin: bool,
}

impl Asked<'_> {
    fn native(&self) -> native::asked {
        native::asked {
            key: FlowKey::default(),
            ring: ptr::null_mut(),
            // Only read: the C names no pointer of the kernel's `const`.
            tcp: ptr::from_ref(self.socket).cast_mut(),
            connection: *self.connection,
            seen_to_begin: self.seen_to_begin,
        }
    }
}

/// Who gets a client's packet at fe_in. Notes in the flow what it says.
pub fn route(flow: &mut Flow, packet: &Packet, sack: &Sack, now: u64) -> Route {
    let mut route = Route { copy: NO_BREAK, ..Route::default() };
    // SAFETY: all are whole values that live as long as the call.
    unsafe { native::native_route(flow, packet, sack, now, &mut route) };
    route
}

/// The numbers of a copy for the backend of break `index` ([`Route::copy`]). Notes the copy in the flow.
pub fn copy(flow: &mut Flow, packet: &Packet, index: u32) -> Copied {
    let mut copied = Copied::default();
    // SAFETY: as in route(); any index is one of the flow's breaks, modulo their number.
    unsafe { native::native_copy(flow, packet, index, &mut copied) };
    copied
}

/// What of a client's blocks lies in a region, whose copy acknowledges `ack`.
pub fn blocks_of_region(region: &Region, ack: u32, mut sack: Sack) -> Sack {
    // SAFETY: as in route().
    unsafe { native::native_blocks_of_region(region, ack, &mut sack) };
    sack
}

/// A client's blocks, for the frontend's kernel.
pub fn blocks_to_local(spaces: &Spaces, mut sack: Sack) -> Sack {
    // SAFETY: as in route().
    unsafe { native::native_blocks_to_local(spaces, &mut sack) };
    sack
}

/// Whose byte a router's report cites.
pub fn cites(flow: &Flow, seq: u32) -> Cites {
    // SAFETY: as in route().
    unsafe { native::native_cites(flow, seq) }
}

/// What becomes of a segment of the frontend's kernel at fe_out. Notes in the flow what it says.
pub fn depart(flow: &mut Flow, packet: &Packet, now: u64) -> Departure {
    let mut departure = Departure { fate: Fate::TRANSLATED, ..Departure::default() };
    // SAFETY: as in route().
    unsafe { native::native_depart(flow, packet, now, &mut departure) };
    departure
}

/// Whether a handshake that was seen is this socket's.
pub fn is_handshake_of(seen: &Handshake, socket: &Socket, now: u64) -> bool {
    // SAFETY: as in route().
    unsafe { native::native_is_handshake_of(seen, socket, now) }
}

/// The flow of a connection that has had no region yet. `token`: random.
pub fn new_flow(asked: &Asked<'_>, token: u32) -> Flow {
    let mut flow = Flow::default();
    // SAFETY: as in route(); the socket outlives the call.
    unsafe { native::native_new_flow(&asked.native(), token, &mut flow) };
    flow
}

/// SHUNT_BEGIN: FE_BEGUN, or why not.
pub fn begin(flow: &mut Flow, begin: &Begin, asked: &Asked<'_>) -> Counter {
    // SAFETY: as in new_flow().
    unsafe { native::native_begin(flow, begin, &asked.native()) }
}

/// SHUNT_APPEND: FE_BEGUN or FE_APPENDED, or why not.
pub fn append(flow: &mut Flow, begin: &Begin, asked: &Asked<'_>) -> Counter {
    // SAFETY: as in new_flow().
    unsafe { native::native_append(flow, begin, &asked.native()) }
}

/// SHUNT_UNDO: FE_UNDONE, or why not.
pub fn undo(flow: &mut Flow, handoff: u64, connection: &Connection) -> Counter {
    // SAFETY: as in route().
    unsafe { native::native_undo(flow, handoff, connection) }
}

/// SHUNT_MOVE: FE_MOVED, or why not.
pub fn move_on(flow: &mut Flow, to: &Move, asked: &Asked<'_>) -> Counter {
    // SAFETY: as in new_flow().
    unsafe { native::native_move(flow, to, &asked.native()) }
}

/// SHUNT_TAKE: FE_TAKEN, or why not. `when`: SHUNT_TAKE_*.
pub fn take(flow: &mut Flow, handoff: u64, when: u32) -> Counter {
    // SAFETY: as in route().
    unsafe { native::native_take(flow, handoff, when) }
}

/// What SHUNT_STATE tells, the addresses and the kind of record excepted.
pub fn describe(flow: &Flow) -> State {
    let mut state = State::default();
    // SAFETY: as in route().
    unsafe { native::native_describe(flow, &mut state) };
    state
}

/// A backend's word on how far apart its ACKs may be: false where it does not send the newest region.
pub fn space_acks(flow: &mut Flow, peer: u32, bytes: u32) -> bool {
    // SAFETY: as in route().
    unsafe { native::native_space_acks(flow, peer, bytes) }
}

/// A backend's word that its socket has heard the ACK of a payload's end: the event that follows; None where it has no
/// say in the newest region.
pub fn deliver(flow: &mut Flow, peer: u32, handoff: u64) -> Option<Route> {
    let mut route = Route { copy: NO_BREAK, ..Route::default() };
    // SAFETY: as in route().
    unsafe { native::native_deliver(flow, peer, handoff, &mut route) }.then_some(route)
}

/// Nobody sends it any more: false where it is not active.
pub fn cancel(flow: &mut Flow, handoff: u64) -> bool {
    // SAFETY: as in route().
    unsafe { native::native_cancel(flow, handoff) }
}

/// A sender's segment at be_out, in its own sequence space.
pub fn note_sent(slot: &mut SenderSlot, packet: &Packet) {
    // SAFETY: as in route().
    unsafe { native::native_note_sent(slot, packet) }
}

/// Whether a copy at be_in is none of the frontend's. `token`: half of the flow's, as the copy has it.
pub fn is_made_up(slot: &SenderSlot, packet: &Packet, token: u16) -> bool {
    // SAFETY: as in route().
    unsafe { native::native_is_made_up(slot, packet, token) }
}

/// Whether a copy at be_in acknowledges what has not been sent, or is very old.
pub fn acknowledges_unsent(slot: &SenderSlot, packet: &Packet) -> bool {
    // SAFETY: as in route().
    unsafe { native::native_acknowledges_unsent(slot, packet) }
}

/// An ACK number for a sender's socket, in its own sequence space, and whether the client's was ahead of what that has
/// sent. Notes it in the slot.
pub fn take_ack(slot: &mut SenderSlot, ack: u32) -> (u32, bool) {
    let mut ahead = false;
    // SAFETY: as in route().
    let own = unsafe { native::native_take_ack(slot, ack, &mut ahead) };
    (own, ahead)
}

/// A number of the client's, for the frontend's kernel.
pub fn to_local(spaces: &Spaces, seq: u32) -> u32 {
    // SAFETY: as in route().
    unsafe { native::native_to_local(spaces, seq) }
}

/// Where the client has a segment `[seq, end)` of the frontend's kernel; None where it lies on both sides of a payload.
pub fn to_client(spaces: &Spaces, seq: u32, end: u32) -> Option<u32> {
    let mut client = 0;
    // SAFETY: as in route().
    unsafe { native::native_to_client(spaces, seq, end, &mut client) }.then_some(client)
}
