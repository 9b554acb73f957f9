//! Tests of the proof that a handoff needs. In a *handoff*, a backend sends a payload on a client's connection. The
//! client's packets must pass the steering programs with the addresses and sequence numbers of the server's socket
//! (bpf/proof.h). A *flow* is the programs' record of a client connection. A *region* is a range of the connection's
//! sequence numbers that a backend sends. fe_in is the frontend's program on ingress, and fe_out its program on egress.

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use shunt_handoff::Frontend as Loaded;
use shunt_handoff::bpf::*;
use shunt_sys::odb;
use zerocopy::{FromBytes, IntoBytes};

use super::host::ifindex;
use super::programs::*;
use super::segment::*;
use super::steered::{Steered, begin, expect, payload};

/// Status after a refusal for want of proof (SHUNT_REGION_UNPROVEN).
const UNPROVEN: u32 = 4;

// ---- notes of the programs, packet by packet ----

/// Reads the `struct handshake` of a connection between `client()` and `server()`. Returns the initial sequence numbers
/// of the answered SYN and of the SYN-ACK, and then 1. All three are 0 while no SYN was answered. `None`: no SYN was
/// noted.
fn handshake(fe: &Frontend) -> Option<[u32; 3]> {
    let key = key(client(), server());
    let bytes = fe.skel.maps.handshakes.lookup(key.as_bytes(), MapFlags::ANY).expect("lookup")?;
    Some([0, 4, 8].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))))
}

fn watch(fe: &Frontend, port: u16) {
    fe.skel.maps.watched_ports.update(&u32::from(port).to_ne_bytes(), &[1], MapFlags::ANY).expect("update");
}

fn syn(seq: u32) -> Segment {
    Segment::ack(client(), server(), seq, 0).flags(SYN).options(&[2, 4, 5, 180])
}

fn syn_ack(seq: u32, ack: u32) -> Segment {
    Segment::ack(server(), client(), seq, ack).flags(SYN | ACK).options(&[2, 4, 5, 180])
}

#[test]
fn a_handshake_is_noted_on_both_ways_where_its_port_is_watched() {
    let mut fe = Frontend::new();
    let pass = |out: Outcome, sent: Segment| assert_eq!((out.verdict, out.segment()), (PASS, sent));
    pass(fe.fe_in(&syn(70)), syn(70));
    assert_eq!(handshake(&fe), None, "nobody hands off on that port");
    watch(&fe, server().port());
    pass(fe.fe_out(&syn_ack(900, 71)), syn_ack(900, 71));
    assert_eq!(handshake(&fe), None, "no SYN was seen");
    pass(fe.fe_in(&syn(70)), syn(70));
    assert_eq!(handshake(&fe), Some([0, 0, 0]));
    pass(fe.fe_out(&syn_ack(900, 70)), syn_ack(900, 70));
    assert_eq!(handshake(&fe), Some([0, 0, 0]), "of another SYN");
    pass(fe.fe_out(&syn_ack(900, 71)), syn_ack(900, 71));
    assert_eq!(handshake(&fe), Some([70, 900, 1]));
    pass(fe.fe_in(&syn(70)), syn(70));
    assert_eq!(handshake(&fe), Some([70, 900, 1]), "the same SYN again");
    fe.fe_in(&Segment::ack(client(), server(), 71, 901));
    assert_eq!(handshake(&fe), Some([70, 900, 1]), "what is no SYN notes nothing");
    assert_eq!(fe.counted(), once(&["fe_handshake"]));
    pass(fe.fe_in(&syn(80)), syn(80));
    fe.fe_out(&Segment::ack(server(), client(), 901, 71));
    assert_eq!(handshake(&fe), Some([70, 900, 1]), "a stranger's SYN gets no SYN-ACK");
    pass(fe.fe_in(&syn(90)), syn(90));
    pass(fe.fe_out(&syn_ack(2000, 91)), syn_ack(2000, 91));
    assert_eq!(handshake(&fe), Some([90, 2000, 1]), "a new connection");
    assert_eq!(fe.counted(), once(&["fe_handshake"]));
}

