//! Tests of a server that writes on, and closes, while another machine sends a payload. The server's own kernel keeps
//! back what the server writes until the payload is complete. A *region* is the range of sequence numbers that the
//! payload takes.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::steered::*;

/// One response: a payload, and what the server writes before and behind it.
struct Response {
    header: Vec<u8>,
    payload: Vec<u8>,
    footer: Vec<u8>,
}

impl Response {
    fn new(turn: u64, payload_bytes: usize, footer_bytes: usize) -> Self {
        let header = format!("header {turn}\n").into_bytes();
        Self { header, payload: payload(turn, payload_bytes), footer: payload(turn + 77, footer_bytes) }
    }

    fn whole(&self) -> Vec<u8> {
        [&self.header[..], &self.payload, &self.footer].concat()
    }
}

/// Writes a header, and begins a region behind it.
fn begin_behind(steered: &Steered, server: &TcpStream, turn: u64, response: &Response) -> State {
    let mut header: &TcpStream = server;
    header.write_all(&response.header).expect("the header fits");
    append(server, turn, response.payload.len() as u64).expect("SHUNT_APPEND");
    let state = steered.answer();
    assert_eq!((state.handoff, state.status, state.acked), (turn, 1, 0));
    state
}

/// Writes as much as the kernel takes without waiting. Returns the number of bytes.
fn write_some(server: &mut TcpStream, bytes: &[u8]) -> usize {
    server.set_nonblocking(true).expect("non-blocking");
    let mut taken = 0;
    while taken < bytes.len() {
        match server.write(&bytes[taken..]) {
            Ok(now) => taken += now,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("after {taken} bytes: {error}"),
        }
    }
    server.set_nonblocking(false).expect("blocking");
    taken
}

/// Serves responses, each given by the lengths of its payload and footer, and closes at the end. The server writes as
/// much of each footer as its kernel takes. Only then, after the time `wait`, does anybody send the payload.
fn serve(steered: &mut Steered, wait: Duration, responses: &[(usize, usize)]) {
    let (mut server, mut client) = steered.connect();
    let responses: Vec<Response> = (1..).zip(responses).map(|(turn, (a, b))| Response::new(turn, *a, *b)).collect();
    let expected: Vec<Vec<u8>> = responses.iter().map(Response::whole).collect();
    let reader = std::thread::spawn(move || {
        for expected in &expected {
            client.write_all(b"next").expect("the request goes out");
            expect(&mut client, expected);
        }
        assert_eq!(ending(&mut client).expect("a clean end"), 0);
    });
    let mut sending = Vec::new();
    for (turn, response) in (1..).zip(&responses) {
        server.read_exact(&mut [0; 4]).expect("the request comes in");
        let state = begin_behind(steered, &server, turn, response);
        let taken = write_some(&mut server, &response.footer);
        let is_last = turn as usize == responses.len();
        std::thread::sleep(wait); // part of the test: nobody sends the payload for this time
        sending.push(steered.send(&state, &response.payload));
        server.write_all(&response.footer[taken..]).expect("the rest of the footer");
        if is_last {
            break;
        }
        assert_eq!(steered.event(), (turn, response.payload.len() as u64, 1));
        sending.pop().expect("one").finish();
    }
    drop(server);
    assert_eq!(steered.event().2, 1);
    sending.pop().expect("one").finish();
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert_eq!(steered.count("fe_completed"), responses.len() as u64);
    for nothing in ["fe_drop_early_write", "fe_out_fin_to_rst", "fe_cancelled", "fe_drop_rewrite"] {
        assert_eq!(steered.count(nothing), 0, "{nothing}");
    }
}

#[test]
fn bytes_written_behind_a_payload_arrive_behind_it() {
    let mut steered = Steered::new();
    serve(&mut steered, Duration::ZERO, &[(100_000, 5), (1, 0), (1_000_000, 3000), (65_536, 4_000_000), (4096, 7)]);
    assert!(steered.count("fe_out_waits") > 0, "{:?}", steered.counted());
}

#[test]
fn bytes_behind_a_payload_wait_until_the_payload_is_complete() {
    let mut steered = Steered::ipv6();
    serve(&mut steered, Duration::from_secs(3), &[(100_000, 5), (300_000, 500_000)]);
    // Once the server's kernel knows that there is no room, it only probes.
    assert!(steered.count("fe_out_waits") < 40, "{:?}", steered.counted());
}

#[test]
fn a_server_that_has_closed_is_waited_for() {
    let mut steered = Steered::new();
    let (server, mut client) = steered.connect();
    let response = Response::new(1, 200_000, 0);
    let state = begin_behind(&steered, &server, 1, &response);
    drop(server);
    std::thread::sleep(Duration::from_secs(6)); // part of the test: the kernel repeats the FIN a few times meanwhile
    let sending = steered.send(&state, &response.payload);
    expect(&mut client, &response.whole());
    assert_eq!(ending(&mut client).expect("a clean end"), 0);
    sending.finish();
}

#[test]
fn a_region_grows_until_something_is_written_behind_it() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    let response = Response::new(1, 90_000, 9);
    server.write_all(&response.header).expect("the header fits");
    append(&server, 1, 40_000).expect("SHUNT_APPEND");
    let state = steered.answer();
    append(&server, 1, 50_000).expect("it grows");
    assert!(append(&server, 2, 50_000).is_err(), "another's");
    server.write_all(&response.footer).expect("footer");
    assert!(append(&server, 1, 1).is_err(), "something is behind it");
    let sending = steered.send(&state, &response.payload);
    expect(&mut client, &response.whole());
    assert_eq!(steered.event(), (1, 90_000, 1));
    sending.finish();
    assert_eq!((steered.count("fe_begun"), steered.count("fe_appended")), (1, 1));
}

#[test]
fn a_region_that_nobody_sends_is_taken_back() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    for turn in 1..=9 {
        let response = Response::new(turn, 20_000, 9);
        begin_behind(&steered, &server, turn, &response);
        if turn % 2 == 0 {
            assert!(sockopt_undo(&server, turn + 1).is_err(), "another's");
            sockopt_undo(&server, turn).expect("SHUNT_UNDO");
            assert!(sockopt_undo(&server, turn).is_err(), "once");
            server.write_all(&response.payload).expect("its own");
        } else {
            let state = steered.state(&server);
            let sending = steered.send(&state, &response.payload);
            assert_eq!(steered.event(), (turn, 20_000, 1));
            sending.finish();
            assert!(sockopt_undo(&server, turn).is_err(), "the client has it");
        }
        server.write_all(&response.footer).expect("footer");
        expect(&mut client, &response.whole());
    }
    let response = Response::new(10, 20_000, 9);
    begin_behind(&steered, &server, 10, &response);
    server.write_all(&response.footer).expect("footer");
    assert!(sockopt_undo(&server, 10).is_err(), "something is behind it");
}

fn sockopt_undo(server: &TcpStream, handoff: u64) -> std::io::Result<()> {
    shunt_sys::sockopt::set(server, SHUNT_SOL, SHUNT_UNDO, &handoff)
}
