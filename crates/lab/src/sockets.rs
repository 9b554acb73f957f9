//! The TCP sockets of a host, as /proc/net/tcp lists them.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::Result;

use crate::host::Host;

/// One TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSocket {
    pub local: SocketAddrV4,
    pub remote: SocketAddrV4,
    /// As in include/net/tcp_states.h.
    pub state: u8,
    /// Bytes that the program has not read; of a listener, connections that it has not accepted.
    pub unread_bytes: u64,
    /// 0 where no program has it open.
    pub inode: u64,
}

impl TcpSocket {
    pub const TIME_WAIT: u8 = 6;
    pub const LISTEN: u8 = 10;

    /// One line of the table.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Self {
            local: address(fields.get(1)?)?,
            remote: address(fields.get(2)?)?,
            state: hex(fields.get(3)?)? as u8,
            unread_bytes: hex(fields.get(4)?.split_once(':')?.1)?,
            inode: fields.get(9)?.parse().ok()?,
        })
    }
}

/// The address is in the machine's byte order, read as one number; the port is not.
fn address(text: &str) -> Option<SocketAddrV4> {
    let (ip, port) = text.split_once(':')?;
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    Some(SocketAddrV4::new(ip, u16::from_str_radix(port, 16).ok()?))
}

impl Host {
    /// Every IPv4 TCP socket of the host.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn tcp_sockets(&self) -> Result<Vec<TcpSocket>> {
        let table = self.run(|| std::fs::read_to_string("/proc/thread-self/net/tcp"))??;
        Ok(table.lines().skip(1).filter_map(TcpSocket::parse).collect())
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
}
