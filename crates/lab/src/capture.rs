//! Judges from a capture at a client whether the client's TCP connections stayed intact.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::flow::{Flow, FlowReport, Ignored};
use crate::pcap::Pcap;
use crate::segment::{Segment, flag};

/// The TCP segments of a capture, in the order in which they were captured.
#[derive(Debug)]
pub struct Capture(Vec<Segment>);

/// Expectations of a capture, beyond the rules of TCP.
#[derive(Debug, Clone)]
pub struct Expect {
    client: IpAddr,
    connections: Option<usize>,
    resets: bool,
    duplicates: Option<u64>,
}

impl Expect {
    /// Expects any number of connections of `client`, without resets.
    #[must_use]
    pub fn of(client: impl Into<IpAddr>) -> Self {
        Self { client: client.into(), connections: None, resets: false, duplicates: None }
    }

    /// Expects this many connections, no more and no fewer.
    #[must_use]
    pub fn connections(mut self, count: usize) -> Self {
        self.connections = Some(count);
        self
    }

    /// Allows resets.
    #[must_use]
    pub fn resets(mut self) -> Self {
        self.resets = true;
        self
    }

    /// Allows at most this many segments, over all connections, whose data the client had acknowledged before. By
    /// default any number is allowed, because TCP sometimes retransmits needlessly.
    #[must_use]
    pub fn duplicates(mut self, limit: u64) -> Self {
        self.duplicates = Some(limit);
        self
    }
}

/// Result of the check of a capture.
#[derive(Debug)]
pub struct Verdict {
    pub flows: Vec<FlowReport>,
    /// Everything that is wrong, in words; empty for a good capture.
    pub violations: Vec<String>,
}

impl Verdict {
    /// Fails if there are violations. The error lists them all.
    ///
    /// # Errors
    /// When there are violations.
    pub fn check(&self) -> Result<()> {
        let (count, list) = (self.violations.len(), self.violations.join("\n  "));
        ensure!(count == 0, "{count} violations in the capture:\n  {list}");
        Ok(())
    }

    /// The sum of a counter over all connections.
    #[must_use]
    pub fn sum(&self, counter: impl Fn(&FlowReport) -> u64) -> u64 {
        self.flows.iter().map(counter).sum()
    }
}

impl Capture {
    /// Reads a pcap file of Ethernet frames.
    ///
    /// # Errors
    /// When it cannot be read, or is no pcap file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let open = || Self::read_from(BufReader::new(File::open(path)?));
        open().with_context(|| format!("reading capture {}", path.display()))
    }

    /// Reads a pcap stream of Ethernet frames.
    ///
    /// # Errors
    /// When it cannot be read, or is no pcap stream.
    pub fn read_from(stream: impl Read) -> Result<Self> {
        let (mut pcap, mut segments) = (Pcap::open(stream)?, Vec::new());
        while let Some(packet) = pcap.next()? {
            segments.extend(Segment::parse(packet.time, &packet.kept, packet.original_bytes));
        }
        Ok(Self(segments))
    }

    /// Number of TCP segments in the capture.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.0.len()
    }

    /// Follows each connection of the expected client, and lists what is wrong with it.
    #[must_use]
    pub fn check(&self, expect: &Expect) -> Verdict {
        let mut flows: Vec<Flow> = Vec::new();
        let mut current: HashMap<(SocketAddr, SocketAddr), usize> = HashMap::new();
        for segment in &self.0 {
            let from_client = segment.source.ip() == expect.client;
            if !from_client && segment.destination.ip() != expect.client {
                continue;
            }
            let ends @ (client, server) =
                if from_client { (segment.source, segment.destination) } else { (segment.destination, segment.source) };
            let opens = from_client && segment.has(flag::SYN);
            let known = current.get(&ends).copied().filter(|flow| !(opens && flows[*flow].is_other(segment)));
            let flow = known.unwrap_or_else(|| {
                flows.push(Flow::new(client, server, segment.time));
                current.insert(ends, flows.len() - 1);
                flows.len() - 1
            });
            flows[flow].on_segment(segment);
        }
        expect.judge(flows.into_iter().map(Flow::finish).collect())
    }
}

impl Expect {
    fn judge(&self, flows: Vec<FlowReport>) -> Verdict {
        let mut violations: Vec<String> = flows.iter().flat_map(|flow| flow.violations.iter().cloned()).collect();
        if let Some(expected) = self.connections
            && flows.len() != expected
        {
            violations.push(format!("{} connections instead of {expected}", flows.len()));
        }
        for flow in flows.iter().filter(|flow| !self.resets && flow.resets > 0) {
            violations.push(format!("{}: {} resets", flow.client, flow.resets));
        }
        let old = |flow: &FlowReport| flow.ignored.get(&Ignored::OldDuplicate).copied().unwrap_or(0);
        let duplicates: u64 = flows.iter().map(old).sum();
        if self.duplicates.is_some_and(|limit| duplicates > limit) {
            violations.push(format!("{duplicates} segments of data that the client had acknowledged before"));
        }
        Verdict { flows, violations }
    }
}

#[cfg(test)]
#[path = "capture_tests.rs"]
mod tests;
