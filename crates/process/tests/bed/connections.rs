//! Connections on which both ends are under Shunt (as if started by `shunt run`), within this process.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, accept, bind, connect, getsockname, listen, socket_with, sockopt,
};
use shunt_negotiation::{LOOPBACK, Negotiation};
use shunt_process::descriptors;
use shunt_testbed::Group;

use super::process;

const TIGHT_BYTES: usize = 4096;

/// Lets this process make connections between ends under Shunt, as long as the returned values live.
pub fn negotiate(name: &str) -> (Negotiation, Group) {
    process();
    let group = Group::enter(name);
    let negotiation = Negotiation::attach(&group.path).unwrap();
    negotiation.ends().set(LOOPBACK, &[7; 16]).unwrap();
    (negotiation, group)
}

/// One end of a connection.
pub struct Socket {
    fd: OwnedFd,
    pub place: u32,
}

impl Socket {
    fn new(fd: OwnedFd) -> Self {
        let place = descriptors::place(process().runtime, fd.as_raw_fd()).expect("both ends speak");
        Self { fd, place }
    }

    pub fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let place = descriptors::closing(self.fd.as_raw_fd());
        descriptors::closed(process().runtime, place);
    }
}

fn tcp() -> OwnedFd {
    socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Both ends of a new connection: the one that connected, and the one that accepted. `tight`: the sockets have room for
/// few bytes, so that writes are cut short.
pub fn connected(tight: bool) -> [Socket; 2] {
    let (runtime, listener, client) = (process().runtime, tcp(), tcp());
    if tight {
        for socket in [&listener, &client] {
            sockopt::set_socket_send_buffer_size(socket, TIGHT_BYTES).unwrap();
            sockopt::set_socket_recv_buffer_size(socket, TIGHT_BYTES).unwrap();
        }
    }
    bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    descriptors::listening(listener.as_raw_fd());
    listen(&listener, 1).unwrap();
    descriptors::connecting(runtime, client.as_raw_fd());
    connect(&client, &SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap()).unwrap();
    let server = accept(&listener).unwrap();
    descriptors::accepted(runtime, listener.as_raw_fd(), server.as_raw_fd());
    descriptors::closing(listener.as_raw_fd());
    [client, server].map(Socket::new)
}
