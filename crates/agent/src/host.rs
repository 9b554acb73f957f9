//! What the agent asks its machine: interfaces, its namespace, which connections live.

use std::collections::HashSet;
use std::io;
use std::net::{SocketAddr, UdpSocket};

use procfs::net::TcpState;
use rustix::net::{AddressFamily, SocketType};

/// Where tcp_mem says nothing, or next to nothing.
const LEAST_TCP_PAGES: u64 = 16384;

/// Index of a network interface.
///
/// # Errors
/// The kernel's: there is no such interface.
pub fn interface_index(name: &str) -> io::Result<u32> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
}

/// Name of a network interface, for logs: its number where it has none any more.
pub fn interface_name(index: u32) -> String {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None);
    let name = socket.and_then(|socket| rustix::net::netdevice::index_to_name(&socket, index));
    name.map_or_else(|_| format!("number {index}"), |name| name.to_string())
}

/// Cookie of the network namespace that this process is in.
///
/// # Errors
/// The kernel's.
pub fn netns_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    shunt_sys::sockopt::netns_cookie(&socket)
}

/// Whether sockets of this machine may have that address.
///
/// # Errors
/// The kernel's: they may not.
pub fn is_ours(mut address: SocketAddr) -> io::Result<()> {
    address.set_port(0);
    UdpSocket::bind(address).map(drop)
}

/// Memory for what senders have queued, in bytes: a quarter of what the machine's TCP may have before it comes under
/// pressure (the first number of tcp_mem, in pages).
pub fn tcp_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
    let pages = text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(LEAST_TCP_PAGES);
    pages.max(LEAST_TCP_PAGES) * rustix::param::page_size() as u64 / 4
}

/// Both ends, ours first, of every TCP connection of this network namespace.
///
/// # Errors
/// The kernel's.
pub fn connections() -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    connections_in(|_| true)
}

/// As [`connections`], without those that only wait for late packets, which no process has.
///
/// # Errors
/// The kernel's.
pub fn held_connections() -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    connections_in(|state| state != TcpState::TimeWait)
}

fn connections_in(is_meant: impl Fn(TcpState) -> bool) -> io::Result<HashSet<(SocketAddr, SocketAddr)>> {
    let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let v4 = procfs::net::tcp().map_err(io::Error::other)?;
    // A kernel without IPv6 has no such file.
    let v6 = procfs::net::tcp6().unwrap_or_default();
    let all = v4.into_iter().chain(v6).filter(|entry| is_meant(entry.state.clone()));
    Ok(all.map(|entry| (canonical(entry.local_address), canonical(entry.remote_address))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn interfaces_have_names_and_numbers() {
        assert_eq!(interface_name(interface_index("lo").unwrap()), "lo");
        assert!(interface_index("no-such-port").is_err());
        assert_eq!(interface_name(u32::MAX >> 1), format!("number {}", u32::MAX >> 1));
    }

    #[test]
    fn a_connection_is_listed_while_it_lives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        assert!(connections().unwrap().contains(&ends));
    }

    #[test]
    fn an_address_is_ours_where_sockets_can_have_it() {
        assert!(is_ours("127.0.0.1:9".parse().unwrap()).is_ok());
        // An address that is for documentation alone (RFC 5737).
        assert!(is_ours("192.0.2.99:9".parse().unwrap()).is_err());
    }

    #[test]
    fn namespaces_have_cookies() {
        assert_ne!(netns_cookie().unwrap(), 0);
    }
}
