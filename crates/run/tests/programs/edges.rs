//! A program may read all that FIONREAD has reported, and then wait for an edge (EPOLLET) without another read, as
//! nginx does. Then the library must have left no part of a *frame* in the socket (frames carry the bytes and
//! references of a connection under `shunt run`). While one byte of a received packet is unread, the kernel keeps the
//! memory of the whole packet. This may keep the window closed for the rest of the frame, so that no edge ever comes. A
//! *reference* goes over a connection in place of bytes. The receiver fetches these bytes from the sender's machine if
//! it needs them.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use shunt_odb::frame::{PREAMBLE, Sending};
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_odb::store::Limits;

use crate::bed::{Bed, Program, free_address};

/// Sends the frames that it is given. It does not run under `shunt run`, but marks its socket (SHUNT_SPEAK). So its
/// handshake says that it runs under `shunt run`.
const SPEAKS: &str = "
import socket, sys
sock = socket.socket()
sock.setsockopt(0x53485554, 16, (1).to_bytes(4, 'little'))
sock.connect(('127.0.0.1', int(sys.argv[1])))
sock.sendall(sys.stdin.buffer.read(int(sys.argv[2])))
sys.stdin.buffer.read(1)
";

const READS: &str = "
import array, fcntl, select, socket, sys, termios
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
sock = listener.accept()[0]
sock.setblocking(False)
edges = select.epoll()
edges.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
assert edges.poll(20)
there = array.array('i', [0])
while there[0] < 100:
    fcntl.ioctl(sock, termios.FIONREAD, there)
assert there[0] == 100, there
assert sock.recv(60) == b'x' * 60 and sock.recv(40) == b'x' * 40
print(bool(select.select([sock], [], [], 0)[0]), flush=True)
";

/// Returns a connection's preamble and a frame with a hundred bytes, followed by the first `more` bytes of a frame with
/// a reference.
fn frames(more: usize) -> Vec<u8> {
    let mut sending = Sending::default();
    sending.real(100);
    let mut bytes = sending.owed().to_vec();
    assert!(bytes.starts_with(&PREAMBLE));
    bytes.extend([b'x'; 100]);
    sending.sent(bytes.len());
    let payload = PayloadId { holder: Holder::named("m0"), segment: 1, slot: 1, secret: 1 };
    sending.reference(&Reference { payload, weight: Weight::WHOLE, offset: 0, length: 8192 });
    bytes.extend(&sending.owed()[..more]);
    bytes
}

#[test]
fn nothing_of_a_frame_is_left_behind_what_a_program_was_told_of() {
    let bed = Bed::new(Limits::default());
    for more in [0, 3, 8, 9, 29, 60] {
        let (port, bytes) = (free_address().port().to_string(), frames(more));
        let mut reads = bed.under_shunt("python3");
        reads.args(["-B", "-c", READS, &port]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut reads = Program(reads.spawn().unwrap());
        let mut said = BufReader::new(reads.0.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "listening");
        let mut speaks = bed.plain("python3");
        speaks.args(["-B", "-c", SPEAKS, &port, &bytes.len().to_string()]).stdin(Stdio::piped());
        let mut speaks = Program(speaks.spawn().unwrap());
        speaks.0.stdin.as_mut().unwrap().write_all(&bytes).unwrap();
        let left = said.next().map(Result::unwrap);
        assert_eq!(left.as_deref(), Some("False"), "{more} bytes of a frame are left");
        drop(speaks.0.stdin.take());
    }
}
