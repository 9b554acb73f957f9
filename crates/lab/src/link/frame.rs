//! Parts of a frame that some links look at: pure ACKs, and the field for congestion marks (ECN). A pure ACK is
//! recognised only in IPv4 without options, and in IPv6 without extension headers.

use std::ops::Range;

const ETHERNET: usize = 14;
const TCP: u8 = 6;
const ACK: u8 = 0x10;

/// Segment with ACK as its only flag, without data and without a selective acknowledgement.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PureAck<'a> {
    /// Addresses and ports, as the frame has them.
    connection: [&'a [u8]; 2],
    number: u32,
}

impl PureAck<'_> {
    /// Returns whether `older` is of the same connection and acknowledges less. Then this ACK says all that `older`
    /// says.
    pub(super) fn covers(&self, older: &Self) -> bool {
        self.connection == older.connection && (self.number.wrapping_sub(older.number) as i32) > 0
    }
}

/// Ranges of the frame's bytes that hold the IP addresses and the TCP segment. `None` if the frame holds no TCP, or if
/// IP options or extension headers come before it.
fn parts(frame: &[u8]) -> Option<(Range<usize>, Range<usize>)> {
    match (frame.get(12..14)?, *frame.get(ETHERNET)?) {
        ([0x08, 0x00], 0x45) if frame.get(23) == Some(&TCP) => {
            let bytes = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
            Some((26..34, 34..ETHERNET + bytes))
        }
        ([0x86, 0xdd], _) if frame.get(20) == Some(&TCP) => {
            let bytes = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
            Some((22..54, 54..54 + bytes))
        }
        _ => None,
    }
}

pub(super) fn pure_ack(frame: &[u8]) -> Option<PureAck<'_>> {
    let (addresses, tcp) = parts(frame)?;
    let (addresses, tcp) = (frame.get(addresses)?, frame.get(tcp)?);
    let header = usize::from(*tcp.get(12)? >> 4) * 4;
    if header != tcp.len() || tcp[13] != ACK || has_sack(tcp.get(20..)?) {
        return None;
    }
    Some(PureAck { connection: [addresses, &tcp[..4]], number: u32::from_be_bytes(tcp[8..12].try_into().ok()?) })
}

fn has_sack(mut options: &[u8]) -> bool {
    while let [kind, rest @ ..] = options {
        options = match (kind, rest) {
            (5, _) => return true,
            (1, _) => rest,
            (0, _) | (_, []) => return false,
            (_, [length, ..]) => options.get(usize::from(*length).max(2)..).unwrap_or_default(),
        };
    }
    false
}

/// Marks a packet as one that met congestion (CE), if its sender accepts marks (ECT; RFC 3168, 5). Returns whether it
/// is marked now.
pub(super) fn mark_congestion(frame: &mut [u8]) -> bool {
    const CE: u8 = 3;
    match frame {
        [_, _, _, _, _, _, _, _, _, _, _, _, 0x08, 0x00, ip @ ..] if ip.len() >= 20 && ip[1] & CE != 0 => {
            let change = u16::from(CE - (ip[1] & CE));
            ip[1] |= CE;
            // The checksum is the complement of a sum. The sum grows by `change`, so the checksum shrinks by `change`
            // (RFC 1624).
            let sum = u16::from_be_bytes([ip[10], ip[11]]);
            let sum = sum.checked_sub(change).unwrap_or_else(|| sum.wrapping_sub(change).wrapping_sub(1));
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            true
        }
        // The ECN field is the last two bits of the traffic class, which begins in the middle of the IPv6 header's
        // first byte.
        [_, _, _, _, _, _, _, _, _, _, _, _, 0x86, 0xdd, _, class, ..] if *class & CE << 4 != 0 => {
            *class |= CE << 4;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of IPv4 from one port to another, with a valid header checksum.
    fn frame(number: u32, flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut tcp = vec![0x9c, 0x40, 0, 80, 0, 0, 0, 1];
        tcp.extend(number.to_be_bytes());
        tcp.extend([((20 + options.len()) as u8 / 4) << 4, flags, 1, 0, 0, 0, 0, 0]);
        tcp.extend(options);
        tcp.extend(payload);
        let mut ip = vec![0x45, 2, 0, 20 + tcp.len() as u8, 0, 7, 0x40, 0, 64, TCP, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        let sum = !sum_of(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00]);
        frame.extend(ip);
        frame.extend(tcp);
        frame
    }

    fn sum_of(ip: &[u8]) -> u16 {
        let sum: u32 = ip.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    #[test]
    fn only_an_ack_that_says_nothing_else_is_pure() {
        let timestamps = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
        let sack = [1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2];
        let (first, second) = (frame(1000, ACK, &timestamps, b""), frame(2000, ACK, &timestamps, b""));
        assert!(pure_ack(&second).unwrap().covers(&pure_ack(&first).unwrap()));
        assert!(!pure_ack(&first).unwrap().covers(&pure_ack(&second).unwrap()));
        assert!(!pure_ack(&first).unwrap().covers(&pure_ack(&first).unwrap()), "a duplicate says something");
        let mut other = second.clone();
        other[34] ^= 1;
        assert!(!pure_ack(&other).unwrap().covers(&pure_ack(&first).unwrap()), "of another connection");
        for says_more in [
            frame(2000, ACK, &sack, b""),
            frame(2000, ACK | 1, &timestamps, b""),
            frame(2000, ACK | 0x40, &timestamps, b""),
            frame(2000, ACK, &timestamps, b"GET /"),
        ] {
            assert_eq!(pure_ack(&says_more), None);
        }
        for bytes in 0..first.len() {
            assert_eq!(pure_ack(&first[..bytes]), None, "cut off after {bytes}");
        }
    }

    #[test]
    fn a_mark_keeps_the_checksum_right() {
        for ect in [1, 2] {
            for identification in 0..=u16::MAX {
                let mut marked = frame(1, ACK, &[], b"payload");
                marked[15] = ect;
                marked[18..20].copy_from_slice(&identification.to_be_bytes());
                marked[24..26].copy_from_slice(&[0, 0]);
                let sum = !sum_of(&marked[14..34]);
                marked[24..26].copy_from_slice(&sum.to_be_bytes());
                assert!(mark_congestion(&mut marked));
                assert_eq!((marked[15], sum_of(&marked[14..34])), (3, 0xffff), "{identification}");
            }
        }
    }

    #[test]
    fn who_does_not_take_marks_gets_none() {
        let mut frame = frame(1, ACK, &[], b"payload");
        frame[15] = 0;
        let before = frame.clone();
        assert!(!mark_congestion(&mut frame) && frame == before);
        let mut ipv6 = [&[0; 12][..], &[0x86, 0xdd, 0x60, 0x20], &[0; 38]].concat();
        assert!(mark_congestion(&mut ipv6) && ipv6[14..16] == [0x60, 0x30]);
        ipv6[15] = 0;
        assert!(!mark_congestion(&mut ipv6));
    }
}
