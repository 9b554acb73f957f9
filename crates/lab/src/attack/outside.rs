//! Attack by a stranger on the clients' network. The stranger sends packets with guessed sequence numbers, with the
//! source address of a client, of the frontend, of itself or of nobody. The packets go to ports of the frontend and of
//! the backend, and to the clients' ends of connections.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Hostile;
use super::forge::{Forged, PSH, Sender, URG, sack, syn_options};
use crate::host::Host;
use crate::lab::Lab;
use crate::random::Random;
use crate::segment::flag::{ACK, FIN, RST, SYN};

/// Number of attempts at once, and the pause after them: 1,000 attempts a second at most.
const AT_ONCE: usize = 20;
const PAUSE: Duration = Duration::from_millis(20);
/// Interval at which the stranger is told the addresses and ports of the clients' connections.
const LOOK: Duration = Duration::from_millis(200);
/// Ports of a backend's *senders*, the kernel sockets that send bodies to clients: the first port, and the number of
/// ports.
const SENDER_PORTS: (u16, usize) = (61000, 64);
/// Server port of the clients' connections without TLS.
const PORT: u16 = 80;
const AGENTS_PORT: u16 = 7440;

/// Sends forged packets until the attack is over.
pub(super) fn attack(lab: &Lab, from: &Host, mut random: Random, hostile: &Hostile) -> Result<()> {
    let sender = Sender::of(from)?;
    let mut looked = Instant::now();
    let mut clients = connections(lab.frontend())?;
    while !hostile.over.load(Ordering::Relaxed) {
        if looked.elapsed() > LOOK {
            (looked, clients) = (Instant::now(), connections(lab.frontend())?);
        }
        for _ in 0..AT_ONCE {
            for packet in packets(lab, from, &clients, &mut random) {
                sender.send(&packet)?;
                hostile.packets.fetch_add(1, Ordering::Relaxed);
            }
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Addresses and ports of the clients' ends of all connections to the frontend.
fn connections(frontend: &Host) -> Result<Vec<SocketAddrV4>> {
    let sockets = frontend.tcp_sockets()?;
    let ends = sockets.iter().filter(|socket| matches!(socket.local.port(), 80 | 443) && socket.remote.port() != 0);
    Ok(ends.filter_map(|socket| v4(socket.remote)).collect())
}

fn v4(end: SocketAddr) -> Option<SocketAddrV4> {
    match end.ip() {
        IpAddr::V4(ip) => Some(SocketAddrV4::new(ip, end.port())),
        IpAddr::V6(_) => None,
    }
}

/// Packets of one attempt.
fn packets(lab: &Lab, from: &Host, clients: &[SocketAddrV4], random: &mut Random) -> Vec<Vec<u8>> {
    let anybody =
        SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 100 + random.below(100) as u8), random.next() as u16 | 1024);
    let client = match clients.len() {
        0 => anybody,
        count => clients[random.below(count)],
    };
    let frontend = SocketAddrV4::new(lab.frontend().address(), if random.below(4) == 0 { 443 } else { PORT });
    let own = SocketAddrV4::new(from.address(), random.next() as u16 | 1024);
    let (source, destination) = match random.below(12) {
        0..5 => (client, frontend),
        5..8 => (frontend, client),
        8 => (anybody, frontend),
        9 => (own, frontend),
        10 => (client, senders(lab, random)),
        _ => (anybody, SocketAddrV4::new(lab.frontend().address(), AGENTS_PORT)),
    };
    let mut forged = Forged::new(source, destination, 0);
    (forged.sequence, forged.ack) = (random.next() as u32, random.next() as u32);
    forged.window = random.next() as u16;
    dress(&mut forged, random);
    match random.below(8) {
        0 => forged.fragments(random.next() as u16, random.below(2) == 0)[..1 + random.below(2)].to_vec(),
        1 => {
            // An ICMP error that cites a packet of the opposite direction, as a router on the path would send it.
            let cited = Forged::new(forged.destination, forged.source, ACK);
            let cited = Forged { sequence: forged.sequence, ..cited };
            let code = [0, 1, 3, 4][random.below(4)];
            vec![cited.unreachable(*anybody.ip(), code, [0, 68, 552, 1400][random.below(4)])]
        }
        2 => vec![forged.packet(&[7, 7, 4, 0, 0, 0, 0, 0])],
        _ => vec![forged.packet(&[])],
    }
}

/// Address of the backend, with a random one of its senders' ports.
fn senders(lab: &Lab, random: &mut Random) -> SocketAddrV4 {
    SocketAddrV4::new(lab.backend().address(), SENDER_PORTS.0 + random.below(SENDER_PORTS.1) as u16)
}

/// Gives the segment random flags, options and data.
fn dress(forged: &mut Forged, random: &mut Random) {
    match random.below(9) {
        0 => forged.flags = RST,
        1 => forged.flags = RST | ACK,
        2 => forged.flags = ACK,
        3 => {
            forged.flags = ACK;
            let left = forged.ack.wrapping_add(random.next() as u32 % (1 << 20));
            forged.options = sack(&[(left, left.wrapping_add(1448)), (left.wrapping_sub(9), left.wrapping_sub(1))]);
        }
        4 => (forged.flags, forged.data) = (ACK | PSH, b"GET /forged HTTP/1.1\r\n\r\n".to_vec()),
        5 => forged.flags = FIN | ACK,
        6 => (forged.flags, forged.options) = (SYN, syn_options(random)),
        7 => (forged.flags, forged.options) = (SYN | ACK, syn_options(random)),
        _ => (forged.flags, forged.data) = (ACK | URG, vec![0; 1 + random.below(1400)]),
    }
}
