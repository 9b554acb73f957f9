//! Segments that a stranger makes up. A stranger may know or guess the addresses and ports of a connection, but not its
//! sequence numbers. Such segments must neither break the connection nor change a byte (RFC 5961).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, Protocol, RawProtocol, SendFlags, SocketFlags, SocketType, sendto, socket_with};
use shunt_lab::{Fetch, Host, Lab, Options};

use crate::service::{FILES, Running, needs_root, start_on};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;
/// Number of made-up packets that are sent at once.
const AT_ONCE: usize = 48;
/// IPPROTO_RAW: packets have an IP header of our own.
const RAW: u32 = 255;

/// Returns a host's established IPv4 connections, each as its two ends: the host's end first.
pub fn connections(host: &Host) -> Result<Vec<(SocketAddr, SocketAddr)>> {
    let table = host.run(|| std::fs::read_to_string("/proc/thread-self/net/tcp"))??;
    let end = |text: &str| -> Option<SocketAddr> {
        let (address, port) = text.split_once(':')?;
        let address = Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.to_ne_bytes());
        Some(SocketAddr::new(address.into(), u16::from_str_radix(port, 16).ok()?))
    };
    let established = table.lines().skip(1).filter(|line| line.split_whitespace().nth(3) == Some("01"));
    let ends = established.filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        Some((end(fields.next()?)?, end(fields.next()?)?))
    });
    Ok(ends.collect())
}

/// Builds a TCP segment in an IPv4 packet.
pub fn packet(source: SocketAddr, destination: SocketAddr, sequence: u32, ack: u32, flags: u8, data: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (source.ip(), destination.ip()) else {
        panic!("IPv4 addresses");
    };
    let mut tcp = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    tcp.extend([sequence.to_be_bytes(), ack.to_be_bytes()].concat());
    tcp.extend([5 << 4, flags, 0x7f, 0xff, 0, 0, 0, 0]);
    tcp.extend(data);
    let length = tcp.len() as u16;
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 6], &length.to_be_bytes(), &tcp].concat();
    let sum = checksum(&pseudo).to_be_bytes();
    tcp[16..18].copy_from_slice(&sum);
    let total = (20 + length).to_be_bytes();
    let ip = [&[0x45, 0][..], &total, &[0, 0, 0, 0, 64, 6, 0, 0], &from.octets(), &to.octets()].concat();
    [ip, tcp].concat()
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Random numbers (xorshift) from a seed, so that a failure can be repeated.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as u32
    }
}

/// Builds [`AT_ONCE`] segments of six kinds, with guessed sequence and ACK numbers.
fn guesses(source: SocketAddr, destination: SocketAddr, numbers: &mut Numbers) -> Vec<Vec<u8>> {
    let kinds: [(u8, &[u8]); 6] =
        [(RST, b""), (RST | ACK, b""), (ACK, b""), (ACK | PSH, b"forged"), (FIN | ACK, b""), (SYN, b"")];
    let some = kinds.iter().cycle().take(AT_ONCE);
    some.map(|(flags, data)| packet(source, destination, numbers.next(), numbers.next(), *flags, data)).collect()
}

/// Downloads 7 MiB twice, slowly, on one connection. Meanwhile, calls `attack` again and again with the client's end of
/// the connection, and sends the packets that each call returns.
fn download_under(
    service: &Running<'_>,
    from: &Host,
    mut attack: impl FnMut(SocketAddr, &mut Numbers) -> Vec<Vec<u8>>,
) -> Result<()> {
    const SEED: u64 = 0x5eed_0fa7_7ac0;
    eprintln!("seed {SEED:#x}");
    let mut numbers = Numbers(SEED);
    let protocol = Protocol::from_raw(RawProtocol::new(RAW).context("IPPROTO_RAW")?);
    let open = || socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol));
    let socket = from.run(open)??;
    let (client, frontend) = (service.lab.client(), service.lab.frontend());
    let mut slow = Fetch::new(service.service.chain().server());
    (slow.read_bytes, slow.pause) = (64 << 10, Duration::from_millis(5));
    let mut sent = 0;
    let fetched = std::thread::scope(|scope| {
        let reader = scope.spawn(|| slow.run(client, &["/7m", "/7m"]));
        while !reader.is_finished() {
            let own = connections(frontend)?.into_iter().find(|(_, remote)| remote.ip() == client.address());
            for packet in own.map(|(_, client)| attack(client, &mut numbers)).unwrap_or_default() {
                let to = Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]);
                sendto(&socket, &packet, SendFlags::empty(), &SocketAddr::new(to.into(), 0))?;
                sent += 1;
            }
            std::thread::sleep(Duration::from_millis(2)); // the pace of the attack
        }
        reader.join().expect("the reader's thread")
    })?;
    ensure!(sent >= 10 * AT_ONCE, "only {sent} packets");
    service.whole(&fetched)?;
    let shortcuts = service.counted("servers.shortcuts")?;
    ensure!(shortcuts == 2, "{shortcuts} shortcuts instead of 2");
    service.still_good()
}

#[test]
fn guessed_segments_in_a_clients_name_do_nothing() -> Result<()> {
    needs_root();
    start_on(Lab::builder().clients(2), FILES, Options::steady(), |service| {
        let other = service.lab.hosts_of(shunt_lab::Role::Client).nth(1).context("a second client")?;
        let server = service.service.chain().server();
        download_under(service, other, |client, numbers| guesses(client, server, numbers))?;
        let strange = service.counted("frontend.fe_in_strange")?;
        ensure!(strange > 0, "no guess was recognised by its sequence number");
        Ok(())
    })
}

#[test]
fn guessed_segments_in_the_frontends_name_do_nothing() -> Result<()> {
    needs_root();
    start_on(Lab::builder().clients(2), FILES, Options::steady(), |service| {
        let other = service.lab.hosts_of(shunt_lab::Role::Client).nth(1).context("a second client")?;
        let server = service.service.chain().server();
        download_under(service, other, |client, numbers| guesses(server, client, numbers))
    })
}
