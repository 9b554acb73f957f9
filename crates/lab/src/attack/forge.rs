//! Forged packets that no kernel would send: IPv4 with TCP or ICMP.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RawProtocol, SendFlags, SocketFlags, SocketType, sendto, socket_with};

use crate::host::Host;
use crate::random::Random;

/// Bits of TCP's flags that segment.rs does not name.
pub(super) const PSH: u8 = 0x08;
pub(super) const URG: u8 = 0x20;
/// IPPROTO_RAW: the sender writes the IP header.
const RAW: u32 = 255;
const TCP: u8 = 6;
const ICMP: u8 = 1;
const MORE_FRAGMENTS: u16 = 0x2000;

/// A segment to forge.
#[derive(Debug, Clone)]
pub(super) struct Forged {
    pub(super) source: SocketAddrV4,
    pub(super) destination: SocketAddrV4,
    pub(super) sequence: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    /// TCP options, 40 bytes at most. Zeros follow, up to a multiple of 4 bytes.
    pub(super) options: Vec<u8>,
    pub(super) data: Vec<u8>,
}

impl Forged {
    /// A segment without data and options, and with sequence and acknowledgment number 0.
    pub(super) fn new(source: SocketAddrV4, destination: SocketAddrV4, flags: u8) -> Self {
        let (options, data) = (Vec::new(), Vec::new());
        Self { source, destination, sequence: 0, ack: 0, flags, window: 0x7fff, options, data }
    }

    fn tcp(&self) -> Vec<u8> {
        let words = 5 + self.options.len().div_ceil(4);
        let mut tcp = [self.source.port().to_be_bytes(), self.destination.port().to_be_bytes()].concat();
        tcp.extend([self.sequence.to_be_bytes(), self.ack.to_be_bytes()].concat());
        tcp.extend([(words as u8) << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0, 0, 0, 0]);
        tcp.extend(&self.options);
        tcp.resize(words * 4, 0);
        tcp.extend(&self.data);
        let length = (tcp.len() as u16).to_be_bytes();
        let ends = [self.source.ip().octets(), self.destination.ip().octets()].concat();
        let sum = checksum(&[&ends[..], &[0, TCP], &length, &tcp].concat());
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        tcp
    }

    /// The whole segment in one IP packet, with these IP options.
    pub(super) fn packet(&self, ip_options: &[u8]) -> Vec<u8> {
        ipv4(*self.source.ip(), *self.destination.ip(), TCP, 0, 0, ip_options, &self.tcp())
    }

    /// The segment in two IP fragments with the identification `number`. With `overlap`, the second begins before the
    /// first ends.
    pub(super) fn fragments(&self, number: u16, overlap: bool) -> [Vec<u8>; 2] {
        let tcp = self.tcp();
        let ends = (*self.source.ip(), *self.destination.ip());
        let cut = (tcp.len() / 2).next_multiple_of(8).min(tcp.len());
        let from = if overlap { cut.saturating_sub(8) } else { cut };
        let first = ipv4(ends.0, ends.1, TCP, number, MORE_FRAGMENTS, &[], &tcp[..cut]);
        [first, ipv4(ends.0, ends.1, TCP, number, (from / 8) as u16, &[], &tcp[from..])]
    }

