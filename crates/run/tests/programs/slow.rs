//! A client that reads a body for longer than a store keeps a payload that nobody asks for. A *store* is the part of an
//! agent that keeps the bodies of its machine's programs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size;
use shunt_odb::store::Limits;
use shunt_testbed::assert_same_bytes;

use crate::bed::{Bed, Program, free_address, wait_until_listening};
use crate::nginx::{proxy_to, tier};

const LEASE: Duration = Duration::from_secs(5);
const BODY_BYTES: usize = 16 << 20;
/// Number of bytes of one read, and pause after it. With these, the whole body takes at least three leases.
const PIECE: usize = 64 << 10;
const PAUSE: Duration = Duration::from_millis(60);

/// Makes a body in pieces, as programs do, and writes them as fast as it can.
const BACKEND: &str = r"
import socket, sys
server = socket.create_server(('127.0.0.1', int(sys.argv[1])))
while True:
    client, _ = server.accept()
    if not client.recv(65536):
        continue
    client.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n' % int(sys.argv[2]))
    for at in range(0, int(sys.argv[2]), 1 << 18):
        client.sendall(b''.join((at + word).to_bytes(8, 'little') for word in range(0, 1 << 18, 8)))
    client.close()
";

#[test]
fn a_slow_client_gets_all_of_a_body_that_was_made_at_once() {
    let lease_ms = u64::try_from(LEASE.as_millis()).unwrap();
    let bed = Bed::of(3, Limits { lease_ms, ..Limits::default() });
    let address = free_address();
    let mut backend = bed.machine(2).under_shunt("python3");
    backend.args(["-c", BACKEND, &address.port().to_string(), &BODY_BYTES.to_string()]).stdin(Stdio::null());
    let _backend = Program(backend.spawn().unwrap());
    wait_until_listening(address);
    let unbuffered = "proxy_buffering off;";
    let (http, server) = proxy_to(address, unbuffered);
    let intermediate = tier(&bed, "intermediate", &http, &server, true);
    let (http, server) = proxy_to(intermediate.address, unbuffered);
    let frontend = tier(&bed, "frontend", &http, &server, true);

    let mut client = TcpStream::connect(frontend.address).unwrap();
    set_socket_recv_buffer_size(&client, PIECE).unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    let (begun, mut got, mut piece) = (Instant::now(), Vec::new(), vec![0; PIECE]);
    loop {
        let bytes = client.read(&mut piece).unwrap();
        if bytes == 0 {
            break;
        }
        got.extend_from_slice(&piece[..bytes]);
        std::thread::sleep(PAUSE.mul_f64(bytes as f64 / PIECE as f64)); // the subject of the test: a slow client
    }
    let body = got.windows(4).position(|four| four == b"\r\n\r\n").map(|head| &got[head + 4..]).unwrap();
    let whole: Vec<u8> = (0..BODY_BYTES as u64).step_by(8).flat_map(u64::to_le_bytes).collect();
    assert_same_bytes(body, &whole, format_args!("the body, after {:?}", begun.elapsed()));
    assert!(begun.elapsed() > 2 * LEASE, "the client's pauses are shorter: {:?}", begun.elapsed());
    let referred = bed.machine(2).program_counted("python3", "sent_by_reference");
    assert!(referred > BODY_BYTES as u64 / 2, "{referred} bytes went by reference");
}
