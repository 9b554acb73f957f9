//! Tests of routers' reports of a smaller path MTU: who gets which report, and what the report then says
//! (bpf/decisions/reports.h, bpf/icmp.h). A report cites the packet that was too big. A *flow* is the record of a
//! client connection.

use std::net::{IpAddr, SocketAddr};

use shunt_handoff::bpf::*;

use super::programs::*;
use super::segment::*;

const LOCAL: u32 = 1_000;
const START: u32 = 5_000;
const LENGTH: u32 = 1_000_000;
const ACKED: u32 = 100_000;
const MTU: u16 = 1280;

/// A flow in the middle of a payload. The client has room for 60,000 bytes.
fn flow() -> Flow {
    let mut flow = Flow { client_window: 60_000, ..Default::default() };
    begin(&mut flow, LOCAL, START, LENGTH.into(), PEER);
    flow.flags |= FLOW_START_ACKED as u8;
    flow.spaces.acked = ACKED.into();
    flow.client_ack = START + ACKED;
    flow
}

/// A router's report to the sender of the cited packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    by: IpAddr,
    to: IpAddr,
    mtu: u16,
    /// Source of the packet that was too big.
    from: SocketAddr,
    client: SocketAddr,
    seq: u32,
}

impl Report {
    pub fn new(from: SocketAddr, client: SocketAddr, seq: u32) -> Self {
        let router = if from.is_ipv4() { "192.0.2.1" } else { "2001:db8::1" };
        Self { by: router.parse().unwrap(), to: from.ip(), mtu: MTU, from, client, seq }
    }

    pub fn to_frame(&self) -> Vec<u8> {
        let segment = Segment::ack(self.from, self.client, self.seq, 7).payload(&[5; 1400]);
        let big = segment.to_frame();
        // Routers cite more than the 64 bits of RFC 792, as RFC 1812 demands.
        let cited = &big[14..14 + if self.to.is_ipv4() { 20 } else { 40 } + 40];
        let mut icmp = if self.to.is_ipv4() { vec![3, 4, 0, 0, 0, 0] } else { vec![2, 0, 0, 0, 0, 0] };
        icmp.extend(self.mtu.to_be_bytes());
        icmp.extend(cited);
        let mut frame = big[..14].to_vec();
        match (self.by, self.to) {
            (IpAddr::V4(by), IpAddr::V4(to)) => {
                let sum = !folded(&[&icmp]);
                icmp[2..4].copy_from_slice(&sum.to_be_bytes());
                let mut ip = vec![0x45, 0];
                ip.extend((20 + icmp.len() as u16).to_be_bytes());
                ip.extend([0, 7, 0, 0, 61, 1, 0, 0]);
                ip.extend(by.octets());
                ip.extend(to.octets());
                let sum = !folded(&[&ip]);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                frame.extend(ip);
            }
            (IpAddr::V6(by), IpAddr::V6(to)) => {
                let sum = !folded(&[&pseudo_header_of(58, by.into(), to.into(), icmp.len()), &icmp]);
                icmp[2..4].copy_from_slice(&sum.to_be_bytes());
                frame.extend([0x60, 0, 0, 0]);
                frame.extend((icmp.len() as u16).to_be_bytes());
                frame.extend([58, 61]);
                frame.extend(by.octets());
                frame.extend(to.octets());
            }
            _ => panic!("two IP versions in one packet"),
        }
        frame.extend(icmp);
        frame
    }

    /// Reads the report in a frame.
    ///
    /// # Panics
    /// If a checksum is wrong.
    fn from_frame(frame: &[u8]) -> Self {
        let v4 = frame[12..14] == [0x08, 0x00];
        let (icmp, inner) = if v4 { (34, 42) } else { (54, 62) };
        let tcp = inner + icmp - 14;
        let address = |at: usize| match v4 {
            true => IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap()),
            false => IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap()),
        };
        // Offsets of the addresses in an IP header, counted back from its end.
        let (source, destination) = if v4 { (8, 4) } else { (32, 16) };
        let (by, to) = (address(icmp - source), address(icmp - destination));
        if v4 {
            assert_eq!(folded(&[&frame[14..34]]), 0xffff, "IPv4 checksum");
            assert_eq!(folded(&[&frame[42..62]]), 0xffff, "the cited IPv4 checksum");
            assert_eq!(folded(&[&frame[34..]]), 0xffff, "ICMP checksum");
        } else {
            let pseudo = pseudo_header_of(58, by, to, frame.len() - icmp);
            assert_eq!(folded(&[&pseudo, &frame[icmp..]]), 0xffff, "ICMPv6 checksum");
        }
        let u16_at = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        Self {
            by,
            to,
            mtu: u16_at(icmp + 6),
            from: SocketAddr::new(address(tcp - source), u16_at(tcp)),
            client: SocketAddr::new(address(tcp - destination), u16_at(tcp + 2)),
            seq: u32::from_be_bytes(frame[tcp + 4..tcp + 8].try_into().unwrap()),
        }
    }
}

fn report_to_frontend(fe: &Frontend, report: &Report) -> Outcome {
    run(&fe.skel.progs.fe_in, fe.host.client_port, &report.to_frame(), 0)
}

