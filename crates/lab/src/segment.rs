//! TCP segments as a capture holds them: Ethernet, IPv4, TCP with its options, possibly cut short. The lab's own
//! parser: what checks Shunt's packets must not share Shunt's code.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

/// RFC 9293 3.1: the header's byte 13, counted from 0.
pub(crate) mod flag {
    pub(crate) const FIN: u8 = 0x01;
    pub(crate) const SYN: u8 = 0x02;
    pub(crate) const RST: u8 = 0x04;
    pub(crate) const ACK: u8 = 0x10;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Since the epoch.
    pub(crate) time: Duration,
    pub(crate) source: SocketAddrV4,
    pub(crate) destination: SocketAddrV4,
    pub(crate) sequence: u32,
    pub(crate) acknowledgment: u32,
    pub(crate) flags: u8,
    /// Unscaled.
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
    /// Reads an Ethernet frame whose first bytes are `frame` and whose length was `frame_bytes`; `None` when it is
    /// no TCP over IPv4 or is cut within the TCP header's fixed part.
    pub(crate) fn parse(time: Duration, frame: &[u8], frame_bytes: usize) -> Option<Self> {
        const ETHERNET: usize = 14;
        if be16(frame, 12)? != 0x0800 {
            return None;
        }
        let ip = frame.get(ETHERNET..)?;
        let ip_header = usize::from(*ip.first()? & 0xf) * 4;
        let fragment_offset = be16(ip, 6)? & 0x1fff;
        if ip[0] >> 4 != 4 || ip_header < 20 || *ip.get(9)? != 6 || fragment_offset != 0 {
            return None;
        }
        let total = match usize::from(be16(ip, 2)?) {
            // A segment of more than 64 KiB does not fit the field.
            0 => frame_bytes.checked_sub(ETHERNET)?,
            total => total,
        };
        let address = |at| be32(ip, at).map(Ipv4Addr::from);
        let (source, destination) = (address(12)?, address(16)?);
        let tcp = ip.get(ip_header..)?;
        let tcp_header = usize::from(*tcp.get(12)? >> 4) * 4;
        let payload_bytes = u32::try_from(total.checked_sub(ip_header)?.checked_sub(tcp_header)?).ok()?;
        Some(Self {
            time,
            source: SocketAddrV4::new(source, be16(tcp, 0)?),
            destination: SocketAddrV4::new(destination, be16(tcp, 2)?),
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

    /// The sequence numbers it takes: payload, SYN and FIN.
    pub(crate) fn sequence_length(&self) -> u32 {
        self.payload_bytes + u32::from(self.has(flag::SYN)) + u32::from(self.has(flag::FIN))
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
    use super::{Options, Segment};

    /// How many bytes of a frame there are at most, as in a capture.
    const KEPT: usize = 128;

    /// The beginning of an Ethernet frame with the segment's headers and a payload of zeros, and the whole one's length.
    pub(crate) fn frame(segment: &Segment) -> (Vec<u8>, usize) {
        let options = options(&segment.options);
        let total = 20 + 20 + options.len() + segment.payload_bytes as usize;
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0]);
        frame.extend(u16::try_from(total).unwrap_or(0).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend(segment.source.ip().octets());
        frame.extend(segment.destination.ip().octets());
        frame.extend(segment.source.port().to_be_bytes());
        frame.extend(segment.destination.port().to_be_bytes());
        frame.extend(segment.sequence.to_be_bytes());
        frame.extend(segment.acknowledgment.to_be_bytes());
        frame.extend([u8::try_from(((20 + options.len()) / 4) << 4).unwrap(), segment.flags]);
        frame.extend(segment.window.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(options);
        frame.resize((14 + total).min(KEPT), 0);
        (frame, 14 + total)
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

    #[test]
    fn a_cut_frame_is_read_back() {
        let (frame, length) = build::frame(&segment());
        assert!(frame.len() < length);
        assert_eq!(Segment::parse(Duration::from_secs(1), &frame, length), Some(segment()));
    }

    #[test]
    fn no_cut_and_no_byte_makes_it_panic() {
        let (frame, length) = build::frame(&segment());
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

    #[test]
    fn other_protocols_are_left_out() {
        let (mut frame, length) = build::frame(&segment());
        frame[14 + 9] = 17;
        assert_eq!(Segment::parse(Duration::ZERO, &frame, length), None);
    }
}