/// fe_in notes the client's ACK numbers. fe_out notes where the server's segments end.
#[test]
fn the_packets_of_a_flow_that_pass_are_recorded() {
    let seen = (FLOW_SEEN_IN | FLOW_SEEN_OUT) as u8;
    let fe =
        Frontend::with_flow(&Flow { server_ack: 77, rcv_nxt: 77, client_ack: 5000, edge: 6000, ..Default::default() });
    fe.fe_in(&Segment::ack(client(), server(), 77, 4000));
    assert_eq!((fe.flow().client_ack, fe.flow().flags & seen), (4000, FLOW_SEEN_IN as u8), "the first that is seen");
    assert_eq!(fe.flow().furthest_ack, 4000);
    fe.fe_in(&Segment::ack(client(), server(), 77, 1999));
    assert_eq!(fe.flow().client_ack, 4000, "older than a window");
    fe.fe_in(&Segment::ack(client(), server(), 77 + (1 << 24), 9000));
    assert_eq!(fe.flow().client_ack, 4000, "what is not in the window is a stranger's");
    fe.fe_in(&Segment::ack(client(), server(), 77, 5000));
    fe.fe_out(&Segment::ack(server(), client(), 5000, 77).payload(&[0; 100]));
    fe.fe_out(&Segment::ack(server(), client(), 5000, 77));
    assert_eq!((fe.flow().client_ack, fe.flow().server_end, fe.flow().flags & seen), (5000, 5100, seen));
    fe.fe_in(&Segment::ack(client(), server(), 77, 4500));
    assert_eq!((fe.flow().client_ack, fe.flow().furthest_ack), (4500, 5000), "one that comes late");
}

// ---- real connections ----

/// Makes a connection on a port for which nobody has called SHUNT_WATCH, so that the programs note no handshake.
fn connect_unwatched(steered: &Steered) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((steered.hosts.frontend_address, 0)).expect("listen");
    steered.connect_by(&listener, listener.local_addr().expect("bound"))
}

/// Sends a request and its answer, and reads both. The client's ACK of the answer may still be on its way.
pub fn exchange(server: &mut TcpStream, client: &mut TcpStream) {
    client.write_all(b"request").expect("a request");
    expect(server, b"request");
    server.write_all(b"header").expect("header");
    expect(client, b"header");
}

/// Checks that SHUNT_BEGIN is refused for want of proof, that the record in the server's BPF ring buffer says so, and
/// that the connection still works.
pub fn refused(steered: &Steered, server: &mut TcpStream, client: &mut TcpStream) {
    let before = steered.count("fe_refused_unproven");
    let error = begin(server, 9, 100).expect_err("no proof");
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    let answer = steered.answer();
    assert_eq!((answer.handoff, answer.status, answer.regions), (9, UNPROVEN, 0));
    assert_eq!(steered.count("fe_refused_unproven"), before + 1);
    assert_eq!(steered.count("fe_begun"), 0);
    let relayed = payload(9, 200_000);
    let (mut writing, sent) = (server.try_clone().expect("dup"), relayed.clone());
    let writer = std::thread::spawn(move || writing.write_all(&sent).expect("relayed"));
    expect(client, &relayed);
    writer.join().expect("all written");
}

pub fn handed_off(steered: &mut Steered, server: &mut TcpStream, client: &mut TcpStream) {
    let body = payload(3, 300_000);
    let mut reading = client.try_clone().expect("dup");
    let read = body.clone();
    let reader = std::thread::spawn(move || expect(&mut reading, &read));
    let sending = steered.hand_off(server, 3, &body);
    assert_eq!(steered.event(), (3, body.len() as u64, 1));
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    sending.finish();
    exchange(server, client);
}

#[test]
fn the_first_response_of_a_watched_port_is_handed_off() {
    for steered in [Steered::new, Steered::ipv6] {
        let mut steered = steered();
        let (mut server, mut client) = steered.connect();
        server.write_all(b"header").expect("the very first bytes of this connection");
        expect(&mut client, b"header");
        handed_off(&mut steered, &mut server, &mut client);
        assert_eq!((steered.count("fe_begun"), steered.count("fe_refused_unproven")), (1, 0));
        assert_eq!(steered.count("fe_handshake"), 1);
    }
}

