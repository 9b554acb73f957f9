//! Tests of client packets with IP options or extension headers, and of fragments (bpf/plain.h). A *sender* is a
//! backend's socket for a client.

use std::io::Write;

use shunt_handoff::bpf::*;
use shunt_sys::sockopt;

use super::programs::*;
use super::proof::{exchange, handed_off};
use super::segment::*;
use super::steered::{Steered, expect, payload};

const START: u32 = 5_000;
const LENGTH: u32 = 100_000;
const RCV_NXT: u32 = 77_000;
const ETHERNET: usize = 14;

fn flow() -> Flow {
    let mut flow = Flow { server_ack: RCV_NXT, client_ack: START - 300, handoff: 41, ..Default::default() };
    begin(&mut flow, START, START, LENGTH.into(), PEER);
    flow
}

fn finished() -> Flow {
    let mut flow = flow();
    complete(&mut flow);
    flow.client_ack = START + LENGTH;
    flow
}

fn from_client(ack: u32) -> Segment {
    Segment::ack(client(), server(), RCV_NXT, ack).timestamps(7, 8)
}

/// The same segment between IPv6 addresses.
fn ipv6(segment: Segment) -> Segment {
    let [from, to] = [client_ipv6(), server_ipv6()];
    Segment { from, to, ..segment }
}

fn client_ipv6() -> std::net::SocketAddr {
    "[fd00::2]:40000".parse().unwrap()
}

fn server_ipv6() -> std::net::SocketAddr {
    "[fd00::1]:80".parse().unwrap()
}

fn is_ipv4(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0]
}

