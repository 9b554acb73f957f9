//! One connection as its client sees it: what arrived, what the client acknowledged, and what it had to ignore.
//!
//! Sequence numbers are kept as 64-bit offsets from each side's initial one, so they never wrap.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddrV4;
use std::time::Duration;

use crate::segment::{Segment, flag};

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
    pub client: SocketAddrV4,
    pub server: SocketAddrV4,
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

/// Violations that a flow tells one by one; more of them are only counted.
const TOLD: usize = 20;

/// Follows one connection through a capture.
#[derive(Debug)]
pub(crate) struct Flow {
    report: FlowReport,
    /// The initial sequence numbers; of a connection that was there before the capture, the first ones seen.
    client_base: Option<u32>,
    server_base: Option<u32>,
    client_window_scale: u8,
    /// Highest offset that the client acknowledged, and the right edge of its window.
    client_ack: u64,
    window_edge: u64,
    client_end: u64,
    server_ack: u64,
    received: Ranges,
    newest_timestamp: Option<u32>,
    /// The client's TS.Recent (RFC 7323, 4.3).
    ts_recent: Option<u32>,
    newest_client_timestamp: Option<u32>,
    last: Duration,
    untold: u64,
}

impl Flow {
    pub(crate) fn new(client: SocketAddrV4, server: SocketAddrV4, first: Duration) -> Self {
        let report = FlowReport {
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
        };
        Self {
            report,
            client_base: None,
            server_base: None,
            client_window_scale: 0,
            client_ack: 0,
            window_edge: 0,
            client_end: 0,
            server_ack: 0,
            received: Ranges::default(),
            newest_timestamp: None,
            ts_recent: None,
            newest_client_timestamp: None,
            last: first,
            untold: 0,
        }
    }

    /// Whether a client's SYN opens another connection than this one.
    pub(crate) fn is_other(&self, syn: &Segment) -> bool {
        self.client_base.is_some_and(|base| base != syn.sequence)
    }

    pub(crate) fn on_segment(&mut self, segment: &Segment) {
        self.report.longest_silence = self.report.longest_silence.max(segment.time.saturating_sub(self.last));
        self.last = segment.time;
        if segment.has(flag::RST) {
            self.report.resets += 1;
        } else if segment.source == self.report.client {
            self.on_client_segment(segment);
        } else {
            self.on_server_segment(segment);
        }
    }

    fn on_client_segment(&mut self, segment: &Segment) {
        self.report.client_segments += 1;
        let base = *self.client_base.get_or_insert(segment.sequence);
        let start = offset(base, segment.sequence, self.client_end);
        let end = start + u64::from(segment.sequence_length());
        if segment.payload_bytes > 0 {
            if start < self.client_end {
                self.report.client_retransmissions += 1;
            }
            self.report.client_bytes += end.saturating_sub(self.client_end.max(start));
        }
        self.client_end = self.client_end.max(end);
        if let Some((value, _)) = segment.options.timestamps {
            let newest = self.newest_client_timestamp.get_or_insert(value);
            if after(value, *newest) {
                *newest = value;
            }
        }
        if segment.has(flag::SYN) {
            self.client_window_scale = segment.options.window_scale.unwrap_or(0);
        }
        if segment.has(flag::ACK) {
            self.on_client_ack(segment);
        }
    }

    fn on_client_ack(&mut self, segment: &Segment) {
        let base = *self.server_base.get_or_insert_with(|| {
            // The capture began within the connection: what was acknowledged by now is taken for received.
            self.received.add(0, 1);
            segment.acknowledgment.wrapping_sub(1)
        });
        let ack = offset(base, segment.acknowledgment, self.client_ack);
        if ack > self.client_ack {
            for (from, to) in self.received.holes_below(ack) {
                self.violation(segment, format!("the client acknowledged bytes {from} to {to}, which never came"));
                self.received.add(from, to);
            }
            self.client_ack = ack;
        }
        self.window_edge = self.window_edge.max(ack + (u64::from(segment.window) << self.client_window_scale));
        if segment.window == 0 {
            self.report.zero_windows += 1;
        }
        if let Some((left, _)) = segment.options.sack.first() {
            self.report.sacks += 1;
            let left = offset(base, *left, self.client_ack);
            self.report.duplicate_sacks += u64::from(left < ack);
        }
    }

    fn on_server_segment(&mut self, segment: &Segment) {
        self.report.server_segments += 1;
        let base = *self.server_base.get_or_insert_with(|| {
            if !segment.has(flag::SYN) {
                self.received.add(0, 1);
                return segment.sequence.wrapping_sub(1);
            }
            segment.sequence
        });
        if segment.has(flag::SYN) && self.window_edge == 0 {
            self.window_edge = u64::from(u16::MAX);
        }
        let start = offset(base, segment.sequence, self.client_ack);
        let end = start + u64::from(segment.sequence_length());
        if let Some(why) = self.why_ignored(segment, start, end) {
            *self.report.ignored.entry(why).or_default() += 1;
            if why != Ignored::OldDuplicate {
                self.violation(segment, format!("the server sent a segment {why} ({start} to {end})"));
            }
        }
        self.check_timestamps(segment, start);
        self.on_server_ack(segment);
        if end > start {
            let new = self.received.add(start, end);
            self.report.retransmissions += u64::from(new < end - start);
            self.report.out_of_order += u64::from(new == end - start && self.received.last_end() > end);
            let flags = u64::from(segment.has(flag::SYN)) + u64::from(segment.has(flag::FIN));
            self.report.server_bytes += new.saturating_sub(flags);
        }
    }