#[test]
fn a_connection_that_began_unseen_is_handed_off_from_its_second_response_on() {
    for steered in [Steered::new, Steered::ipv6] {
        let mut steered = steered();
        let (mut server, mut client) = connect_unwatched(&steered);
        exchange(&mut server, &mut client);
        refused(&steered, &mut server, &mut client);
        exchange(&mut server, &mut client);
        handed_off(&mut steered, &mut server, &mut client);
        handed_off(&mut steered, &mut server, &mut client);
    }
}

fn change_flow(steered: &Steered, server: &TcpStream, client: &TcpStream, change: impl FnOnce(&mut Flow)) {
    let key = key(client.local_addr().expect("bound"), server.local_addr().expect("bound"));
    let flows = steered.frontend_map("flows");
    let bytes = flows.lookup(key.as_bytes(), MapFlags::LOCK).expect("lookup").expect("a flow");
    let mut flow = Flow::read_from_bytes(&bytes).expect("a flow's size");
    change(&mut flow);
    flows.update(key.as_bytes(), flow.as_bytes(), MapFlags::ANY).expect("update");
}

/// A network that changes the order of packets may deliver an ACK of the last response after the next request.
#[test]
fn an_old_ack_that_comes_late_costs_no_proof() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
    for step in [1000, 1 << 31] {
        change_flow(&steered, &server, &client, |flow| {
            assert_eq!(flow.furthest_ack, flow.client_ack);
            flow.client_ack = flow.client_ack.wrapping_sub(step);
        });
        handed_off(&mut steered, &mut server, &mut client);
    }
}

/// The test changes the flow's `rcv_nxt`, the server's ACK number when the last region began. The server then seems to
/// have acknowledged 7 * 2^29 bytes since, unseen by the programs. Sequence numbers that are so far apart cannot be
/// compared.
#[test]
fn a_flow_whose_last_region_began_long_ago_needs_new_proof() {
    let mut steered = Steered::new();
    let (mut server, mut client) = connect_unwatched(&steered);
    exchange(&mut server, &mut client);
    refused(&steered, &mut server, &mut client);
    change_flow(&steered, &server, &client, |flow| {
        flow.rcv_nxt = flow.rcv_nxt.wrapping_sub(7 << 29);
        flow.flags &= !((FLOW_SEEN_IN | FLOW_SEEN_OUT) as u8);
    });
    refused(&steered, &mut server, &mut client);
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
}

#[test]
fn the_first_refusal_has_its_port_watched() {
    let mut steered = Steered::new();
    let listener = TcpListener::bind((steered.hosts.frontend_address, 0)).expect("listen");
    let at = listener.local_addr().expect("bound");
    let (mut server, mut client) = steered.connect_by(&listener, at);
    exchange(&mut server, &mut client);
    refused(&steered, &mut server, &mut client);
    let (mut server, mut client) = steered.connect_by(&listener, at);
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
}

#[test]
fn a_client_of_an_interface_that_is_not_listed_is_relayed_to() {
    let mut steered = Steered::new();
    steered.frontend_config.interfaces = vec![ifindex("backends")];
    steered.frontend = Loaded::load(&steered.frontend_config).expect("the frontend loads again");
    let (mut server, mut client) = steered.connect();
    for _ in 0..3 {
        exchange(&mut server, &mut client);
        refused(&steered, &mut server, &mut client);
    }
}

/// Returns the map of handshakes, the key of a connection in it, and the connection's `struct handshake`.
fn noted(steered: &Steered, server: &TcpStream, client: &TcpStream) -> (MapHandle, FlowKey, Vec<u8>) {
    let map = steered.frontend_map("handshakes");
    let key = key(client.local_addr().expect("bound"), server.local_addr().expect("bound"));
    let noted = map.lookup(key.as_bytes(), MapFlags::ANY).expect("lookup").expect("it was noted");
    (map, key, noted)
}