/// Endpoints of a connection in each IP version: the client's, the frontend's, and the backend's socket.
fn ends() -> [[SocketAddr; 3]; 2] {
    let ipv6 = ["[fd00::2]:40000", "[fd00::1]:80", "[fd01::2]:7001"].map(|end| end.parse().unwrap());
    [[client(), server(), peer()], ipv6]
}

#[test]
fn an_mtu_report_about_outstanding_bytes_goes_to_the_backend() {
    let mut fe = Frontend::with_flow(&flow());
    for [client, server, peer] in ends() {
        fe.set_peer(PEER, peer);
        for at in [ACKED, ACKED + 1448, ACKED + 59_999] {
            fe.set_flow_of(client, server, &flow());
            let out = report_to_frontend(&fe, &Report::new(server, client, START + at));
            assert_eq!(out.verdict, REDIRECT, "{at}");
            // The report's source is the frontend, not the router that made it. That router may lie between frontend
            // and backend, and would drop a packet with its own address as source.
            let expected = Report { by: server.ip(), ..Report::new(peer, client, START + at) };
            assert_eq!(Report::from_frame(&out.frame), expected);
            assert_eq!(fe.counted(), once(&["fe_in_too_big"]));
        }
    }
}

#[test]
fn an_mtu_report_about_other_payload_is_dropped() {
    let mut fe = Frontend::with_flow(&flow());
    let acknowledged = START + ACKED - 1448;
    let beyond_the_window = START + ACKED + 60_000;
    for seq in [acknowledged, beyond_the_window, START, START + LENGTH - 1] {
        assert_eq!(report_to_frontend(&fe, &Report::new(server(), client(), seq)).verdict, SHOT, "{seq}");
        assert_eq!(fe.counted(), once(&["fe_drop_too_big"]));
    }
    let mut done = flow();
    complete(&mut done);
    fe.set_flow(&done);
    let late = Report::new(server(), client(), START + ACKED);
    assert_eq!(report_to_frontend(&fe, &late).verdict, SHOT, "of a payload that has arrived");
}

#[test]
fn a_report_about_the_servers_own_bytes_is_in_its_own_numbers() {
    let mut fe = Frontend::with_flow(&flow());
    let mut done = flow();
    complete(&mut done);
    for [client, server, _] in ends() {
        let cases = [
            (flow(), START - 300, LOCAL - 300),
            (done, START - 300, LOCAL - 300),
            (done, START + LENGTH, LOCAL),
            (done, START + LENGTH + 2000, LOCAL + 2000),
        ];
        for (flow, seq, local) in cases {
            fe.set_flow_of(client, server, &flow);
            let out = report_to_frontend(&fe, &Report::new(server, client, seq));
            assert_eq!(out.verdict, PASS);
            assert_eq!(Report::from_frame(&out.frame), Report::new(server, client, local));
        }
    }
    assert!(fe.counted().is_empty());
}

#[test]
fn everything_else_that_is_not_tcp_is_left_alone() {
    let mut fe = Frontend::with_flow(&flow());
    for [client, server, _] in ends() {
        fe.set_flow_of(client, server, &flow());
        let good = Report::new(server, client, START + ACKED).to_frame();
        let icmp = if client.is_ipv4() { 34 } else { 54 };
        let mut others: Vec<Vec<u8>> = (icmp..good.len() - 32).map(|bytes| good[..bytes].to_vec()).collect();
        for (at, value) in [(icmp, 11), (icmp, 1), (icmp + 8, 0x47), (12, 0x99)] {
            others.push(good.clone());
            others.last_mut().unwrap()[at] = value;
        }
        let stranger = SocketAddr::new(client.ip(), client.port() + 1);
        others.push(Report::new(server, stranger, START + ACKED).to_frame());
        for other in others {
            let out = run(&fe.skel.progs.fe_in, fe.host.client_port, &other, 0);
            assert_eq!((out.verdict, out.frame), (PASS, other));
        }
    }
    assert!(fe.counted().is_empty());
}

#[test]
fn a_backend_gets_an_mtu_report_in_its_sockets_numbers() {
    let mut be = Backend::new();
    let delta = 0xffff_fff0;
    for [client, _, peer] in ends() {
        let report = Report::new(peer, client, 50_000);
        let receive =
            |be: &Backend, report: &Report| run(&be.skel.progs.be_in, be.host.backend_port, &report.to_frame(), 0);
        assert_eq!(receive(&be, &report).verdict, SHOT, "no sender");
        assert_eq!(be.counted(), once(&["be_drop_stray_in"]));
        be.set_sender(client, peer.port(), 3, &SenderSlot { live: 1, seq_delta: delta, ..Default::default() });
        let out = receive(&be, &report);
        assert_eq!(out.verdict, PASS);
        let seq = 50_000_u32.wrapping_sub(delta);
        assert_eq!(Report::from_frame(&out.frame), Report { seq, ..report });
        assert_eq!(be.counted(), once(&["be_in_too_big"]));
        let of_another = Report::new(SocketAddr::new(peer.ip(), 443), client, 50_000);
        let out = receive(&be, &of_another);
        assert_eq!((out.verdict, out.frame), (PASS, of_another.to_frame()));
    }
}
