//! Tests of the requests that a server may make, and of its flow afterwards. A *flow* is the record of a client
//! connection. A *region* is a range of the client's sequence numbers that a backend sends: one payload.

use shunt_decisions::*;

use super::connection::*;

const START: u32 = 1000;
const ROOM: u32 = 1 << 20;

fn active() -> Server {
    Server::with_region(START - 100, ROOM, 5000)
}

fn take_it(server: &mut Server, when: u32) -> Counter {
    take(&mut server.flow, HANDOFF, when)
}

#[test]
fn a_flow_has_one_active_region_at_a_time() {
    let mut server = active();
    assert_eq!(server.begin(5000), Counter::FE_REFUSED_ACTIVE);
    server.route(&server.ack(START + 5000));
    server.send(100);
    assert_eq!(server.begin(5000), Counter::FE_BEGUN);
    assert_eq!(server.start(), START + 5000 + 100);
}

#[test]
fn not_before_the_servers_own_bytes_have_left() {
    let mut server = Server::new(START, ROOM);
    server.connection.write_seq += 1;
    assert_eq!(server.begin(5000), Counter::FE_REFUSED_UNSENT);
}

#[test]
fn not_on_a_connection_that_is_over() {
    let mut server = active();
    assert!(cancel(&mut server.flow, HANDOFF));
    assert_eq!(server.begin(5000), Counter::FE_REFUSED_ENDED);
}

#[test]
fn not_without_proof_that_packets_pass() {
    let mut server = Server::new(START, ROOM);
    let unseen = Asked { seen_to_begin: false, ..server.asked() };
    let mut flow = new_flow(&unseen, 1);
    let wanted = Begin { peer: PEER, ring: 0, length: 5000, handoff: HANDOFF };
    assert_eq!(begin(&mut flow, &wanted, &unseen), Counter::FE_REFUSED_UNPROVEN);

    server.flow = flow;
    server.send(100);
    server.route(&server.ack(START + 100));
    server.socket.snd_una = START + 100;
    let unseen = Asked { seen_to_begin: false, ..server.asked() };
    let mut flow = server.flow;
    assert_eq!(begin(&mut flow, &wanted, &unseen), Counter::FE_BEGUN, "both ways have been seen since");
}

#[test]
fn a_handshake_is_proof_for_the_socket_that_it_numbers_and_for_a_minute() {
    let socket = Socket { rcv_nxt: 4, bytes_received: 8, snd_una: 100, bytes_acked: 50, ..Socket::default() };
    let seen = Handshake { client_isn: 4u32.wrapping_sub(9), server_isn: 49, answered: 1, ..Handshake::default() };
    let minute = u64::from(HANDSHAKE_SECONDS) * 1_000_000_000;
    assert!(is_handshake_of(&seen, &socket, minute - 1));
    assert!(!is_handshake_of(&seen, &socket, minute));
    assert!(!is_handshake_of(&Handshake { answered: 0, ..seen }, &socket, 0));
    assert!(!is_handshake_of(&Handshake { server_isn: 50, ..seen }, &socket, 0));
    assert!(!is_handshake_of(&Handshake { client_isn: 0, ..seen }, &socket, 0));
}

#[test]
fn a_new_region_tells_what_its_backend_needs() {
    let mut server = active();
    let state = describe(&server.flow);
    assert_eq!((state.handoff, state.status, state.regions), (HANDOFF, SHUNT_REGION_ACTIVE, 1));
    assert_eq!((state.flow.start, state.flow.rcv_nxt, state.flow.snd_wnd), (START, RCV_NXT, ROOM - 100));
    assert_eq!((u32::from(state.flow.mss), state.flow.snd_cwnd, state.flow.srtt_us), (MSS, 10, 20_000));
    assert_eq!(u32::from(state.flow.options) & SHUNT_OPTION_WORD, 0);
    assert_eq!(state.shut, 0);

    let full = Packet { window: 0, ..server.ack(START + 10) };
    server.route(&full);
    assert_eq!(describe(&server.flow).shut, 1, "its client takes nothing now");
}