/// The noted handshake has another number than the socket, or no SYN-ACK. It may be of another connection with the same
/// addresses and ports.
#[test]
fn a_handshake_of_other_numbers_is_no_proof() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    exchange(&mut server, &mut client);
    let (map, key, noted) = noted(&steered, &server, &client);
    for at in [0, 4, 8] {
        let mut other = noted.clone();
        other[at] ^= 1;
        map.update(key.as_bytes(), &other, MapFlags::ANY).expect("update");
        refused(&steered, &mut server, &mut client);
        steered.forget(&key);
    }
    map.update(key.as_bytes(), &noted, MapFlags::ANY).expect("update");
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
}

/// The numbers of the socket fit the handshake, and yet the socket may belong to a later connection by now.
#[test]
fn a_handshake_of_long_ago_is_no_proof() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    exchange(&mut server, &mut client);
    let (map, key, noted) = noted(&steered, &server, &client);
    let begun = u64::from_ne_bytes(noted[16..].try_into().expect("8 bytes"));
    let seconds_ago = |seconds: u32| {
        let then = begun.wrapping_sub(u64::from(seconds) * 1_000_000_000);
        map.update(key.as_bytes(), &[&noted[..16], &then.to_ne_bytes()].concat(), MapFlags::ANY).expect("update");
    };
    seconds_ago(HANDSHAKE_SECONDS);
    refused(&steered, &mut server, &mut client);
    steered.forget(&key);
    // The sequence numbers have moved on since, and the flow is forgotten: only the handshake can be proof.
    seconds_ago(0);
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
}

#[test]
fn a_handshake_that_has_aged_proves_again_when_its_server_has_answered() {
    let fe = Frontend::new();
    watch(&fe, server().port());
    fe.fe_in(&syn(70));
    fe.fe_out(&syn_ack(900, 71));
    let key = key(client(), server());
    let mut noted = fe.skel.maps.handshakes.lookup(key.as_bytes(), MapFlags::ANY).expect("lookup").expect("noted");
    let then = u64::from_ne_bytes(noted[16..].try_into().expect("8 bytes"));
    let aged = then.wrapping_sub(u64::from(HANDSHAKE_SECONDS) * 1_000_000_000);
    noted[16..].copy_from_slice(&aged.to_ne_bytes());
    fe.skel.maps.handshakes.update(key.as_bytes(), &noted, MapFlags::ANY).expect("update");
    let answered = || {
        let noted = fe.skel.maps.handshakes.lookup(key.as_bytes(), MapFlags::ANY).expect("lookup").expect("noted");
        u64::from_ne_bytes(noted[16..].try_into().expect("8 bytes"))
    };
    fe.fe_in(&syn(70));
    assert_eq!(answered(), aged, "a SYN of the same number may be a stranger's");
    fe.fe_out(&syn_ack(900, 71));
    assert!(answered() >= then, "its server has answered it");
}

/// A flood of SYNs pushes other connections' handshakes out of the map. Each of these connections then has one response
/// relayed, and loses none.
#[test]
fn a_forgotten_handshake_costs_a_shortcut_and_a_flood_none_to_whom_comes_later() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    exchange(&mut server, &mut client);
    let map = steered.frontend_map("handshakes");
    let ours = key(client.local_addr().expect("bound"), server.local_addr().expect("bound"));
    for n in 0..2 * MAX_HANDSHAKES {
        let mut other = ours;
        other.client_address[8..12].copy_from_slice(&n.to_ne_bytes());
        map.update(other.as_bytes(), &[0; 24], MapFlags::ANY).expect("never full");
    }
    // The kernel decides which handshakes the map forgets, so the test deletes the handshake of its own connection.
    let _ = map.delete(ours.as_bytes());
    refused(&steered, &mut server, &mut client);
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
    let (mut server, mut client) = steered.connect();
    exchange(&mut server, &mut client);
    handed_off(&mut steered, &mut server, &mut client);
}

#[test]
fn watching_is_for_sockets_of_tcp() {
    let steered = Steered::new();
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    assert_eq!(odb::watch(&datagrams).expect_err("UDP").raw_os_error(), Some(libc::EPERM));
    let unbound = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
    odb::watch(unbound.expect("a socket")).expect("a port of 0 is nobody's");
    drop(steered);
}