fn seal(frame: &mut [u8]) {
    let bytes = usize::from(frame[ETHERNET] & 15) * 4;
    let ip = &mut frame[ETHERNET..ETHERNET + bytes];
    ip[10..12].fill(0);
    let sum = ip.chunks(2).fold(0u32, |sum, word| sum + u32::from(u16::from_be_bytes([word[0], word[1]])));
    let folded = (sum & 0xffff) + (sum >> 16);
    let sum = !((folded & 0xffff) + (folded >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
}

/// Adds options (IPv4, a multiple of 4 bytes) or extension headers (IPv6, a multiple of 8 bytes) to a frame. `kind` is
/// the type of the first extension header.
fn with_extra(frame: &[u8], kind: u8, extra: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let (header, length_at, added) = if is_ipv4(&frame) { (20, 2, extra.len()) } else { (40, 4, extra.len()) };
    frame.splice(ETHERNET + header..ETHERNET + header, extra.iter().copied());
    let at = ETHERNET + length_at;
    let bytes = u16::from_be_bytes([frame[at], frame[at + 1]]) + added as u16;
    frame[at..at + 2].copy_from_slice(&bytes.to_be_bytes());
    if is_ipv4(&frame) {
        frame[ETHERNET] += (added / 4) as u8;
        seal(&mut frame);
    } else {
        frame[ETHERNET + 6] = kind;
    }
    frame
}

/// Removes what `with_extra` has added.
fn without_extra(frame: &[u8], bytes: usize) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let (header, length_at) = if is_ipv4(&frame) { (20, 2) } else { (40, 4) };
    frame.drain(ETHERNET + header..ETHERNET + header + bytes);
    let at = ETHERNET + length_at;
    let length = u16::from_be_bytes([frame[at], frame[at + 1]]) - bytes as u16;
    frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
    if is_ipv4(&frame) {
        frame[ETHERNET] -= (bytes / 4) as u8;
        seal(&mut frame);
    } else {
        frame[ETHERNET + 6] = 6;
    }
    frame
}

/// Cases of extra bytes: a description, whether they are for IPv6, the type of the first extension header, and the
/// bytes.
fn extras() -> Vec<(&'static str, bool, u8, Vec<u8>)> {
    let padded = |next: u8, eights: u8| {
        let mut bytes = vec![next, eights, 1, 4 + eights * 8, 0, 0, 0, 0];
        bytes.resize(8 + usize::from(eights) * 8, 0);
        bytes
    };
    vec![
        ("NOPs", false, 0, vec![1; 4]),
        ("router alert and the longest", false, 0, [vec![148, 4, 0, 0], vec![1; 36]].concat()),
        ("hop-by-hop", true, 0, padded(6, 0)),
        ("destination options", true, 60, padded(6, 2)),
        ("hop-by-hop, routing, destination options", true, 0, [padded(43, 0), padded(60, 0), padded(6, 1)].concat()),
        ("an atomic fragment", true, 44, vec![6, 0, 0, 0, 1, 2, 3, 4]),
    ]
}

fn set(fe: &Frontend, is_ipv6: bool, flow: &Flow) {
    if is_ipv6 {
        fe.set_peer(PEER, "[fd01::2]:7001".parse().unwrap());
        fe.set_flow_of(client_ipv6(), server_ipv6(), flow);
    } else {
        fe.set_peer(PEER, peer());
        fe.set_flow(flow);
    }
}

#[test]
fn options_between_ip_and_tcp_header_change_nothing() {
    let fe = Frontend::with_flow(&flow());
    for (what, is_ipv6, kind, extra) in extras() {
        let version = |segment: Segment| if is_ipv6 { ipv6(segment) } else { segment };
        let run = |segment: &Segment| {
            let frame = with_extra(&segment.to_frame(), kind, &extra);
            run(&fe.skel.progs.fe_in, fe.host.client_port, &frame, 0)
        };
        let to = if is_ipv6 { "[fd01::2]:7001".parse().unwrap() } else { peer() };
        let translated = |segment: &Segment, ack: u32, what: &str| {
            let out = run(segment);
            assert_eq!(out.verdict, PASS, "{what}");
            let seen = Segment::from_frame(&without_extra(&out.frame, extra.len()));
            assert_eq!(seen, Segment { ack, ..segment.clone() }, "{what}");
        };
        // Behind a payload, an upload is translated and otherwise unchanged.
        set(&fe, is_ipv6, &finished());
        let upload = version(from_client(START + LENGTH + 5).payload(&[3; 999]));
        translated(&upload, START + 5, what);
        assert!(fe.copies(0).is_empty());

        // Inside a payload, the stack gets the packet translated and otherwise unchanged, and the backend gets the TCP
        // header alone.
        set(&fe, is_ipv6, &flow());
        let data = version(from_client(START + 2000).payload(b"abc"));
        translated(&data, START, what);
        let steered = |ack| Segment { to, ..version(from_client(ack)) };
        assert_eq!(fe.copies(1), [steered(START + 2000)], "{what}");
        let out = run(&version(from_client(START + 4000)));
        assert_eq!((out.verdict, out.segment()), (REDIRECT, steered(START + 4000)), "{what}");
    }
}

/// A packet whose length field ends before its TCP header does is malformed. The stack gets it unchanged, and drops it.
#[test]
fn a_packet_that_is_shorter_than_its_headers_is_not_steered() {
    let mut fe = Frontend::with_flow(&flow());
    set(&fe, true, &flow());
    let padded = [6, 0, 1, 4, 0, 0, 0, 0];
    let plain = from_client(START + 3000).payload(b"abc");
    let frames = [
        (plain.to_frame(), 2, [0, 10, 19, 20, 51]),
        (with_extra(&plain.to_frame(), 0, &[1; 40]), 2, [0, 20, 59, 60, 91]),
        (ipv6(plain.clone()).to_frame(), 4, [0, 1, 19, 20, 31]),
        (with_extra(&ipv6(plain).to_frame(), 0, &padded), 4, [0, 1, 7, 8, 39]),
    ];
    for (frame, length_at, lengths) in frames {
        for length in lengths {
            let mut short = frame.clone();
            short[ETHERNET + length_at..ETHERNET + length_at + 2].copy_from_slice(&u16::to_be_bytes(length));
            if is_ipv4(&short) {
                seal(&mut short);
            }
            let out = run(&fe.skel.progs.fe_in, fe.host.client_port, &short, 0);
            assert_eq!((out.verdict, &out.frame), (PASS, &short), "length {length}");
        }
    }
    assert!(fe.counted().is_empty() && fe.copies(0).is_empty());
}

/// Cuts a frame's IP payload after `first` bytes, a multiple of 8, and returns the two fragments.
fn fragments(frame: &[u8], first: usize) -> [Vec<u8>; 2] {
    let header = if is_ipv4(frame) { 20 } else { 40 };
    let (head, payload) = frame.split_at(ETHERNET + header);
    let fragment = |payload: &[u8], offset: usize, more: bool| {
        let mut frame = head.to_vec();
        if is_ipv4(&frame) {
            let bytes = (20 + payload.len()) as u16;
            frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&bytes.to_be_bytes());
            let field = (offset / 8) as u16 | if more { 0x2000 } else { 0 };
            frame[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&field.to_be_bytes());
            seal(&mut frame);
        } else {
            let field = offset as u16 | u16::from(more);
            frame[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&(payload.len() as u16 + 8).to_be_bytes());
            frame[ETHERNET + 6] = 44;
            frame.extend([6, 0]);
            frame.extend(field.to_be_bytes());
            frame.extend([9, 9, 9, 9]);
        }
        frame.extend(payload);
        frame
    };
    [fragment(&payload[..first], 0, true), fragment(&payload[first..], first, false)]
}

/// Joins what `fragments` has cut.
fn reassemble(first: &[u8], second: &[u8]) -> Vec<u8> {
    let mut frame = first.to_vec();
    if is_ipv4(first) {
        frame.extend(&second[ETHERNET + 20..]);
        let bytes = (frame.len() - ETHERNET) as u16;
        frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&bytes.to_be_bytes());
        frame[ETHERNET + 6..ETHERNET + 8].fill(0);
        seal(&mut frame);
        return frame;
    }
    frame.extend(&second[ETHERNET + 48..]);
    frame.drain(ETHERNET + 40..ETHERNET + 48);
    let bytes = (frame.len() - ETHERNET - 40) as u16;
    frame[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&bytes.to_be_bytes());
    frame[ETHERNET + 6] = 6;
    frame
}

