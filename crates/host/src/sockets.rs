//! Questions to this machine's kernel about sockets: the network namespace, own addresses, memory, open connections.

use std::collections::HashSet;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ops::RangeInclusive;

use procfs::net::TcpState;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Number of pages that is assumed where tcp_mem cannot be read or has a smaller number.
const LEAST_TCP_PAGES: u64 = 16384;

/// Returns the cookie of the network namespace that this process is in.
///
/// # Errors
/// Returns the kernel's error of socket(2) or getsockopt(2).
pub fn netns_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    shunt_sys::sockopt::netns_cookie(&socket)
}

/// Checks that a socket of this machine can be bound to this address. The port does not matter.
///
/// # Errors
/// Returns the kernel's error of socket(2) or bind(2).
pub fn is_ours(mut address: SocketAddr) -> io::Result<()> {
    address.set_port(0);
    UdpSocket::bind(address).map(drop)
}

/// Returns the number of bytes that all senders (a backend's sockets for clients) together may have queued. This is a
/// quarter of the memory below which the kernel does not limit TCP: the first number of tcp_mem, in pages. It is at
/// least 16 MiB with pages of 4 KiB.
pub fn tcp_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
    let pages = text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(LEAST_TCP_PAGES);
    pages.max(LEAST_TCP_PAGES) * rustix::param::page_size() as u64 / 4
}

/// Returns both ends, this machine's first, of every TCP connection of this network namespace. Listening sockets are
/// among the connections: their other end has port 0.
///
/// # Errors
/// Returns an error where /proc/net/tcp cannot be read.
pub fn connections() -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    connections_in(|_| true)
}

/// Returns both ends of every TCP connection as [`connections`] does, but leaves out connections in TIME_WAIT, of which
/// no process has a descriptor.
///
/// # Errors
/// Returns an error where /proc/net/tcp cannot be read.
pub fn held_connections() -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    connections_in(|state| state != TcpState::TimeWait)
}

/// A socket that listens at one of the ports of `[backend] ports`. The steering programs drop what its clients send.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a program listens at {0}, whose port lies in [backend] ports: its clients would get no answer; choose other \
     `ports`, or another port for that program (`ss -tlnp` names it)"
)]
pub struct PortTaken(SocketAddr);

/// Checks that no socket of this network namespace listens for TCP connections at one of these ports. If /proc/net/tcp
/// cannot be read, nothing is known, and nothing is found.
///
/// # Errors
/// Returns the listening socket with the lowest address.
pub fn none_listens_in(ports: &RangeInclusive<u16>) -> Result<(), PortTaken> {
    let all = connections_in(|state| state == TcpState::Listen).unwrap_or_default();
    let taken = all.into_iter().map(|(address, _)| address).filter(|address| ports.contains(&address.port())).min();
    taken.map_or(Ok(()), |address| Err(PortTaken(address)))
}

fn connections_in(is_meant: impl Fn(TcpState) -> bool) -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let v4 = procfs::net::tcp().map_err(io::Error::other)?;
    // A kernel without IPv6 has no /proc/net/tcp6.
    let v6 = procfs::net::tcp6().unwrap_or_default();
    let all = v4.into_iter().chain(v6).filter(|entry| is_meant(entry.state.clone()));
    Ok(all.map(|entry| (canonical(entry.local_address), canonical(entry.remote_address))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_is_listed_while_it_lives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        assert!(connections().unwrap().contains(&ends));
    }

    #[test]
    fn a_listener_is_found_by_its_port_and_a_connection_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let (at, of_client) = (address.port(), client.local_addr().unwrap().port());
        assert_eq!(none_listens_in(&(at..=at)), Err(PortTaken(address)));
        assert_eq!(none_listens_in(&(of_client..=of_client)), Ok(()));
    }

    #[test]
    fn an_address_is_ours_where_sockets_can_have_it() {
        assert!(is_ours("127.0.0.1:9".parse().unwrap()).is_ok());
        // 192.0.2.0/24 is reserved for documentation (RFC 5737), so no machine has the address.
        assert!(is_ours("192.0.2.99:9".parse().unwrap()).is_err());
    }

    #[test]
    fn namespaces_have_cookies() {
        assert_ne!(netns_cookie().unwrap(), 0);
    }
}
