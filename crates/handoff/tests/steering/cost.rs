//! Cost of one packet in each steering program, with all data in the cache: `cargo test -p shunt-handoff --test
//! steering -- --ignored --nocapture`. A *flow* is the frontend's record of a client connection. A *sender* is a
//! backend's socket for a client.

use libbpf_rs::{ProgramInput, ProgramMut};
use shunt_handoff::bpf::*;
use shunt_wire::Endpoint;

use super::programs::*;
use super::segment::*;

const REPEAT: u32 = 1_000_000;

fn cost(what: &str, program: &ProgramMut<'_>, segment: &Segment) {
    let frame = segment.to_frame();
    let input = ProgramInput { data_in: Some(&frame), repeat: REPEAT, ..Default::default() };
    let output = program.test_run(input).expect("BPF_PROG_TEST_RUN");
    println!("{what:50} {:5} ns", output.duration.as_nanos());
}

#[test]
#[ignore = "prints, checks nothing"]
fn each_program_costs_what_the_table_says() {
    let fe = Frontend::new();
    let mut flow = Flow { server_ack: 1, client_ack: 5000, ..Default::default() };
    begin(&mut flow, 5000, 5000, 1_000_000, PEER);
    flow.flags |= FLOW_START_ACKED as u8;
    fe.set_flow(&flow);
    // The kernel repeats the runs on one packet, and fe_in addresses this packet to the peer. With a flow for the
    // peer's address, each later run steers the packet again, to the same peer.
    fe.set_flow_of(client(), peer(), &flow);

    let mut stranger = client();
    stranger.set_port(9);
    let ack = |from| Segment::ack(from, server(), 1, 9000).timestamps(3, 4);
    cost("fe_in, no flow", &fe.skel.progs.fe_in, &ack(stranger));
    cost("fe_in, to the backend", &fe.skel.progs.fe_in, &ack(client()));
    let sack = Segment::ack(client(), server(), 1, 9000).timestamps(3, 4).sack(&[(9500, 9600), (9700, 9800)]);
    cost("fe_in, to the backend, SACK", &fe.skel.progs.fe_in, &sack);
    complete(&mut flow);
    fe.set_flow(&flow);
    cost("fe_in, to the frontend, translated", &fe.skel.progs.fe_in, &ack(client()));
    let data = |to| Segment::ack(server(), to, 6000, 1).timestamps(3, 4).payload(&[0; 1400]);
    cost("fe_out, no flow", &fe.skel.progs.fe_out, &data(stranger));
    cost("fe_out, translated", &fe.skel.progs.fe_out, &data(client()));

    let be = Backend::new();
    // The server has the same address as the sender. So a segment that be_out has rewritten as the server's is still
    // the sender's in the next run.
    let us = Endpoint::from(peer());
    let (server_address, server_port) = (us.address.0, u16::from_ne_bytes(us.port_be));
    let slot = SenderSlot { live: 1, server_address, server_port, ts_delta: 1, ..Default::default() };
    be.set_sender(client(), 7001, 1, &slot);
    cost("be_in", &be.skel.progs.be_in, &Segment::ack(client(), peer(), 1, 2).timestamps(3, 4));
    cost("be_out", &be.skel.progs.be_out, &Segment::ack(peer(), client(), 1, 2).timestamps(3, 4));
}
