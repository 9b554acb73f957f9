//! Reads pcap files (draft-ietf-opsawg-pcap) as tcpdump writes them. In these files, packets may be cut at the snapshot
//! length, and each has its original length. The pcap-file crate refuses cut packets.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// Number of Ethernet among the link types of a pcap file (LINKTYPE_ETHERNET).
const ETHERNET: u32 = 1;
/// Largest number of bytes that a file may keep of one packet. More is an error.
const PACKET_LIMIT: u32 = 1 << 20;

/// A pcap stream of Ethernet frames.
pub(crate) struct Pcap<R> {
    stream: R,
    big_endian: bool,
    /// Unit of the timestamps' fraction, in nanoseconds.
    fraction_ns: u32,
}

/// One frame, possibly cut short.
pub(crate) struct Packet {
    /// Time since the epoch.
    pub(crate) time: Duration,
    pub(crate) kept: Vec<u8>,
    pub(crate) original_bytes: usize,
}

impl<R: Read> Pcap<R> {
    /// Reads the file's header.
    pub(crate) fn open(mut stream: R) -> Result<Self> {
        let mut header = [0; 24];
        stream.read_exact(&mut header).context("no pcap header")?;
        let (big_endian, fraction_ns) = match header[..4] {
            [0xd4, 0xc3, 0xb2, 0xa1] => (false, 1000),
            [0x4d, 0x3c, 0xb2, 0xa1] => (false, 1),
            [0xa1, 0xb2, 0xc3, 0xd4] => (true, 1000),
            [0xa1, 0xb2, 0x3c, 0x4d] => (true, 1),
            _ => bail!("no pcap file"),
        };
        let pcap = Self { stream, big_endian, fraction_ns };
        let link = pcap.number(&header, 20) & 0x0fff_ffff;
        ensure!(link == ETHERNET, "a capture of link type {link}, not of Ethernet");
        Ok(pcap)
    }

    /// Reads the next packet; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Packet>> {
        let mut header = [0; 16];
        match self.stream.read(&mut header[..1]) {
            Ok(0) => return Ok(None),
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error.into()),
            Err(_) => return self.next(),
            Ok(_) => self.stream.read_exact(&mut header[1..]).context("a packet's header is cut off")?,
        }
        let [seconds, fraction, kept, original] = [0, 4, 8, 12].map(|at| self.number(&header, at));
        ensure!(kept <= PACKET_LIMIT, "a packet of {kept} bytes");
        let mut bytes = vec![0; kept as usize];
        self.stream.read_exact(&mut bytes).context("a packet is cut off")?;
        let time = Duration::from_secs(seconds.into()) + Duration::from_nanos(u64::from(fraction)) * self.fraction_ns;
        Ok(Some(Packet { time, kept: bytes, original_bytes: original as usize }))
    }

    fn number(&self, bytes: &[u8], at: usize) -> u32 {
        let bytes = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    }
}

/// Writes pcap files for tests, with times in microseconds.
#[cfg(test)]
pub(crate) fn write<'a>(packets: impl IntoIterator<Item = &'a Packet>) -> Vec<u8> {
    let mut file = Vec::new();
    let put = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    file.extend(put(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 128, ETHERNET]));
    for packet in packets {
        let (kept, original) = (packet.kept.len() as u32, packet.original_bytes as u32);
        file.extend(put(&[packet.time.as_secs() as u32, packet.time.subsec_micros(), kept, original]));
        file.extend_from_slice(&packet.kept);
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_back() {
        let time = Duration::from_micros(5_000_001);
        let file = write(&[Packet { time, kept: vec![1, 2, 3], original_bytes: 1514 }]);
        let mut pcap = Pcap::open(file.as_slice()).unwrap();
        let packet = pcap.next().unwrap().unwrap();
        assert_eq!((packet.time, packet.kept, packet.original_bytes), (time, vec![1, 2, 3], 1514));
        assert!(pcap.next().unwrap().is_none());
    }

    #[test]
    fn a_cut_file_is_an_error() {
        let file = write(&[Packet { time: Duration::ZERO, kept: vec![1, 2, 3], original_bytes: 3 }]);
        for cut in 25..file.len() {
            assert!(Pcap::open(&file[..cut]).unwrap().next().is_err(), "{cut}");
        }
        assert!(Pcap::open(&file[..23]).is_err());
        assert!(Pcap::open([0; 24].as_slice()).is_err());
    }
}