#[test]
fn a_longer_payload_than_the_clients_room_needs_a_word() {
    let server = Server::with_region(START - 100, 4096, 4096);
    assert_eq!(u32::from(describe(&server.flow).flow.options) & SHUNT_OPTION_WORD, SHUNT_OPTION_WORD);
}

/// A second backend continues, and is told how many bytes the client may have from the first one.
#[test]
fn another_backend_may_continue_a_region() {
    let mut server = active();
    server.route(&server.ack(START + 1000));
    let to = Move { peer: PEER + 1, ring: 0, from: 1000, handoff: HANDOFF + 1 };
    let mut flow = server.flow;
    assert_eq!(move_on(&mut flow, &to, &server.asked()), Counter::FE_MOVED);
    let state = describe(&flow);
    assert_eq!((state.handoff, state.flow.start, state.flow.ahead), (HANDOFF + 1, START + 1000, ROOM));
    assert_eq!(move_on(&mut flow, &Move { from: 5000, ..to }, &server.asked()), Counter::FE_REFUSED_ARGUMENT);
    assert!(deliver(&mut flow, PEER, HANDOFF).is_none(), "the lost one has no word any more");
}

#[test]
fn a_server_may_take_the_rest_upon_itself() {
    let mut server = active();
    server.route(&server.ack(START + 1000));
    assert_eq!(take_it(&mut server, SHUNT_TAKE_WHOLE), Counter::FE_REFUSED_ENDED, "its client has not got all");
    assert_eq!(take_it(&mut server, SHUNT_TAKE_NONE), Counter::FE_REFUSED_ENDED, "its client has some");
    assert_eq!(take_it(&mut server, SHUNT_TAKE_ALWAYS), Counter::FE_TAKEN);
    let departure = server.send(10);
    assert_eq!((departure.fate, departure.seq), (Fate::TRANSLATED, START + 1000));

    // The lost backend had sent bytes behind a hole: the client's ACK is ahead of what the server's kernel has sent.
    let route = server.route(&server.ack(START + 3000));
    assert_eq!(route.ack, START + 10, "all that its kernel has sent");
}

/// SHUNT_UNDO takes back a region of which the client has acknowledged nothing.
#[test]
fn a_growing_payload_is_taken_back_where_the_client_has_nothing_of_it() {
    let mut server = Server::new(START - 100, ROOM);
    server.send(100);
    let wanted = Begin { peer: PEER, ring: 0, length: 5000, handoff: HANDOFF };
    let mut flow = server.flow;
    assert_eq!(append(&mut flow, &wanted, &server.asked()), Counter::FE_BEGUN);
    assert_eq!(append(&mut flow, &wanted, &server.asked()), Counter::FE_APPENDED);
    server.flow = flow;
    assert_eq!(server.newest().length, 10_000);

    assert_eq!(undo(&mut flow, HANDOFF, &server.connection), Counter::FE_UNDONE);
    assert_eq!(undo(&mut flow, HANDOFF, &server.connection), Counter::FE_REFUSED_ENDED);

    server.route(&server.ack(START + 1));
    let mut flow = server.flow;
    assert_eq!(undo(&mut flow, HANDOFF, &server.connection), Counter::FE_REFUSED_ENDED);
}

/// When the server has sent 1 GiB since the last payload, the client's numbers are no longer compared with that
/// payload's end, but with a later point (an anchor).
#[test]
fn sequence_spaces_hold_behind_many_bytes_of_the_servers_own() {
    let mut server = active();
    server.route(&server.ack(START + 5000));
    for _ in 0..100 {
        server.send(100_000_000);
        let end = server.socket.snd_nxt.wrapping_add(5000);
        assert_eq!(server.route(&server.ack(end)).ack, server.socket.snd_nxt);
        server.socket.snd_una = server.socket.snd_nxt;
    }
    assert_eq!(server.begin(5000), Counter::FE_BEGUN);
    assert_eq!(server.start(), server.connection.write_seq.wrapping_add(5000));
}
