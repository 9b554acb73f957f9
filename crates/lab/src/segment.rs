//! TCP segments in a capture: Ethernet, IP, TCP with its options, possibly cut short. The lab has its own parser,
//! because the check of Shunt's packets must not share Shunt's code.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Flags in byte 13 of the TCP header, counted from 0 (RFC 9293, 3.1).
pub(crate) mod flag {
    pub(crate) const FIN: u8 = 0x01;
    pub(crate) const SYN: u8 = 0x02;
    pub(crate) const RST: u8 = 0x04;
    pub(crate) const ACK: u8 = 0x10;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Time of the capture, since the epoch.
    pub(crate) time: Duration,
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) sequence: u32,
    pub(crate) acknowledgment: u32,
    pub(crate) flags: u8,
    /// Window field, unscaled.
    pub(crate) window: u16,
    pub(crate) payload_bytes: u32,
    pub(crate) options: Options,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) window_scale: Option<u8>,
    /// TSval and TSecr (RFC 7323 3.2).
    pub(crate) timestamps: Option<(u32, u32)>,
    pub(crate) sack: Vec<(u32, u32)>,
}

impl Segment {
    /// Parses an Ethernet frame, possibly with a VLAN tag. `frame` has the first bytes of the frame, and `frame_bytes`
    /// is the length of the whole frame. Returns `None` if the frame does not hold the beginning of a TCP segment over
    /// IPv4 or IPv6, or if lengths in the headers are wrong. Also returns `None` if `frame` does not have the first 16
    /// bytes of the TCP header.
    pub(crate) fn parse(time: Duration, frame: &[u8], frame_bytes: usize) -> Option<Self> {
        let tag = if be16(frame, 12)? == ETHERTYPE_VLAN { 4 } else { 0 };
        let (packet, packet_bytes) = (frame.get(14 + tag..)?, frame_bytes.checked_sub(14 + tag)?);
        let ip = match be16(frame, 12 + tag)? {
            ETHERTYPE_IPV4 => IpHeader::ipv4(packet, packet_bytes)?,
            ETHERTYPE_IPV6 => IpHeader::ipv6(packet, packet_bytes)?,
            _ => return None,
        };
        let tcp = packet.get(ip.bytes..)?;
        let tcp_header = usize::from(*tcp.get(12)? >> 4) * 4;
        let payload_bytes = u32::try_from(ip.segment_bytes.checked_sub(tcp_header)?).ok()?;
        Some(Self {
            time,
            source: SocketAddr::new(ip.source, be16(tcp, 0)?),
            destination: SocketAddr::new(ip.destination, be16(tcp, 2)?),
            sequence: be32(tcp, 4)?,
            acknowledgment: be32(tcp, 8)?,
            flags: *tcp.get(13)?,
            window: be16(tcp, 14)?,
            payload_bytes,
            options: Options::parse(tcp.get(20..tcp_header.min(tcp.len())).unwrap_or_default()),
        })
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Number of sequence numbers that the segment takes: payload, SYN and FIN.
    pub(crate) fn sequence_length(&self) -> u32 {
        self.payload_bytes + u32::from(self.has(flag::SYN)) + u32::from(self.has(flag::FIN))
    }
}

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const TCP: u8 = 6;

/// Fields of an IP header in front of TCP.
struct IpHeader {
    bytes: usize,
    /// Length of the TCP segment behind the header, in bytes.
    segment_bytes: usize,
    source: IpAddr,
    destination: IpAddr,
}

impl IpHeader {
    fn ipv4(packet: &[u8], packet_bytes: usize) -> Option<Self> {
        let first = *packet.first()?;
        let bytes = usize::from(first & 0xf) * 4;
        let fragment_offset = be16(packet, 6)? & 0x1fff;
        if first >> 4 != 4 || bytes < 20 || *packet.get(9)? != TCP || fragment_offset != 0 {
            return None;
        }
        let total = match usize::from(be16(packet, 2)?) {
            // A packet of more than 64 KiB has length 0 in its header, because its length does not fit the field.
            0 => packet_bytes,
            total => total,
        };
        let address = |at| be32(packet, at).map(|bits| IpAddr::from(Ipv4Addr::from(bits)));
        let segment_bytes = total.checked_sub(bytes)?;
        Some(Self { bytes, segment_bytes, source: address(12)?, destination: address(16)? })
    }

    /// Parses a header without extension headers, because the lab's hosts send none.
    fn ipv6(packet: &[u8], packet_bytes: usize) -> Option<Self> {
        const BYTES: usize = 40;
        if *packet.first()? >> 4 != 6 || *packet.get(6)? != TCP {
            return None;
        }
        let segment_bytes = match usize::from(be16(packet, 4)?) {
            0 => packet_bytes.checked_sub(BYTES)?,
            bytes => bytes,
        };
        let address = |at: usize| {
            let octets: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
            Some(IpAddr::from(octets))
        };
        Some(Self { bytes: BYTES, segment_bytes, source: address(8)?, destination: address(24)? })
    }
}

impl Options {
    fn parse(mut bytes: &[u8]) -> Self {
        let mut options = Self::default();
        while let [kind, rest @ ..] = bytes {
            match (kind, rest) {
                (0, _) => break,
                (1, _) => bytes = rest,
                (_, [length, ..]) => {
                    let Some(option) = bytes.get(2..usize::from(*length)) else { break };
                    bytes = &bytes[usize::from(*length)..];
                    options.set(*kind, option);
                }
                _ => break,
            }
        }
        options
    }

