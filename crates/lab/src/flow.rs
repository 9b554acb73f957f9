//! One connection (here called a *flow*) as its client sees it: bytes that arrived, bytes that the client acknowledged,
//! and segments that the client must have ignored.
//!
//! Sequence numbers are kept as 64-bit offsets from each side's initial sequence number, so they never wrap.

mod ranges;
mod report;

use std::net::SocketAddr;
use std::time::Duration;

use crate::segment::{Segment, flag};

use ranges::Ranges;
pub use report::{FlowReport, Ignored};

/// Largest number of violations by segments that a flow describes in words. Further ones are only counted.
const TOLD: usize = 20;

/// Follows one connection through a capture.
#[derive(Debug)]
pub(crate) struct Flow {
    report: FlowReport,
    /// Initial sequence number of the client. If the connection is older than the capture, the first segment decides
    /// what counts as the initial number.
    client_base: Option<u32>,
    /// Initial sequence number of the server, found in the same way.
    server_base: Option<u32>,
    client_window_scale: u8,
    /// Highest offset of the server's bytes that the client acknowledged.
    client_ack: u64,
    /// Right edge of the client's window: an offset of the server's bytes.
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
    pub(crate) fn new(client: SocketAddr, server: SocketAddr, first: Duration) -> Self {
        Self {
            report: FlowReport::empty(client, server),
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

    /// Whether a client's SYN opens a connection other than this one.
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
            // The connection is older than the capture. Bytes that the client acknowledged before count as received.
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
        // Keepalives and window probes have a sequence number one below the next expected one. Clients answer them.
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

    /// Checks that timestamps are not missing, that they grow in the order of the bytes, and that they echo only what
    /// the client has sent. A segment with earlier bytes may arrive later with an older timestamp: networks reorder
    /// packets, and so does a veth pair between cores.
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
        // RFC 7323, 5.3, R3: only a segment that begins at or before the last ACK updates the client's TS.Recent.
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

/// Offset of the sequence number `number` from `base`. The offset must be within 2 GiB of the offset `near`. A number
/// below the base gives 0.
fn offset(base: u32, number: u32, near: u64) -> u64 {
    // Truncation is intended: sequence numbers are modulo 2^32.
    let from_near = number.wrapping_sub(base.wrapping_add(near as u32)) as i32;
    near.saturating_add_signed(i64::from(from_near))
}

/// Whether `a` is later than `b`, modulo 2^32.
fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_pass_the_wrap() {
        let base = u32::MAX - 9;
        assert_eq!(offset(base, 5, 10), 15);
        assert_eq!(offset(base, base, 15), 0);
        assert_eq!(offset(base, base.wrapping_add(7), (1 << 32) + 3), (1 << 32) + 7);
    }
}
