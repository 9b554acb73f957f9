//! A client's connection, as whoever sends on it for another has to know it. The kernel says it (`struct shunt_flow`), a
//! server passes it on to its agent, and that to the backend's.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::{Address, with_ends};

/// The same fields in the machine's order and in the order of the wire.
macro_rules! in_both_orders {
    ($($(#[$doc:meta])* $field:ident: $native:ty, $wire:ty;)*) => {
        /// As it was when a region began, or moved, on this machine (`struct shunt_flow`).
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct FlowState {
            $($(#[$doc])* pub $field: $native,)*
        }

        /// The same between agents, little-endian.
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
    /// Network order.
    client_port: [u8; 2], [u8; 2];
    /// Network order.
    server_port: [u8; 2], [u8; 2];
    /// Client-visible sequence number of the first byte that its peer sends.
    start: u32, U32;
    /// What the payload's segments acknowledge.
    rcv_nxt: u32, U32;
    /// The frontend's timestamp clock, not behind what the client has echoed.
    tsval: u32, U32;
    /// The client's newest timestamp.
    ts_recent: u32, U32;
    /// Bytes that the client takes from `start` on.
    snd_wnd: u32, U32;
    /// Segments.
    snd_cwnd: u32, U32;
    /// Segments.
    snd_ssthresh: u32, U32;
    /// Microseconds, 0: no sample.
    srtt_us: u32, U32;
    /// Payload bytes between the ACKs that go to the backend, 0: each goes. What holds for this flow now.
    ack_spacing: u32, U32;
    /// Bytes from `start` on that the client may have already, from a backend that is lost.
    ahead: u32, U32;
    /// Of the connection: packets that the frontend steers prove by it where they come from.
    token: u32, U32;
    /// Maximum segment size without options, bytes.
    mss: u16, U16;
    /// Shift of the client's window field.
    snd_wscale: u8, u8;
    /// Shift of ours.
    rcv_wscale: u8, u8;
    /// Bits of `SHUNT_OPTION_*`.
    options: u8, u8;
    /// 1: the first handoff of this connection. Any older socket for it is stale.
    first: u8, u8;
    /// Zero.
    pad: [u8; 2], [u8; 2];
}

with_ends!(FlowState, WireFlowState);

impl FlowState {
    /// `SHUNT_OPTION_TIMESTAMPS`.
    pub const TIMESTAMPS: u8 = 1;
    /// `SHUNT_OPTION_SACK`.
    pub const SACK: u8 = 2;
    /// `SHUNT_OPTION_WSCALE`.
    pub const WSCALE: u8 = 4;
    /// `SHUNT_OPTION_DIGEST`.
    pub const DIGEST: u8 = 8;
    /// `SHUNT_OPTION_WORD`.
    pub const WORD: u8 = 16;

    /// Whether there can be such a connection.
    pub(crate) fn is_possible(&self) -> bool {
        WireFlowState::from(*self).is_possible()
    }
}

impl WireFlowState {
    /// Whether there can be such a connection.
    pub(crate) fn is_possible(&self) -> bool {
        self.has_ends() && self.snd_wscale <= 14 && self.rcv_wscale <= 14 && self.mss.get() > 0
    }
}