    fn set(&mut self, kind: u8, option: &[u8]) {
        match (kind, option.len()) {
            (3, 1) => self.window_scale = Some(option[0].min(14)),
            (5, _) => {
                let blocks = option.chunks_exact(8);
                self.sack = blocks.filter_map(|block| Some((be32(block, 0)?, be32(block, 4)?))).collect();
            }
            (8, 8) => self.timestamps = be32(option, 0).zip(be32(option, 4)),
            _ => {}
        }
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes)
}

/// Builds frames for tests.
#[cfg(test)]
pub(crate) mod build {
    use std::net::IpAddr;

    use super::{Options, Segment};

    /// Number of bytes that are kept from the beginning of a frame, at most, as in a capture.
    const KEPT: usize = 128;

    /// Beginning of an Ethernet frame with the segment's headers and a payload of zeros, and the length of the whole
    /// frame.
    pub(crate) fn frame(segment: &Segment) -> (Vec<u8>, usize) {
        let options = options(&segment.options);
        let segment_bytes = 20 + options.len() + segment.payload_bytes as usize;
        let mut frame = vec![0; 12];
        let headers = frame.len() + ip_header(&mut frame, segment, segment_bytes);
        frame.extend(segment.source.port().to_be_bytes());
        frame.extend(segment.destination.port().to_be_bytes());
        frame.extend(segment.sequence.to_be_bytes());
        frame.extend(segment.acknowledgment.to_be_bytes());
        frame.extend([u8::try_from(((20 + options.len()) / 4) << 4).unwrap(), segment.flags]);
        frame.extend(segment.window.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(options);
        let length = headers + segment_bytes;
        frame.resize(length.min(KEPT), 0);
        (frame, length)
    }

    /// Appends the Ethernet type and the IP header; returns their length.
    fn ip_header(frame: &mut Vec<u8>, segment: &Segment, segment_bytes: usize) -> usize {
        let length = |bytes: usize| u16::try_from(bytes).unwrap_or(0).to_be_bytes();
        match (segment.source.ip(), segment.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                frame.extend([8, 0, 0x45, 0]);
                frame.extend(length(20 + segment_bytes));
                frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
                frame.extend(source.octets().into_iter().chain(destination.octets()));
                2 + 20
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                frame.extend([0x86, 0xdd, 0x60, 1, 2, 3]);
                frame.extend(length(segment_bytes));
                frame.extend([6, 64]);
                frame.extend(source.octets().into_iter().chain(destination.octets()));
                2 + 40
            }
            mixed => panic!("{mixed:?}"),
        }
    }

    fn options(options: &Options) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(scale) = options.window_scale {
            bytes.extend([1, 3, 3, scale]);
        }
        if let Some((value, echo)) = options.timestamps {
            bytes.extend([1, 1, 8, 10]);
            bytes.extend(value.to_be_bytes());
            bytes.extend(echo.to_be_bytes());
        }
        if !options.sack.is_empty() {
            bytes.extend([1, 1, 5, u8::try_from(2 + 8 * options.sack.len()).unwrap()]);
            for (left, right) in &options.sack {
                bytes.extend(left.to_be_bytes());
                bytes.extend(right.to_be_bytes());
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment() -> Segment {
        Segment {
            time: Duration::from_secs(1),
            source: "10.77.0.1:80".parse().unwrap(),
            destination: "10.77.0.10:40000".parse().unwrap(),
            sequence: 0xffff_fff0,
            acknowledgment: 7,
            flags: flag::ACK | flag::FIN,
            window: 500,
            payload_bytes: 1448,
            options: Options { window_scale: Some(7), timestamps: Some((9, 8)), sack: vec![(1, 2)] },
        }
    }

    fn ipv6_segment() -> Segment {
        let (source, destination) = ("[fd77::1]:80".parse().unwrap(), "[fd77::a]:40000".parse().unwrap());
        Segment { source, destination, ..segment() }
    }

    fn tagged((mut frame, length): (Vec<u8>, usize)) -> (Vec<u8>, usize) {
        frame.splice(12..12, [0x81, 0, 0, 10]);
        (frame, length + 4)
    }

    #[test]
    fn a_cut_frame_is_read_back() {
        for segment in [segment(), ipv6_segment()] {
            for (frame, length) in [build::frame(&segment), tagged(build::frame(&segment))] {
                assert!(frame.len() < length);
                assert_eq!(Segment::parse(Duration::from_secs(1), &frame, length).as_ref(), Some(&segment));
            }
        }
    }

    #[test]
    fn no_cut_and_no_byte_makes_it_panic() {
        for (frame, length) in [build::frame(&segment()), tagged(build::frame(&ipv6_segment()))] {
            for cut in 0..frame.len() {
                let _ = Segment::parse(Duration::ZERO, &frame[..cut], length);
            }
            for at in 0..frame.len() {
                for byte in 0..=u8::MAX {
                    let mut broken = frame.clone();
                    broken[at] = byte;
                    let _ = Segment::parse(Duration::ZERO, &broken, length);
                }
            }
        }
    }

    #[test]
    fn other_protocols_are_left_out() {
        for (segment, protocol_at) in [(segment(), 14 + 9), (ipv6_segment(), 14 + 6)] {
            let (mut frame, length) = build::frame(&segment);
            frame[protocol_at] = 17;
            assert_eq!(Segment::parse(Duration::ZERO, &frame, length), None);
        }
    }
}