    /// An ICMP error that cites this segment, as a router on the path would send it: type 3 (destination unreachable),
    /// with this code and next-hop MTU.
    pub(super) fn unreachable(&self, from: Ipv4Addr, code: u8, mtu: u16) -> Vec<u8> {
        let cited = self.packet(&[]);
        let mut icmp = vec![3, code, 0, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend(&cited[..28]);
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        ipv4(from, *self.source.ip(), ICMP, 0, 0, &[], &icmp)
    }
}

fn ipv4(
    from: Ipv4Addr,
    to: Ipv4Addr,
    protocol: u8,
    number: u16,
    fragment: u16,
    options: &[u8],
    body: &[u8],
) -> Vec<u8> {
    let words = 5 + options.len().div_ceil(4);
    let mut packet = vec![0x40 | words as u8, 0];
    packet.extend(((words * 4 + body.len()) as u16).to_be_bytes());
    packet.extend(number.to_be_bytes());
    packet.extend(fragment.to_be_bytes());
    // The kernel fills in the header's checksum.
    packet.extend([64, protocol, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(options);
    packet.resize(words * 4, 0);
    packet.extend(body);
    packet
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Random options for a SYN. Most are such as no client sends: wrong lengths, values out of range, unknown kinds.
pub(super) fn syn_options(random: &mut Random) -> Vec<u8> {
    let mut options = Vec::new();
    for _ in 0..1 + random.below(5) {
        match random.below(8) {
            0 => options.extend([2, 4, random.next() as u8, random.next() as u8]),
            1 => options.extend([3, 3, random.next() as u8, 1]),
            2 => options.extend([4, 2, 1, 1]),
            3 => options.extend([8, 10, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]),
            4 => options.extend([2, 0, 0, 0]),
            5 => options.extend([34, 2, 1, 0]),
            // One of the shared experimental kinds (RFC 6994), with an identifier that is not Shunt's.
            6 => options.extend([253 + (random.next() & 1) as u8, 8, 0x53, 0x48, random.next() as u8, 0, 0, 0]),
            _ => options.extend([random.next() as u8, random.next() as u8, 0, 0]),
        }
    }
    options.truncate(40);
    options
}

/// A SACK option with these blocks.
pub(super) fn sack(blocks: &[(u32, u32)]) -> Vec<u8> {
    let mut option = vec![1, 1, 5, 2 + 8 * blocks.len() as u8];
    for (left, right) in blocks {
        option.extend([left.to_be_bytes(), right.to_be_bytes()].concat());
    }
    option
}

/// Raw socket that sends packets.
pub(super) struct Sender(OwnedFd);

impl Sender {
    /// Opens the socket on a host.
    ///
    /// # Errors
    /// When the host's kernel refuses.
    pub(super) fn of(host: &Host) -> Result<Self> {
        let protocol = Protocol::from_raw(RawProtocol::new(RAW).context("IPPROTO_RAW")?);
        let open = || socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol));
        Ok(Self(host.run(open)?.context("opening a raw socket")?))
    }

    /// Sends a packet to the address in its header.
    ///
    /// # Errors
    /// If the kernel refuses, unless its reason is lack of room or the packet's contents.
    pub(super) fn send(&self, packet: &[u8]) -> Result<()> {
        let to = Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]);
        match sendto(&self.0, packet, SendFlags::DONTWAIT, &std::net::SocketAddr::new(to.into(), 0)) {
            // The kernel may refuse to send nonsense.
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INVAL | Errno::PERM | Errno::MSGSIZE) => Ok(()),
            Err(error) => Err(error).context("sending a raw packet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::{Segment, flag};
    use std::time::Duration;

    fn forged() -> Forged {
        let end = |port| SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 10), port);
        Forged { sequence: 7, ack: 9, data: vec![1; 100], ..Forged::new(end(1000), end(80), flag::ACK) }
    }

    fn parsed(packet: &[u8]) -> Option<Segment> {
        let frame = [&[0; 12][..], &[8, 0], packet].concat();
        Segment::parse(Duration::ZERO, &frame, frame.len())
    }

    #[test]
    fn a_packet_is_what_was_asked_for() {
        let mut forged = forged();
        forged.options = sack(&[(3, 4), (5, 6)]);
        let segment = parsed(&forged.packet(&[1, 1, 1, 0])).unwrap();
        assert_eq!((segment.sequence, segment.acknowledgment, segment.payload_bytes), (7, 9, 100));
        assert_eq!(segment.options.sack, [(3, 4), (5, 6)]);
    }

    #[test]
    fn fragments_are_the_packet_again() {
        let (forged, head) = (forged(), 20);
        let [first, second] = forged.fragments(5, false);
        let whole = forged.packet(&[]);
        assert_eq!([&first[head..], &second[head..]].concat(), whole[head..]);
        let [_, second] = forged.fragments(5, true);
        assert!(whole.ends_with(&second[head..]) && parsed(&second).is_none());
    }
}
