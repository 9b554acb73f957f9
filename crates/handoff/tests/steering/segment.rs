//! TCP segments as the tests write and read them. Parsing verifies every length and checksum.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const PSH: u8 = 0x08;
pub const ACK: u8 = 0x10;
pub const URG: u8 = 0x20;
pub const CWR: u8 = 0x80;

const ETHERNET: usize = 14;

/// A TCP segment in an Ethernet frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub urgent: u16,
    pub options: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Segment {
    /// Makes a pure ACK.
    pub fn ack(from: SocketAddr, to: SocketAddr, seq: u32, ack: u32) -> Self {
        let (options, payload) = (Vec::new(), Vec::new());
        Self { from, to, seq, ack, flags: ACK, window: 500, urgent: 0, options, payload }
    }

    pub fn flags(mut self, flags: u8) -> Self {
        self.flags = flags;
        self
    }

    pub fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.into();
        self
    }

    pub fn options(mut self, options: &[u8]) -> Self {
        self.options.extend_from_slice(options);
        assert!(self.options.len() <= 40 && self.options.len().is_multiple_of(4), "{:?}", self.options);
        self
    }

    /// Adds a timestamps option. Two NOPs before the option align its values to 4 bytes (RFC 7323, appendix A).
    pub fn timestamps(self, tsval: u32, tsecr: u32) -> Self {
        let mut option = vec![1, 1, 8, 10];
        option.extend(tsval.to_be_bytes());
        option.extend(tsecr.to_be_bytes());
        self.options(&option)
    }

    /// Adds a SACK option. Two NOPs before the option align its blocks to 4 bytes.
    pub fn sack(self, blocks: &[(u32, u32)]) -> Self {
        let mut option = vec![1, 1];
        option.extend(sack_option(blocks));
        self.options(&option)
    }

    pub fn to_frame(&self) -> Vec<u8> {
        let tcp_bytes = 20 + self.options.len() + self.payload.len();
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                frame.extend([0x08, 0x00]);
                let mut ip = vec![0x45, 0];
                ip.extend((20 + tcp_bytes as u16).to_be_bytes());
                ip.extend([0, 7, 0x40, 0, 61, 6, 0, 0]);
                ip.extend(from.octets());
                ip.extend(to.octets());
                let sum = !folded(&[&ip]);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                frame.extend(ip);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend((tcp_bytes as u16).to_be_bytes());
                frame.extend([6, 61]);
                frame.extend(from.octets());
                frame.extend(to.octets());
            }
            _ => panic!("two IP versions in one packet"),
        }
        let mut tcp = Vec::new();
        tcp.extend(self.from.port().to_be_bytes());
        tcp.extend(self.to.port().to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend([((20 + self.options.len()) as u8 / 4) << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0, 0]);
        tcp.extend(self.urgent.to_be_bytes());
        tcp.extend(&self.options);
        tcp.extend(&self.payload);
        let sum = !folded(&[&pseudo_header(self.from.ip(), self.to.ip(), tcp.len()), &tcp]);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        frame.extend(tcp);
        frame
    }

    /// Reads the segment in a frame.
    ///
    /// # Panics
    /// If a length or a checksum is wrong.
    pub fn from_frame(frame: &[u8]) -> Self {
        Self::read(frame).unwrap_or_else(|problem| panic!("{problem}: {frame:02x?}"))
    }

    /// Reads the segment in a frame. `Err` if it is not a TCP segment, or has a wrong length or checksum.
    pub fn read(frame: &[u8]) -> Result<Self, &'static str> {
        let (from, to, tcp) = match frame.get(12..14) {
            Some([0x08, 0x00]) => {
                let ip = frame.get(ETHERNET..ETHERNET + 20).ok_or("short")?;
                if ip[0] != 0x45 || ip[9] != 6 {
                    return Err("not plain TCP over IPv4");
                }
                if folded(&[ip]) != 0xffff {
                    return Err("IPv4 checksum");
                }
                let bytes = u16::from_be_bytes([ip[2], ip[3]]) as usize;
                let tcp = frame.get(ETHERNET + 20..ETHERNET + bytes).ok_or("IPv4 length")?;
                let address = |at: usize| IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap()));
                (address(12), address(16), tcp)
            }
            Some([0x86, 0xdd]) => {
                let ip = frame.get(ETHERNET..ETHERNET + 40).ok_or("short")?;
                if ip[6] != 6 {
                    return Err("not plain TCP over IPv6");
                }
                let bytes = u16::from_be_bytes([ip[4], ip[5]]) as usize;
                let tcp = frame.get(ETHERNET + 40..ETHERNET + 40 + bytes).ok_or("IPv6 length")?;
                let address = |at: usize| IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap()));
                (address(8), address(24), tcp)
            }
            _ => return Err("not IP"),
        };
        let header = tcp.get(12).map_or(0, |byte| (byte >> 4) as usize * 4);
        if header < 20 || header > tcp.len() {
            return Err("TCP header length");
        }
        if folded(&[&pseudo_header(from, to, tcp.len()), tcp]) != 0xffff {
            return Err("TCP checksum");
        }
        let u16_at = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let u32_at = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
        Ok(Self {
            from: SocketAddr::new(from, u16_at(0)),
            to: SocketAddr::new(to, u16_at(2)),
            seq: u32_at(4),
            ack: u32_at(8),
            flags: tcp[13],
            window: u16_at(14),
            urgent: u16_at(18),
            options: tcp[20..header].into(),
            payload: tcp[header..].into(),
        })
    }

    /// Returns the SACK blocks (left edge, right edge). The SACK option may have any place among the options.
    pub fn sack_blocks(&self) -> Vec<(u32, u32)> {
        let edge = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        match self.option(5) {
            Some(blocks) => blocks.chunks(8).map(|block| (edge(&block[..4]), edge(&block[4..]))).collect(),
            None => Vec::new(),
        }
    }

    /// Returns TSval and TSecr.
    pub fn timestamp_values(&self) -> Option<(u32, u32)> {
        let value = self.option(8)?;
        let at = |at: usize| u32::from_be_bytes(value[at..at + 4].try_into().unwrap());
        Some((at(0), at(4)))
    }

    fn option(&self, wanted: u8) -> Option<&[u8]> {
        let mut rest = self.options.as_slice();
        while let [kind, tail @ ..] = rest {
            rest = match kind {
                0 => return None,
                1 => tail,
                _ => {
                    let length = tail[0] as usize;
                    if *kind == wanted {
                        return Some(&rest[2..length]);
                    }
                    &rest[length..]
                }
            };
        }
        None
    }
}

