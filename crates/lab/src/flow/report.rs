//! Report about one connection in a capture.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// Reason for which a client ignores a segment of the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ignored {
    /// The client had acknowledged all data of the segment before the segment arrived: a needless retransmission.
    OldDuplicate,
    /// The segment has no data, and its sequence number is more than 1 below the client's highest acknowledgment
    /// number (RFC 9293, 3.10.7.4). So the client does not use the segment's acknowledgment number.
    StaleSequence,
    /// The segment ends beyond every window that the client advertised.
    BeyondWindow,
    /// The segment acknowledges data that the client never sent.
    AckOfUnsent,
    /// The segment's TSval is older than that of an earlier segment (PAWS; RFC 7323, 5).
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

/// Report of what a capture shows about one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowReport {
    pub client: SocketAddr,
    pub server: SocketAddr,
    /// Number of segments from the server. If offloads join packets, a segment is more than one packet.
    pub server_segments: u64,
    pub client_segments: u64,
    /// Bytes of the server's data that arrived, each counted once.
    pub server_bytes: u64,
    pub client_bytes: u64,
    /// Number of the server's segments with data that had arrived before.
    pub retransmissions: u64,
    /// Number of the server's segments whose bytes were all new, although later bytes had already arrived.
    pub out_of_order: u64,
    pub client_retransmissions: u64,
    /// Number of the client's segments with SACK blocks.
    pub sacks: u64,
    /// Number of the client's segments whose first SACK block begins below the acknowledgment number, and so reports a
    /// duplicate (RFC 2883).
    pub duplicate_sacks: u64,
    /// Number of times that the server's acknowledgment number went back. This is harmless, but may show that a second
    /// machine sends for the server.
    pub acks_gone_back: u64,
    pub zero_windows: u64,
    pub resets: u64,
    pub ignored: BTreeMap<Ignored, u64>,
    /// Longest time between two successive segments.
    pub longest_silence: Duration,
    /// Everything that no connection may show, in words. Resets and duplicates are not listed here: the caller decides
    /// whether they are allowed.
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
