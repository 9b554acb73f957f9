//! ACKs of bytes that have not been sent. A client may send them to get more than its path can carry. A stranger may
//! send them so that the sender forgets bytes that the client does not have. Neither attack achieves more than against
//! nginx without Shunt.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, Protocol, RawProtocol, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{recv, sendto, socket_with};
use shunt_lab::{ByteMeter, Fetch, Host, Lab, Options};
use shunt_testbed::wait_for;

use crate::segments::packet;
use crate::service::{Running, needs_root, start_on};

const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;
const LENGTH: u32 = 40 << 20;
const FILES: &[(&str, u64)] = &[("40m", LENGTH as u64), ("64k", 64 << 10), ("1m", 1 << 20)];
/// Greatest number of rounds of made-up ACKs in one attack.
const MADE_UP: u32 = 400;
/// Protocols of raw sockets: IPPROTO_TCP to receive, and IPPROTO_RAW to send with an IP header of our own.
const TCP: u32 = 6;
const RAW: u32 = 255;

/// Both ends of a connection, and their next sequence numbers after its handshake.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    client: SocketAddr,
    server: SocketAddr,
    of_client: u32,
    of_server: u32,
}

impl Numbers {
    /// Builds an ACK that acknowledges the first `bytes` bytes of the response, in the client's name. The ACK's own
    /// sequence number is after the client's request, and within the server's receive window.
    fn ack(&self, bytes: u32) -> Vec<u8> {
        packet(
            self.client,
            self.server,
            self.of_client.wrapping_add(2000),
            self.of_server.wrapping_add(bytes),
            ACK,
            b"",
        )
    }
}

fn raw(host: &Host, protocol: u32) -> Result<OwnedFd> {
    let protocol = Protocol::from_raw(RawProtocol::new(protocol).context("a protocol")?);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(host.run(|| socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(protocol)))??)
}

/// Waits for a server's SYN-ACK on a raw socket.
fn handshake(incoming: &OwnedFd, server: SocketAddr) -> Result<Numbers> {
    let mut bytes = [0; 4096];
    wait_for("a SYN-ACK", || {
        loop {
            let received = recv(incoming, &mut bytes[..], RecvFlags::empty());
            let (_, length) = received.with_context(|| format!("no SYN-ACK of {server}"))?;
            if let Some(numbers) = syn_ack(&bytes[..length], server) {
                return Ok(Some(numbers));
            }
        }
    })
}

/// Reads the addresses and sequence numbers in an IPv4 packet, if it is a SYN-ACK of this server.
fn syn_ack(ip: &[u8], server: SocketAddr) -> Option<Numbers> {
    let at = usize::from(ip.first()? & 15) * 4;
    let tcp = ip.get(at..at + 20)?;
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    let number = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
    let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
    let is_it = tcp[13] == SYN_ACK && SocketAddr::from((address(12), port(0))) == server;
    let (of_client, of_server) = (number(8), number(4).wrapping_add(1));
    is_it.then(|| Numbers { client: (address(16), port(2)).into(), server, of_client, of_server })
}

fn send(socket: &OwnedFd, packet: &[u8]) -> Result<()> {
    let to = Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]);
    sendto(socket, packet, SendFlags::empty(), &SocketAddr::new(to.into(), 0))?;
    Ok(())
}