/// Returns a SACK option: kind, length, edges.
pub fn sack_option(blocks: &[(u32, u32)]) -> Vec<u8> {
    let mut option = vec![5, 2 + 8 * blocks.len() as u8];
    for (left, right) in blocks {
        option.extend(left.to_be_bytes());
        option.extend(right.to_be_bytes());
    }
    option
}

fn pseudo_header(from: IpAddr, to: IpAddr, tcp_bytes: usize) -> Vec<u8> {
    pseudo_header_of(6, from, to, tcp_bytes)
}

/// Makes the pseudo-header that a checksum covers, for `bytes` bytes of any protocol. The layout is that of IPv6. IPv4
/// has another layout, but the same sum.
pub fn pseudo_header_of(protocol: u8, from: IpAddr, to: IpAddr, bytes: usize) -> Vec<u8> {
    let mut pseudo = Vec::new();
    for address in [from, to] {
        match address {
            IpAddr::V4(address) => pseudo.extend(address.octets()),
            IpAddr::V6(address) => pseudo.extend(address.octets()),
        }
    }
    pseudo.extend((bytes as u32).to_be_bytes());
    pseudo.extend([0, 0, 0, protocol]);
    pseudo
}

/// Sum of the Internet checksum, before the complement (RFC 1071). Each part but the last must have an even length.
pub fn folded(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn a_segment_comes_back_from_its_frame() {
    for (from, to) in [("10.0.0.2:5", "10.0.0.1:80"), ("[fd00::2]:5", "[fd00::1]:80")] {
        let segment = Segment::ack(from.parse().unwrap(), to.parse().unwrap(), 1, 2)
            .timestamps(7, 8)
            .sack(&[(5, 9), (11, 12)])
            .payload(b"odd");
        assert_eq!(Segment::from_frame(&segment.to_frame()), segment);
        let mut frame = segment.to_frame();
        *frame.last_mut().unwrap() ^= 1;
        assert_eq!(Segment::read(&frame), Err("TCP checksum"));
    }
}
