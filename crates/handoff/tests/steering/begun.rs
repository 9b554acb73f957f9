//! Tests of how an agent finds the handoffs of its servers without a system call (`take_begun`). A *flow* is the
//! programs' record of a client connection. A *region* is a range of the connection's sequence numbers that a backend
//! sends, for one handoff.

use std::net::TcpStream;

use shunt_handoff::bpf::{BEGUN_OF_A_RING, FlowKey};
use shunt_sys::sockopt;
use shunt_testbed::wait_for;

use super::programs::key;
use super::steered::*;

/// Key of the flow on which a region has just begun, from the kernel's record of the region.
fn flow(steered: &Steered) -> FlowKey {
    let state = steered.answer();
    key(state.flow.client().socket_addr(), state.flow.server().socket_addr())
}

/// Makes a connection with a region that has begun. Returns the server's end, the client's end, and the flow's key.
fn begun(steered: &Steered, handoff: u64) -> (TcpStream, TcpStream, FlowKey) {
    let (server, client) = steered.connect_and_send_header();
    begin(&server, handoff, 1000).expect("SHUNT_BEGIN");
    let flow = flow(steered);
    (server, client, flow)
}

#[test]
fn a_region_that_has_begun_is_found_once() {
    let mut steered = Steered::new();
    let (_server, _client, flow) = begun(&steered, 1);
    let mut other = flow;
    other.client_port ^= 1;
    let frontend = &mut steered.frontend;
    assert!(!frontend.take_begun(RING, 1, PEER, &other), "another connection");
    assert!(!frontend.take_begun(RING, 1, PEER + 1, &flow), "another peer");
    assert!(!frontend.take_begun(RING, 1 + u64::from(BEGUN_OF_A_RING), PEER, &flow), "another name");
    assert!(!frontend.take_begun(RING + 1, 1, PEER, &flow), "another server");
    assert!(!frontend.take_begun(u32::MAX, 1, PEER, &flow) && !frontend.take_begun(RING, 0, PEER, &flow));
    assert!(frontend.take_begun(RING, 1, PEER, &flow));
    assert!(!frontend.take_begun(RING, 1, PEER, &flow), "what is told again is looked for");
    assert!(frontend.active_region(&flow).expect("a lookup").is_some(), "and found");
}

#[test]
fn a_region_that_was_moved_is_found_by_its_new_name() {
    let mut steered = Steered::new();
    let (server, _client, flow) = begun(&steered, 1);
    let moved = Move { peer: PEER, ring: RING, handoff: 2, from: 10 };
    sockopt::set(&server, SHUNT_SOL, SHUNT_MOVE, &moved).expect("SHUNT_MOVE");
    assert!(steered.frontend.take_begun(RING, 2, PEER, &flow));
}

#[test]
fn a_handoff_that_the_kernel_refused_has_not_begun() {
    let mut steered = Steered::new();
    let (server, _client, flow) = begun(&steered, 1);
    begin(&server, 2, 1000).expect_err("a region is active");
    let beyond = Move { peer: PEER, ring: RING, handoff: 3, from: 1000 };
    sockopt::set(&server, SHUNT_SOL, SHUNT_MOVE, &beyond).expect_err("nothing is left to move");
    assert!([2, 3].into_iter().all(|handoff| !steered.frontend.take_begun(RING, handoff, PEER, &flow)));
    assert!(steered.frontend.take_begun(RING, 1, PEER, &flow));
}

#[test]
fn the_newer_of_two_handoffs_in_one_place_is_found() {
    let mut steered = Steered::new();
    let newer = 1 + u64::from(BEGUN_OF_A_RING);
    let connections = [1, newer].map(|handoff| begun(&steered, handoff));
    let [first, second] = connections.each_ref().map(|(_, _, flow)| *flow);
    assert!(!steered.frontend.take_begun(RING, 1, PEER, &first));
    assert!(steered.frontend.take_begun(RING, newer, PEER, &second));
}

#[test]
fn a_handoff_that_is_over_is_not_found() {
    let mut steered = Steered::new();
    let over = |steered: &Steered, handoff: u64, end: &dyn Fn(&TcpStream)| {
        let (server, client, flow) = begun(steered, handoff);
        end(&server);
        if handoff > 1 {
            steered.answer();
        }
        (server, client, flow)
    };
    let take = Take { ring: RING, when: 0, handoff: 3 };
    let moved = Move { peer: PEER, ring: RING, handoff: 4, from: 10 };
    let ended = [
        (1, over(&steered, 1, &|server| sockopt::set(server, SHUNT_SOL, SHUNT_CANCEL, &0u32).expect("SHUNT_CANCEL"))),
        (2, over(&steered, 2, &|server| sockopt::set(server, SHUNT_SOL, SHUNT_MOVE, &moved).expect("SHUNT_MOVE"))),
        (3, over(&steered, 3, &|server| sockopt::set(server, SHUNT_SOL, SHUNT_TAKE, &take).expect("SHUNT_TAKE"))),
    ];
    for (handoff, (.., flow)) in &ended {
        assert!(!steered.frontend.take_begun(RING, *handoff, PEER, flow), "{handoff}");
    }
    let (server, _client) = steered.connect_and_send_header();
    append(&server, 5, 1000).expect("SHUNT_APPEND");
    let undone = flow(&steered);
    sockopt::set(&server, SHUNT_SOL, SHUNT_UNDO, &5u64).expect("SHUNT_UNDO");
    assert!(!steered.frontend.take_begun(RING, 5, PEER, &undone));
}

#[test]
fn handoffs_of_an_earlier_ring_are_not_found_in_the_next() {
    let mut steered = Steered::new();
    let (_server, _client, flow) = begun(&steered, 1);
    steered.frontend.create_ring(RING, 0).expect("create_ring");
    assert!(!steered.frontend.take_begun(RING, 1, PEER, &flow));
}

#[test]
fn a_region_whose_client_has_reset_has_not_begun() {
    let mut steered = Steered::new();
    let (_server, client, flow) = begun(&steered, 1);
    rustix::net::sockopt::set_socket_linger(&client, Some(std::time::Duration::ZERO)).expect("SO_LINGER");
    drop(client);
    wait_for("the client's reset has come", || steered.count("fe_client_reset") == 1).unwrap();
    assert!(!steered.frontend.take_begun(RING, 1, PEER, &flow));
}
