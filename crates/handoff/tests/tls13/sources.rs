//! Payloads, keys and sockets for the tests of TLS 1.3 records.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use shunt_handoff::body::Body;
use shunt_handoff::flow_sender::KernelSocket;
use shunt_handoff::identity::FileIdentity;
use shunt_handoff::payload::Payload;
use shunt_handoff::tls13::stream::Generation;
use shunt_handoff::tls13::workbench::Workbench;
use shunt_wire::local::Offer;
use shunt_wire::tls::Suite;
use zerocopy::FromZeros;

/// Returns bytes whose pattern does not repeat at the length of a record or a buffer.
pub fn bytes(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Payload of a file from `offset` on.
pub fn payload(file: &File, offset: u64) -> Payload {
    Payload::new(file.try_clone().unwrap(), &offer(file, offset))
}

/// Payload of a whole file. `proven` is the identity that the file must have, if the frontend relies on its digest
/// (SHA-256).
pub fn proven_payload(file: &File, proven: Option<FileIdentity>) -> Payload {
    Payload::proven(file.try_clone().unwrap(), &offer(file, 0), proven)
}

fn offer(file: &File, offset: u64) -> Offer {
    let meta = file.metadata().unwrap();
    let mut offer = Offer::new_zeroed();
    (offer.offset, offer.length, offer.size) = (offset, meta.len() - offset, meta.len());
    offer.mtime_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
    offer
}

/// Keys as they come with a claim, the frontend's message that asks for a payload.
#[derive(Clone)]
pub struct Keys {
    pub suite: Suite,
    pub key: Vec<u8>,
    pub iv: [u8; 12],
    pub first_record: u64,
    pub content_bytes: u16,
    pub skip: u16,
}

impl Keys {
    pub fn of(suite: Suite) -> Self {
        let key = bytes(suite.key_bytes());
        Self { suite, key, iv: *b"initialisati", first_record: 0, content_bytes: 1 << 14, skip: 0 }
    }

    pub fn generation(&self) -> Generation<'_> {
        let Self { suite, ref key, ref iv, first_record, content_bytes, skip } = *self;
        Generation { suite, key, iv, first_record, content_bytes, skip }
    }
}

/// A socket, and its other end.
pub fn pair() -> (KernelSocket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (OwnedFd::from(ours).into(), theirs)
}

/// Sends a body through a socket, and returns the bytes that arrive. The reader takes at most `step` bytes at a time,
/// and the send buffer is the smallest that the kernel allows.
pub fn sent(mut stream: Body, step: usize) -> Vec<u8> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let ours = KernelSocket::from(OwnedFd::from(ours));
    theirs.set_nonblocking(true).unwrap();
    let (mut workbench, mut all, mut step) = (Workbench::default(), Vec::new(), vec![0; step]);
    let length = stream.remaining();
    loop {
        let done = stream.send_to(&ours, &mut workbench).unwrap();
        while let Ok(taken @ 1..) = theirs.read(&mut step) {
            all.extend_from_slice(&step[..taken]);
            if !done && all.len() % 3 != 0 {
                break; // so that the sender continues when there is little room
            }
        }
        if done {
            assert_eq!(stream.remaining(), 0);
            assert_eq!(all.len() as u64, length, "as long as it was said to be");
            return all;
        }
    }
}

/// Returns the payload offset and the keys for a sender that continues after `wire` bytes of a payload's records.
pub fn rest(keys: &Keys, wire: usize) -> (u64, Keys) {
    let each = usize::from(keys.content_bytes) + 22;
    let (whole, skip) = ((wire / each) as u64, (wire % each) as u16);
    let first_record = keys.first_record + whole;
    (whole * u64::from(keys.content_bytes), Keys { first_record, skip, ..keys.clone() })
}
