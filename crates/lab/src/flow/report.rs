//! What is told of a connection.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// Why a client ignores a segment of the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ignored {
    /// All its data was acknowledged before it came: a needless retransmission.
    OldDuplicate,
    /// Without data, with a sequence number below what the client acknowledged (RFC 9293 3.10.7.4): its
    /// acknowledgment is lost.
    StaleSequence,
    /// It ends beyond every window that the client advertised.
    BeyondWindow,
    /// It acknowledges what the client never sent.
    AckOfUnsent,
    /// Its TSval is older than one before (PAWS, RFC 7323 5).
    OldTimestamp,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OldDuplicate => "of data long acknowledged",
            Self::StaleSequence => "without data and with a stale sequence number",
            Self::BeyondWindow => "beyond the advertised window",
            Self::AckOfUnsent => "that acknowledges data never sent",
            Self::OldTimestamp => "with an older timestamp",
        })
    }
}

/// What a capture shows of one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowReport {
    pub client: SocketAddr,
    pub server: SocketAddr,
    /// Segments from the server, of more than one packet where offloads join them.
    pub server_segments: u64,
    pub client_segments: u64,
    /// Server's data that arrived, each byte once.
    pub server_bytes: u64,
    pub client_bytes: u64,
    /// Server's segments with data that had arrived before.
    pub retransmissions: u64,
    /// Server's segments that filled a hole for the first time.
    pub out_of_order: u64,
    pub client_retransmissions: u64,
    /// Client's segments with SACK blocks, and those of them whose first block tells of a duplicate (RFC 2883).
    pub sacks: u64,
    pub duplicate_sacks: u64,
    /// The server's acknowledgment went back. Harmless, but another sender would explain it.
    pub acks_gone_back: u64,
    pub zero_windows: u64,
    pub resets: u64,
    pub ignored: BTreeMap<Ignored, u64>,
    /// The longest time between two segments.
    pub longest_silence: Duration,
    /// What must not happen on any connection, in words. Resets and duplicates are for the reader to judge.
    pub violations: Vec<String>,
}

impl FlowReport {
    pub(super) fn empty(client: SocketAddr, server: SocketAddr) -> Self {
        Self {
            client,
            server,
            server_segments: 0,
            client_segments: 0,
            server_bytes: 0,
            client_bytes: 0,
            retransmissions: 0,
            out_of_order: 0,
            client_retransmissions: 0,
            sacks: 0,
            duplicate_sacks: 0,
            acks_gone_back: 0,
            zero_windows: 0,
            resets: 0,
            ignored: BTreeMap::new(),
            longest_silence: Duration::ZERO,
            violations: Vec::new(),
        }
    }
}
