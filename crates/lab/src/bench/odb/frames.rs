//! Frames on connections between programs under `shunt run`, and their lengths, read from a capture. A frame is a run
//! of real bytes (bytes that the program wrote), or a *reference*. A reference goes in place of bytes that stay in the
//! *store* of the writer's machine. A connection that has frames begins with a preamble.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, bail};
use shunt_odb::frame::{Beginning, PREAMBLE, Receiving, Want};
use shunt_odb::reference::PayloadId;

use crate::pcap::Pcap;
use crate::segment::{Segment, flag};

/// A frame, with its length: the number of real bytes, or of the bytes that the reference stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Real(u64),
    Reference(PayloadId, u64),
}

/// One direction of a connection, from its beginning.
#[derive(Debug)]
pub(super) struct Direction {
    pub(super) source: SocketAddr,
    pub(super) frames: Vec<Frame>,
}

/// Returns both directions of each connection in a capture, in the order in which the directions began. The capture
/// must have whole packets.
pub(super) fn directions(capture: &Path) -> Result<Vec<Direction>> {
    let file = File::open(capture).with_context(|| format!("opening {}", capture.display()))?;
    let mut pcap = Pcap::open(BufReader::new(file))?;
    let mut streams: Vec<Stream> = Vec::new();
    while let Some(packet) = pcap.next()? {
        let Some(segment) = Segment::parse(packet.time, &packet.kept, packet.original_bytes) else { continue };
        let (source, destination) = (segment.source, segment.destination);
        if segment.has(flag::SYN) {
            streams.push(Stream {
                source,
                destination,
                start: segment.sequence.wrapping_add(1),
                pieces: BTreeMap::new(),
            });
        }
        let is_its = |stream: &&mut Stream| (stream.source, stream.destination) == (source, destination);
        if let Some(stream) = streams.iter_mut().rev().find(is_its)
            && segment.payload_bytes > 0
        {
            let payload = packet.kept[packet.kept.len().saturating_sub(segment.payload_bytes as usize)..].to_vec();
            stream.pieces.insert(segment.sequence.wrapping_sub(stream.start), payload);
        }
    }
    let direction = |stream: Stream| Ok(Direction { source: stream.source, frames: frames(&joined(stream.pieces))? });
    streams.into_iter().map(direction).collect()
}

/// Bytes of one direction, collected from its segments.
struct Stream {
    source: SocketAddr,
    destination: SocketAddr,
    /// Sequence number of the first byte.
    start: u32,
    /// Pieces of the stream, by their offset.
    pieces: BTreeMap<u32, Vec<u8>>,
}

/// Joins the pieces of a stream, given by their offset. Pieces may overlap, because bytes may have come twice.
fn joined(pieces: BTreeMap<u32, Vec<u8>>) -> Vec<u8> {
    let mut stream: Vec<u8> = Vec::new();
    for (at, piece) in pieces {
        let known = stream.len().saturating_sub(at as usize);
        stream.extend_from_slice(piece.get(known..).unwrap_or_default());
    }
    stream
}

/// Returns the frames of a stream; an empty list if the stream has no frames. References that their writer has declared
/// void are left out.
fn frames(mut bytes: &[u8]) -> Result<Vec<Frame>> {
    let (mut receiving, mut frames) = (Receiving::default(), Vec::new());
    while !bytes.is_empty() {
        let used = match receiving.want() {
            Want::Preamble(_) => match receiving.saw_preamble(bytes) {
                Beginning::Framed => PREAMBLE.len(),
                Beginning::Plain | Beginning::Undecided => return Ok(frames),
            },
            Want::Header(length) => {
                let now = length.min(bytes.len());
                receiving.took_header(&bytes[..now])?;
                now
            }
            Want::Real(left) => {
                let now = usize::try_from(left)?.min(bytes.len());
                receiving.took_real(now as u64);
                frames.push(Frame::Real(now as u64));
                now
            }
            Want::ReferencePart(length) => {
                let now = length.min(bytes.len());
                receiving.took_reference_part(&bytes[..now])?;
                now
            }
            Want::Reference => {
                match receiving.saw_reference(bytes[0])? {
                    Some(reference) => {
                        receiving.took_reference(&reference, reference.length);
                        frames.push(Frame::Reference(reference.payload, reference.length));
                    }
                    None => receiving.took_void(),
                }
                1
            }
            Want::Plain | Want::Broken => bail!("the capture does not begin where the connection does"),
        };
        bytes = &bytes[used..];
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_cut_into_its_frames() {
        let mut stream = PREAMBLE.to_vec();
        stream.extend([1, 0, 0, 0, 3, 0, 0, 0, b'a', b'b', b'c', 1, 0, 0, 0, 1, 0, 0, 0, b'd']);
        assert_eq!(frames(&stream).unwrap(), [Frame::Real(3), Frame::Real(1)]);
        assert_eq!(frames(b"GET / HTTP/1.1\r\n\r\n").unwrap(), []);
        assert!(frames(&[&PREAMBLE[..], &[9; 8]].concat()).is_err());
    }

    #[test]
    fn pieces_that_came_twice_count_once() {
        let pieces = BTreeMap::from([(0, vec![1, 2, 3]), (2, vec![3, 4]), (4, vec![5])]);
        assert_eq!(joined(pieces), [1, 2, 3, 4, 5]);
    }
}
