//! The TCP sockets of a host, as /proc/net/tcp and /proc/net/tcp6 list them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use anyhow::Result;

use crate::host::Host;

/// One TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSocket {
    /// Local end. An IPv4-mapped IPv6 address appears as its IPv4 address.
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// State, numbered as in include/net/tcp_states.h.
    pub state: u8,
    /// Bytes that the program has written and the other end has not acknowledged.
    pub unacknowledged_bytes: u64,
    /// Bytes that the program has not read. For a listener: number of connections that the program has not accepted.
    pub unread_bytes: u64,
    /// Inode of the socket; 0 if no program has the socket open.
    pub inode: u64,
}

impl TcpSocket {
    pub const TIME_WAIT: u8 = 6;
    pub const LISTEN: u8 = 10;

    /// Parses one line of the table.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Self {
            local: address(fields.get(1)?)?,
            remote: address(fields.get(2)?)?,
            state: hex(fields.get(3)?)? as u8,
            unacknowledged_bytes: hex(fields.get(4)?.split_once(':')?.0)?,
            unread_bytes: hex(fields.get(4)?.split_once(':')?.1)?,
            inode: fields.get(9)?.parse().ok()?,
        })
    }
}

/// Parses an address and a port. The table has the IP address as words of 32 bits, each in the machine's byte order,
/// and the port as a plain number.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            Ipv6Addr::from(<[u8; 16]>::try_from(words.as_flattened()).ok()?).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

impl Host {
    /// All TCP sockets of the host, of both IP versions.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn tcp_sockets(&self) -> Result<Vec<TcpSocket>> {
        let mut sockets = Vec::new();
        for table in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
            let table = self.run(|| std::fs::read_to_string(table))??;
            sockets.extend(table.lines().skip(1).filter_map(TcpSocket::parse));
        }
        Ok(sockets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read() {
        let line =
            "   1: 0C014D0A:0050 0100007F:C001 01 00000000:0000002A 00:00000000 00000000     0        0 4711 1 x";
        let socket = TcpSocket::parse(line).unwrap();
        assert_eq!(socket.local, "10.77.1.12:80".parse().unwrap());
        assert_eq!(socket.remote, "127.0.0.1:49153".parse().unwrap());
        assert_eq!((socket.state, socket.unread_bytes, socket.inode), (1, 42, 4711));
        assert_eq!(TcpSocket::parse("  sl  local_address"), None);
    }

    #[test]
    fn a_line_of_the_other_table_is_read() {
        let line = "   0: 000000FD000000000000000002000000:0050 0000000000000000FFFF00000C014D0A:C001 \
                    08 00000000:00000001 00:00000000 00000000     0        0 4712 1 x";
        let socket = TcpSocket::parse(line).unwrap();
        assert_eq!(socket.local, "[fd00::2]:80".parse().unwrap());
        assert_eq!(socket.remote, "10.77.1.12:49153".parse().unwrap());
        assert_eq!((socket.state, socket.unread_bytes, socket.inode), (8, 1, 4712));
    }
}
