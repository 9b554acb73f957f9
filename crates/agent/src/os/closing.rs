//! Closes TCP connections of any process of this machine: sock_diag(7), SOCK_DESTROY. Their clients get a reset, and
//! their servers ECONNABORTED. This requires CAP_NET_ADMIN and a kernel with CONFIG_INET_DIAG_DESTROY.

use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST};
use netlink_sys::{Socket, protocols::NETLINK_SOCK_DIAG};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_sys::sockopt;
use zerocopy::{Immutable, IntoBytes};

/// Numbers from linux/sock_diag.h and linux/netlink.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
/// Numbers from include/net/tcp_states.h.
const TCP_TIME_WAIT: u8 = 6;
const TCP_LISTEN: u8 = 10;
const ANY_COOKIE: [u8; 8] = [u8::MAX; 8];
const ANSWER_BYTES: usize = 4096;

/// `struct nlmsghdr` and `struct inet_diag_req_v2` (linux/inet_diag.h).
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    local_port_be: [u8; 2],
    remote_port_be: [u8; 2],
    local: [u8; 16],
    remote: [u8; 16],
    interface: u32,
    cookie: [u8; 8],
}

/// A socket, from `struct inet_diag_msg`. Its cookie identifies it, and no later socket has the same cookie.
struct Found {
    state: u8,
    cookie: [u8; 8],
}

impl Found {
    /// Parses an answer. Returns `None` if it is cut off, and `Ok(None)` if it is an acknowledgement without a socket.
    fn read(answer: &[u8]) -> Option<io::Result<Option<Self>>> {
        let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
        if kind != NLMSG_ERROR {
            let cookie = answer.get(60..68)?.try_into().ok()?;
            return Some(Ok(Some(Self { state: answer[17], cookie })));
        }
        let error = i32::from_ne_bytes(answer.get(16..20)?.try_into().ok()?);
        Some(if error == 0 { Ok(None) } else { Err(io::Error::from_raw_os_error(-error)) })
    }
}

/// Netlink socket for sock_diag(7).
#[derive(Debug)]
pub(crate) struct Closer {
    socket: Socket,
    sequence: u32,
    /// Index of the routing domain that this process's sockets are in (`ip vrf exec`), or 0.
    domain: u32,
}

impl Closer {
    /// Opens the socket, for connections of the network namespace that this thread is in.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2), bind(2) or getsockopt(2).
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        let any = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0, domain: sockopt::bound_interface(&any)? })
    }

    /// Closes the connection between these two addresses. A connection in TIME_WAIT is left alone, because no process
    /// has it.
    ///
    /// # Errors
    /// Returns an error of the kind `NotFound` if there is no such connection or it is in TIME_WAIT. Returns EOPNOTSUPP
    /// if the kernel lacks SOCK_DESTROY, or another error of the kernel.
    pub(crate) fn close(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<()> {
        // If there is no such connection, the kernel would find the listening socket of that port in its place. So the
        // kernel is asked first, and then the socket with the answer's cookie is destroyed.
        let found = self.ask(SOCK_DIAG_BY_FAMILY, local, remote, ANY_COOKIE)?;
        let found = found
            .filter(|found| ![TCP_LISTEN, TCP_TIME_WAIT].contains(&found.state))
            .ok_or(io::Error::from(io::ErrorKind::NotFound))?;
        self.ask(SOCK_DESTROY, local, remote, found.cookie).map(drop)
    }

    /// Asks about a socket, or destroys it. Returns `None` if the answer is an acknowledgement without a socket.
    fn ask(&mut self, kind: u16, local: SocketAddr, remote: SocketAddr, cookie: [u8; 8]) -> io::Result<Option<Found>> {
        self.sequence = self.sequence.wrapping_add(1);
        self.socket.send(self.request(kind, local, remote, cookie).as_bytes(), 0)?;
        let mut answer = vec![0; ANSWER_BYTES];
        let length = self.socket.recv(&mut &mut answer[..], 0)?;
        Found::read(&answer[..length.min(ANSWER_BYTES)]).unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
    }

    fn request(&self, kind: u16, local: SocketAddr, remote: SocketAddr, cookie: [u8; 8]) -> Request {
        let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        Request {
            length: size_of::<Request>() as u32,
            kind,
            flags: if kind == SOCK_DESTROY { NLM_F_REQUEST | NLM_F_ACK } else { NLM_F_REQUEST },
            sequence: self.sequence,
            port: 0,
            family: family.as_raw() as u8,
            protocol: libc::IPPROTO_TCP as u8,
            extensions: 0,
            pad: 0,
            states: u32::MAX,
            local_port_be: local.port().to_be_bytes(),
            remote_port_be: remote.port().to_be_bytes(),
            local: bytes_of(local.ip()),
            remote: bytes_of(remote.ip()),
            interface: self.domain,
            cookie,
        }
    }
}

/// Returns an address as inet_diag has it: IPv4 in the first four bytes.
fn bytes_of(address: IpAddr) -> [u8; 16] {
    let mut bytes = [0; 16];
    match address {
        IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => bytes = address.octets(),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    fn is_closed(address: &str) {
        let listener = TcpListener::bind(address).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, remote) = listener.accept().unwrap();
        let mut closer = Closer::open().unwrap();
        let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
        let (local, remote) = (canonical(server.local_addr().unwrap()), canonical(remote));
        closer.close(local, remote).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(server.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
        assert_eq!(closer.close(local, remote).unwrap_err().kind(), ErrorKind::NotFound, "it is gone");
        TcpStream::connect(listener.local_addr().unwrap()).expect("the listening socket is there");
    }

    #[test]
    fn a_connection_is_closed_from_outside_its_process() {
        shunt_testbed::needs_root();
        is_closed("127.0.0.1:0");
        is_closed("[::1]:0");
    }

    /// No process has a connection in TIME_WAIT, so nobody would get a reset.
    #[test]
    fn a_connection_in_time_wait_is_not_closed() {
        shunt_testbed::needs_root();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, remote) = listener.accept().unwrap();
        drop(server);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        drop(client);
        let ends = (listener.local_addr().unwrap(), remote);
        assert_eq!(Closer::open().unwrap().close(ends.0, ends.1).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(shunt_host::sockets::connections().unwrap().contains(&ends));
        assert!(!shunt_host::sockets::held_connections().unwrap().contains(&ends));
    }

    #[test]
    fn a_connection_of_ipv4_on_a_socket_of_both_versions_is_closed() {
        shunt_testbed::needs_root();
        let listener = TcpListener::bind("[::]:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (_server, remote) = listener.accept().unwrap();
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        Closer::open().unwrap().close(([127, 0, 0, 1], port).into(), remote).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
