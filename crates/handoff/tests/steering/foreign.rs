//! Tests of the steering programs on interfaces where a program of somebody else runs before them, and writes into
//! every packet. A packet that passes a steering program a second time has a mark in two fields, and somebody else's
//! program may overwrite one of them. A *flow* is the record of a client connection. A *copy* is a client's packet as
//! fe_in, the frontend's program on ingress, rewrites it for a backend.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHookBuilder, libbpf_sys};
use shunt_handoff::bpf::*;

use super::host::send_frame;
use super::programs::*;
use super::segment::*;

const START: u32 = 5_000;
const LENGTH: u32 = 100_000;
const RCV_NXT: u32 = 77_000;

/// Offsets of the two fields in struct __sk_buff (linux/bpf.h).
const MARK: u64 = 8;
const TC_INDEX: u64 = 44;
const VALUE: u32 = 7;

fn attach(program: BorrowedFd<'_>, ifindex: u32, point: TcAttachPoint, priority: u32) {
    let mut hook = TcHookBuilder::new(program);
    hook.ifindex(ifindex as i32).handle(1).priority(priority).replace(true);
    hook.hook(point).create().and_then(|mut hook| hook.attach()).expect("the program is attached");
}

/// Attaches a program before the steering programs. The program writes [`VALUE`] into a field of each packet, and
/// passes the packet on.
fn overwrite(field: u64, ifindex: u32, point: TcAttachPoint) {
    let program = [
        0x2b7 | u64::from(VALUE) << 32,      // r2 = VALUE
        0x2163 | field << 16,                // *(u32 *)(r1 + field) = r2
        0xb7 | u64::from(PASS as u32) << 32, // r0 = TC_ACT_UNSPEC
        0x95,                                // exit
    ];
    // SAFETY: the strings end with 0. The program has as many instructions of 8 bytes as are passed.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            c"overwrite".as_ptr(),
            c"GPL".as_ptr(),
            program.as_ptr().cast(),
            program.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "the program loads: {}", std::io::Error::last_os_error());
    // SAFETY: this descriptor is new, and nobody else has it.
    let program = unsafe { OwnedFd::from_raw_fd(fd) };
    attach(program.as_fd(), ifindex, point, PRIORITY - 1);
}

fn active() -> Flow {
    let mut flow = Flow { server_ack: RCV_NXT, client_ack: START, client_window: 700, ..Default::default() };
    begin(&mut flow, START, START, LENGTH.into(), PEER);
    flow
}

#[test]
fn one_copy_of_a_packet_goes_to_the_backend() {
    for field in [MARK, TC_INDEX] {
        let mut fe = Frontend::with_flow(&active());
        overwrite(field, fe.host.client_port, TC_INGRESS);
        let fin = Segment::ack(client(), server(), RCV_NXT, START + 1460).flags(ACK | FIN);
        let out = run(&fe.skel.progs.fe_in, fe.host.client_port, &fin.to_frame(), 9);
        assert_eq!((out.verdict, out.segment()), (PASS, Segment { ack: START, ..fin }));
        assert_eq!(out.mark, 9, "the original keeps its mark");
        assert_eq!(fe.copies(1), [Segment::ack(client(), peer(), RCV_NXT, START + 1460)]);
        assert!(fe.copies(0).is_empty());
        assert_eq!(fe.counted(), once(&["fe_in_both", "fe_in_clamped"]));
    }
}

#[test]
fn a_reset_is_spread_once() {
    for field in [MARK, TC_INDEX] {
        let mut fe = Frontend::with_flow(&active());
        attach(fe.skel.progs.fe_out.as_fd(), fe.host.client_port, TC_EGRESS, PRIORITY);
        overwrite(field, fe.host.client_port, TC_EGRESS);
        let fin = Segment::ack(server(), client(), START, RCV_NXT).flags(ACK | FIN);
        let out = fe.fe_out(&fin);
        assert_eq!((out.verdict, out.mark), (PASS, 0));
        let reset = |seq| Segment { seq, ..fin.clone().flags(ACK | RST) };
        let edge = out.segment().seq;
        assert_eq!(out.segment(), reset(edge));
        let clones = fe.host.arrived(2, |segment| segment.to == client());
        assert_eq!(clones, [reset(START), reset(edge - 1)]);
        assert!(fe.host.arrived(0, |segment| segment.to == client()).is_empty());
        assert_eq!(fe.counted(), once(&["fe_out_fin_to_rst", "fe_cancelled"]));
    }
}

#[test]
fn a_probe_leaves_with_its_number() {
    for field in [MARK, TC_INDEX] {
        let flow = active();
        let flow = Flow { flags: flow.flags | FLOW_QUEUES as u8, ..flow };
        let mut fe = Frontend::with_flow(&flow);
        attach(fe.skel.progs.fe_out.as_fd(), fe.host.client_port, TC_EGRESS, PRIORITY);
        overwrite(field, fe.host.client_port, TC_EGRESS);
        let behind = Segment::ack(server(), client(), START, RCV_NXT);
        assert_eq!(fe.fe_out(&behind.clone().payload(b"footer")).verdict, SHOT);
        let probes = fe.host.arrived(1, |segment| segment.to == client());
        assert_eq!(probes, [Segment { seq: START - 1, ..behind }]);
        assert_eq!(fe.counted(), once(&["fe_out_waits"]));
    }
}

#[test]
fn the_reset_of_an_ended_agents_socket_reaches_it() {
    for field in [MARK, TC_INDEX] {
        let mut be = Backend::new();
        attach(be.skel.progs.be_out.as_fd(), be.host.backend_port, TC_EGRESS, PRIORITY);
        attach(be.skel.progs.be_in.as_fd(), be.host.backend_port, TC_INGRESS, PRIORITY);
        overwrite(field, be.host.backend_port, TC_INGRESS);
        let us: SocketAddr = "10.1.0.1:7001".parse().unwrap();
        send_frame("backend0", &Segment::ack(us, client(), START, RCV_NXT).flags(ACK | FIN).to_frame());
        let resets = be.host.arrived(1, |segment| segment.to == us);
        assert_eq!(resets, [Segment::ack(client(), us, RCV_NXT, START).flags(RST | ACK)]);
        assert!(be.host.arrived(0, |segment| segment.to == us).is_empty());
        assert_eq!(be.counted(), once(&["be_drop_stray_out", "be_orphan_reset"]));
    }
}
