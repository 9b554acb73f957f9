//! State of a client's connection that another machine needs in order to send on it. The kernel reports it (`struct
//! shunt_flow`). A server passes it on to its agent, and that agent to the backend's. A *payload* is the body that the
//! other machine sends on the connection, and a *region* is the range of sequence numbers that the payload takes. A
//! *peer* is another machine's agent.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::{Address, with_ends};

/// Defines two structs with the same fields: one in the machine's byte order, and one in that of messages between
/// agents.
macro_rules! in_both_orders {
    ($($(#[$doc:meta])* $field:ident: $native:ty, $wire:ty;)*) => {
        /// State of a connection when a region began, or moved to another peer, in this machine's byte order (`struct
        /// shunt_flow`).
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct FlowState {
            $($(#[$doc])* pub $field: $native,)*
        }

        /// [`FlowState`] in messages between agents, little-endian.
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct WireFlowState {
            $($(#[$doc])* pub $field: $wire,)*
        }

        impl From<FlowState> for WireFlowState {
            fn from(flow: FlowState) -> Self {
                Self { $($field: flow.$field.into(),)* }
            }
        }
    };
}

in_both_orders! {
    /// The client's end.
    client_address: Address, Address;
    /// The frontend's end, as the client knows it.
    server_address: Address, Address;
    /// The client's port, in network order.
    client_port: [u8; 2], [u8; 2];
    /// The frontend's port, in network order.
    server_port: [u8; 2], [u8; 2];
    /// Client-visible sequence number of the first payload byte that the backend sends.
    start: u32, U32;
    /// Acknowledgment number that the payload's segments carry.
    rcv_nxt: u32, U32;
    /// Value of the frontend's timestamp clock, not behind what the client has echoed (TSval, RFC 7323).
    tsval: u32, U32;
    /// Newest timestamp of the client, which the payload's segments echo.
    ts_recent: u32, U32;
    /// The client's window in bytes, from `start` on.
    snd_wnd: u32, U32;
    /// Congestion window in segments.
    snd_cwnd: u32, U32;
    /// Slow-start threshold in segments.
    snd_ssthresh: u32, U32;
    /// Smoothed RTT in microseconds; 0: no sample yet.
    srtt_us: u32, U32;
    /// Payload bytes between two ACKs that the frontend passes on to the backend, as now set for this connection; 0: it
    /// passes every ACK on.
    ack_spacing: u32, U32;
    /// Bytes from `start` on that the client may already have from a backend that was lost.
    ahead: u32, U32;
    /// Random token of the connection, by which packets that the frontend steers prove their origin.
    token: u32, U32;
    /// Maximum segment size in bytes, without TCP options.
    mss: u16, U16;
    /// Shift of the client's window field (RFC 7323, 2).
    snd_wscale: u8, u8;
    /// Shift of the frontend's window field (RFC 7323, 2).
    rcv_wscale: u8, u8;
    /// Bits of `SHUNT_OPTION_*`, such as [`FlowState::TIMESTAMPS`].
    options: u8, u8;
    /// 1: this is the first handoff of the connection. A socket that the backend has for this 4-tuple already is
    /// therefore of an older connection.
    first: u8, u8;
    /// Reserved, zero.
    pad: [u8; 2], [u8; 2];
}

with_ends!(FlowState, WireFlowState);

impl FlowState {
    /// Bit of `options`, as are the next four: both ends send timestamps (`SHUNT_OPTION_TIMESTAMPS`).
    pub const TIMESTAMPS: u8 = 1;
    /// Both ends send selective acknowledgments (`SHUNT_OPTION_SACK`).
    pub const SACK: u8 = 2;
    /// Both ends scale their windows (`SHUNT_OPTION_WSCALE`).
    pub const WSCALE: u8 = 4;
    /// The frontend asks for the digest of the payload's file (`SHUNT_OPTION_DIGEST`).
    pub const DIGEST: u8 = 8;
    /// The region completes only after the backend's agent has said (DELIVERED) that the client has all of it
    /// (`SHUNT_OPTION_WORD`).
    pub const WORD: u8 = 16;

    /// Whether a connection can have this state.
    pub(crate) fn is_possible(&self) -> bool {
        WireFlowState::from(*self).is_possible()
    }
}

impl WireFlowState {
    /// Whether a connection can have this state.
    pub(crate) fn is_possible(&self) -> bool {
        self.has_ends() && self.snd_wscale <= 14 && self.rcv_wscale <= 14 && self.mss.get() > 0
    }
}