#[test]
fn the_first_fragment_is_translated_and_the_checksum_stays_right() {
    let mut fe = Frontend::with_flow(&flow());
    for is_ipv6 in [false, true] {
        let version = |segment: Segment| if is_ipv6 { ipv6(segment) } else { segment };
        let to = if is_ipv6 { "[fd01::2]:7001".parse().unwrap() } else { peer() };
        for (state, ack, local, copies) in
            [(finished(), START + LENGTH + 5, START + 5, 0), (flow(), START + 2000, START, 1)]
        {
            set(&fe, is_ipv6, &state);
            let upload = version(from_client(ack).flags(ACK | PSH).payload(&(0..=255).collect::<Vec<u8>>()));
            let [first, second] = fragments(&upload.to_frame(), 64);
            let [first_out, second_out] =
                [&first, &second].map(|frame| run(&fe.skel.progs.fe_in, fe.host.client_port, frame, 0));
            assert_eq!((first_out.verdict, second_out.verdict), (PASS, PASS));
            assert_eq!(second_out.frame, second, "it has no TCP header");
            let whole = Segment::from_frame(&reassemble(&first_out.frame, &second_out.frame));
            assert_eq!(whole, Segment { ack: local, ..upload.clone() });
            let expected = vec![Segment { to, ..version(from_client(ack)) }; copies];
            assert_eq!(fe.copies(copies), expected, "a whole packet without data");
        }
        // This fragment ends in the TCP header (RFC 1858), and is not steered.
        let tiny = &fragments(&version(from_client(START + 3000).payload(&[0; 64])).to_frame(), 16)[0];
        fe.counted();
        let out = run(&fe.skel.progs.fe_in, fe.host.client_port, tiny, 0);
        assert_eq!((out.verdict, &out.frame), (PASS, tiny));
        assert!(fe.counted().is_empty());
    }
}

/// Frontends send only whole and plain packets. be_in, the backend's program on ingress, drops all others, because it
/// cannot check them.
#[test]
fn at_a_backend_none_of_them_reaches_a_sender() {
    let mut be = Backend::new();
    be.set_sender(client(), 7001, 1, &SenderSlot { live: 1, ack: RCV_NXT, sent: 5, edge: 5, ..Default::default() });
    let steered = Segment::ack(client(), peer(), RCV_NXT, 5).payload(&[0; 64]).to_frame();
    let odd = [with_extra(&steered, 0, &[1; 4]), fragments(&steered, 32)[0].clone(), fragments(&steered, 8)[0].clone()];
    for frame in odd {
        assert_eq!(run(&be.skel.progs.be_in, be.host.backend_port, &frame, 0).verdict, SHOT);
        assert_eq!(be.counted(), once(&["be_drop_strange"]));
    }
    assert_eq!(run(&be.skel.progs.be_in, be.host.backend_port, &steered, 0).verdict, PASS);
}

#[test]
fn a_window_that_opens_at_the_start_reaches_the_backend() {
    let mut flow = flow();
    (flow.snd_wnd, flow.snd_cwnd, flow.mss) = (400, 10, 1448);
    let fe = Frontend::with_flow(&flow);
    let update = |window| Segment { window, ..from_client(START) };
    for (window, copies) in [(400, 0), (300, 0), (500, 1), (500, 1), (9000, 1)] {
        let out = fe.fe_in(&update(window));
        assert_eq!((out.verdict, out.segment()), (PASS, update(window)), "the stack's, too");
        let expected = vec![Segment { to: peer(), ..update(window) }; copies];
        assert_eq!(fe.copies(copies), expected, "window {window}");
    }
    assert_eq!(fe.flow().spaces.acked, 0);
    // If the client has room for the backend's first flight, the ACKs of that flight bring the backend newer windows.
    flow.snd_wnd = 14_480;
    fe.set_flow(&flow);
    fe.fe_in(&update(60_000));
    assert!(fe.copies(0).is_empty());
}

#[test]
fn a_client_whose_packets_have_ip_options_gets_payloads_and_is_heard() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    let nops = [1u8; 4];
    sockopt::set(&client, libc::IPPROTO_IP, libc::IP_OPTIONS, &nops).expect("IP_OPTIONS");
    for round in 0..3 {
        exchange(&mut server, &mut client);
        handed_off(&mut steered, &mut server, &mut client);
        let upload = payload(round, 300_000);
        let (mut writing, sent) = (client.try_clone().expect("dup"), upload.clone());
        let writer = std::thread::spawn(move || writing.write_all(&sent).expect("the upload goes out"));
        expect(&mut server, &upload);
        writer.join().expect("all written");
    }
    assert_eq!(steered.count("fe_drop_rewrite") + steered.count("be_drop_strange"), 0);
    assert_eq!(steered.hosts.checksum_errors(), 0);
}