/// Lets a client read nothing, and acknowledge nearly all of the file again and again. Returns the number of bytes that
/// reach this client.
fn drawn(service: &Running<'_>) -> Result<u64> {
    let (client, server) = (service.lab.client(), service.service.chain().server());
    let (incoming, outgoing) = (raw(client, TCP)?, raw(client, RAW)?);
    let meter = ByteMeter::start(client)?;
    let mut connection = client.run(|| TcpStream::connect(server))??;
    connection.write_all(b"GET /40m HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let numbers = handshake(&incoming, server)?;
    // Waits until the response is under way.
    let mut byte = [0];
    connection.set_read_timeout(Some(Duration::from_secs(20)))?;
    ensure!(connection.peek(&mut byte)? == 1, "no response");
    for _ in 0..MADE_UP {
        send(&outgoing, &numbers.ack(LENGTH - 1000))?;
        send(&outgoing, &numbers.ack(LENGTH + 100))?;
        std::thread::sleep(Duration::from_millis(2)); // the pace of the attack
    }
    Ok(meter.total()?.rx_bytes)
}

#[test]
fn a_client_that_acknowledges_ahead_draws_no_more_than_from_plain_nginx() -> Result<()> {
    needs_root();
    let plain = start_on(Lab::builder(), FILES, Options::plain(), |service| drawn(service))?;
    let (ours, dropped) = start_on(Lab::builder(), FILES, Options::shunt(), |service| {
        let drawn = drawn(service)?;
        let stats = service.service.all_stats()?;
        let dropped = stats.count("frontend.fe_drop_bad_ack") + stats.count("backend.be_drop_unsent");
        service.still_good()?;
        Ok((drawn, dropped))
    })?;
    eprintln!("of {LENGTH} bytes {ours} were drawn, {plain} of plain nginx; {dropped} ACKs were dropped");
    ensure!(dropped > 0, "no ACK was taken for what it was");
    // The factor and the 256 KiB are a margin: the client's window differs a little in each run.
    ensure!(ours <= 2 * plain + (256 << 10), "{ours} bytes were drawn, {plain} of plain nginx");
    Ok(())
}

/// Asks for a file and reads nothing of its body. Acknowledges the response up to its end, 512 KiB at a time, in
/// several rounds. Returns the connection once the frontend has clamped more than 20 ACKs (lowered their numbers).
fn walk(service: &Running<'_>) -> Result<TcpStream> {
    let (client, server) = (service.lab.client(), service.service.chain().server());
    let (incoming, outgoing) = (raw(client, TCP)?, raw(client, RAW)?);
    let mut connection = client.run(|| TcpStream::connect(server))??;
    connection.write_all(b"GET /40m HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let numbers = handshake(&incoming, server)?;
    connection.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut head = [0; 4096];
    let length = wait_for("the response's header", || {
        let read = connection.peek(&mut head)?;
        Ok(head[..read].windows(4).position(|window| window == b"\r\n\r\n"))
    })?;
    let end = length as u32 + 4 + LENGTH;
    let mut unread = vec![0; 16 << 20];
    for round in 1..=MADE_UP {
        // The first ACK is of the bytes that have really come, which stay unread. The others claim 512 KiB more each
        // time, up to the end.
        let has = connection.peek(&mut unread)?;
        send(&outgoing, &numbers.ack(has as u32))?;
        for window in 1..=80 {
            send(&outgoing, &numbers.ack((window * (512 << 10)).min(end)))?;
        }
        send(&outgoing, &numbers.ack(end))?;
        let stats = service.frontend_stats()?;
        let completed = stats.count("frontend.fe_completed");
        ensure!(completed == 0, "round {round}: {completed} completed");
        if stats.count("frontend.fe_in_clamped") > 20 {
            return Ok(connection);
        }
    }
    anyhow::bail!("its claims never reached the end")
}

#[test]
fn a_client_that_walks_its_claims_is_not_taken_at_its_word() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, Options::shunt(), |service| {
        let connection = walk(service)?;
        let stats = service.service.all_stats()?;
        ensure!(stats.count("frontend.fe_completed") == 0, "it has completed what was never sent");
        ensure!(stats.count("backend.be_drop_unsent") > 0, "its backend has believed it");
        drop(connection);
        service.still_good()?;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("frontend.fe_delivered") > 0, "nobody has said a word");
        Ok(())
    })
}

#[test]
fn acks_that_a_stranger_makes_up_stall_no_download() -> Result<()> {
    needs_root();
    start_on(Lab::builder().clients(2), FILES, Options::shunt(), |service| {
        let (client, server) = (service.lab.client(), service.service.chain().server());
        let stranger = service.lab.hosts_of(shunt_lab::Role::Client).nth(1).context("a second client")?;
        let (incoming, outgoing) = (raw(client, TCP)?, raw(stranger, RAW)?);
        let mut slow = Fetch::new(server);
        (slow.read_bytes, slow.pause) = (256 << 10, Duration::from_millis(5));
        let fetched = std::thread::scope(|scope| {
            let reader = scope.spawn(|| slow.run(client, &["/40m"]));
            let numbers = handshake(&incoming, server)?;
            for number in 0..MADE_UP {
                // The ACKs are of 30 to 70 MiB, in steps of about 100 KiB. They claim the file's last quarter, and
                // bytes behind the file's end.
                send(&outgoing, &numbers.ack((LENGTH / MADE_UP).wrapping_mul(number).wrapping_add(30 << 20)))?;
                std::thread::sleep(Duration::from_millis(1)); // the pace of the attack
            }
            reader.join().expect("the reader's thread")
        })?;
        service.whole(&fetched)?;
        ensure!(service.service.all_stats()?.count("frontend.fe_drop_bad_ack") > 0, "no ACK was dropped");
        service.still_good()
    })
}