    fn why_ignored(&self, segment: &Segment, start: u64, end: u64) -> Option<Ignored> {
        if let (Some((value, _)), Some(recent)) = (segment.options.timestamps, self.ts_recent)
            && after(recent, value)
        {
            return Some(Ignored::OldTimestamp);
        }
        if end > start && end <= self.client_ack {
            return Some(Ignored::OldDuplicate);
        }
        // One below is how keepalives and window probes look; they are answered.
        if end == start && start + 1 < self.client_ack {
            return Some(Ignored::StaleSequence);
        }
        if end > self.window_edge && self.window_edge > 0 {
            return Some(Ignored::BeyondWindow);
        }
        let ack_end = self.client_base.map(|base| offset(base, segment.acknowledgment, self.client_end));
        if segment.has(flag::ACK) && ack_end.is_some_and(|ack| ack > self.client_end) {
            return Some(Ignored::AckOfUnsent);
        }
        None
    }

    /// Timestamps go on in the order of the bytes: the network may bring an earlier segment later, and between cores a
    /// veth pair does.
    fn check_timestamps(&mut self, segment: &Segment, start: u64) {
        let Some((value, echo)) = segment.options.timestamps else {
            if self.newest_timestamp.is_some() {
                self.violation(segment, "the server sent a segment without the timestamps that were agreed".into());
            }
            return;
        };
        match self.newest_timestamp {
            Some(newest) if after(newest, value) && start < self.received.last_end() => {}
            Some(newest) if after(newest, value) => {
                self.violation(segment, format!("the server's TSval went back from {newest} to {value}"));
            }
            _ => self.newest_timestamp = Some(value),
        }
        // RFC 7323, 5.3, R3: only what begins at or before the last ACK counts as the peer's newest.
        if start <= self.client_ack && self.ts_recent.is_none_or(|recent| after(value, recent)) {
            self.ts_recent = Some(value);
        }
        if let Some(newest) = self.newest_client_timestamp
            && segment.has(flag::ACK)
            && after(echo, newest)
        {
            self.violation(segment, format!("the server echoed TSval {echo}; the client's newest is {newest}"));
        }
    }

    fn on_server_ack(&mut self, segment: &Segment) {
        let Some(base) = self.client_base.filter(|_| segment.has(flag::ACK)) else { return };
        let ack = offset(base, segment.acknowledgment, self.server_ack);
        self.report.acks_gone_back += u64::from(ack < self.server_ack);
        self.server_ack = self.server_ack.max(ack);
    }

    fn violation(&mut self, segment: &Segment, what: String) {
        if self.report.violations.len() < TOLD {
            let seconds = segment.time.as_secs_f64();
            self.report.violations.push(format!("{} at {seconds:.6}: {what}", self.report.client));
        } else {
            self.untold += 1;
        }
    }

    pub(crate) fn finish(mut self) -> FlowReport {
        if self.report.resets == 0 {
            for (from, to) in self.received.holes_below(self.received.last_end()) {
                let client = self.report.client;
                self.report.violations.push(format!("{client}: bytes {from} to {to} of the server's never came"));
            }
        }
        if self.untold > 0 {
            self.report.violations.push(format!("{}: {} more violations", self.report.client, self.untold));
        }
        self.report
    }
}

/// How far `number` is from `base`, given that it is within 2 GiB of offset `near`. Below the base counts as 0.
fn offset(base: u32, number: u32, near: u64) -> u64 {
    // Truncation is the point: sequence numbers are modulo 2^32.
    let from_near = number.wrapping_sub(base.wrapping_add(near as u32)) as i32;
    near.saturating_add_signed(i64::from(from_near))
}

/// Whether `a` is later than `b`, modulo 2^32.
fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Disjoint ranges of offsets, neighbours joined.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range and returns how much of it is new.
    fn add(&mut self, start: u64, end: u64) -> u64 {
        let (mut from, mut to, mut known) = (start, end, 0);
        let touching: Vec<(u64, u64)> = self
            .0
            .range(..=end)
            .rev()
            .take_while(|(_, known_end)| **known_end >= start)
            .map(|(a, b)| (*a, *b))
            .collect();
        for (a, b) in touching {
            known += b.min(end).saturating_sub(a.max(start));
            (from, to) = (from.min(a), to.max(b));
            self.0.remove(&a);
        }
        self.0.insert(from, to);
        end - start - known
    }

    fn holes_below(&self, limit: u64) -> Vec<(u64, u64)> {
        let (mut holes, mut at) = (Vec::new(), 0);
        for (start, end) in &self.0 {
            if *start >= limit {
                break;
            }
            if *start > at {
                holes.push((at, *start));
            }
            at = *end;
        }
        if at < limit {
            holes.push((at, limit));
        }
        holes
    }

    fn last_end(&self) -> u64 {
        self.0.last_key_value().map_or(0, |(_, end)| *end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_tell_what_is_new() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.add(10, 20), 10);
        assert_eq!(ranges.add(30, 40), 10);
        assert_eq!(ranges.holes_below(40), [(0, 10), (20, 30)]);
        assert_eq!(ranges.add(15, 35), 10);
        assert_eq!(ranges.add(15, 35), 0);
        assert_eq!(ranges.add(0, 10), 10);
        assert_eq!(ranges.0.len(), 1);
        assert_eq!(ranges.holes_below(50), [(40, 50)]);
    }

    #[test]
    fn offsets_pass_the_wrap() {
        let base = u32::MAX - 9;
        assert_eq!(offset(base, 5, 10), 15);
        assert_eq!(offset(base, base, 15), 0);
        assert_eq!(offset(base, base.wrapping_add(7), (1 << 32) + 3), (1 << 32) + 7);
    }
}
