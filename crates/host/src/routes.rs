//! Finds the interface ("port") by which packets for an address leave, according to this machine's routes:
//! rtnetlink(7), RTM_GETROUTE.
//!
//! For each packet that `bpf_redirect_neigh` redirects, the kernel looks up a route (net/core/filter.c).
//! [`Routes::port_towards`] asks for the same route, but without naming an interface: for a TCP packet of user 0 and
//! from no particular source. So the answer follows policy rules, multipath routes, and routes whose source address is
//! on another interface. Asking needs no privilege. The frontend's agent asks in a separate thread (crates/agent), so
//! that no answer delays the agent.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use rustix::net::{SocketFlags, SocketType};
use shunt_sys::sockopt;

/// Size of the buffer for an answer, which is one route, in bytes.
const ANSWER_BYTES: usize = 16 << 10;
/// Largest number of notifications that [`Changes::take`] reads in one call. One notification is enough to know that
/// something has changed, so it does no harm if some are left.
const NOTIFICATIONS: usize = 4096;

/// Netlink groups whose notifications may mean that a route has changed.
const GROUPS: [u32; 8] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_RULE,
    libc::RTNLGRP_NEXTHOP,
];

/// Why the steering programs cannot redirect packets to an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    /// The kernel names no route, and answers with this errno.
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Kernel(i32),
    /// The route does not lead to another machine.
    #[error("its route is of type {0:?}, and only a unicast route leads to another machine")]
    Kind(RouteType),
    /// The route encapsulates packets, and a redirected packet would not be encapsulated.
    #[error("its route encapsulates packets (see `ip route get`), and redirected packets cannot be encapsulated")]
    Encapsulated,
    /// The kernel's answer is not understood.
    #[error("the kernel's answer cannot be used: {0}")]
    Answer(String),
}

/// Asks the kernel for routes.
#[derive(Debug)]
pub struct Routes {
    socket: Socket,
    sequence: u32,
    /// Index of the VRF, a separate routing domain, that this process's sockets belong to (`ip vrf exec`); 0: none.
    domain: u32,
}

impl Routes {
    /// Opens a socket for questions about the network namespace that this thread is in.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2), bind(2) or getsockopt(2).
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        let any =
            rustix::net::socket_with(rustix::net::AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0, domain: sockopt::bound_interface(&any)? })
    }

    /// Returns the index of the interface by which packets for `address` leave if a BPF program redirects them. Such
    /// packets belong to no process.
    ///
    /// # Errors
    /// Returns an error if the kernel could not be asked. The error says nothing about the route.
    pub fn port_towards(&mut self, address: IpAddr) -> io::Result<Result<u32, NoRoute>> {
        let redirected = [RouteAttribute::Uid(0)];
        Ok(self.ask(address, &redirected)?.map(|hop| hop.port))
    }

    /// Returns the first hop of packets that a socket of this process sends to `address` from `source`, an address of
    /// this machine.
    ///
    /// # Errors
    /// Returns an error if the kernel could not be asked. The error says nothing about the route.
    pub fn hop_from(&mut self, source: IpAddr, address: IpAddr) -> io::Result<Result<Hop, NoRoute>> {
        let sent = [RouteAttribute::Source(source.into()), RouteAttribute::Uid(rustix::process::geteuid().as_raw())];
        self.ask(address, &sent)
    }

    fn ask(&mut self, address: IpAddr, of: &[RouteAttribute]) -> io::Result<Result<Hop, NoRoute>> {
        self.sequence = self.sequence.wrapping_add(1);
        self.socket.send(&question(address, of, self.domain, self.sequence), 0)?;
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            // The kernel answers before send(2) returns.
            let length = self.socket.recv(&mut &mut buffer[..], 0)?;
            match NetlinkMessage::<RouteNetlinkMessage>::deserialize(&buffer[..length.min(ANSWER_BYTES)]) {
                Ok(message) if message.header.sequence_number != self.sequence => {}
                Ok(message) => return Ok(hop_of(message.payload)),
                Err(error) => return Ok(Err(NoRoute::Answer(error.to_string()))),
            }
        }
    }
}

/// First hop of packets to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hop {
    /// Index of the interface that packets leave by.
    pub port: u32,
    /// Router to which this machine sends the packets. `None` where their destination is on the interface's own link.
    pub router: Option<IpAddr>,
}

fn question(address: IpAddr, of: &[RouteAttribute], domain: u32, sequence: u32) -> Vec<u8> {
    let mut route = RouteMessage::default();
    (route.header.address_family, route.header.destination_prefix_length) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    // Policy rules may look at source, user and protocol.
    route.attributes =
        vec![RouteAttribute::Destination(address.into()), RouteAttribute::IpProto(libc::IPPROTO_TCP as u8)];
    if of.iter().any(|one| matches!(one, RouteAttribute::Source(_))) {
        route.header.source_prefix_length = route.header.destination_prefix_length;
    }
    route.attributes.extend_from_slice(of);
    if domain != 0 {
        route.attributes.push(RouteAttribute::Oif(domain));
    }
    let mut header = NetlinkHeader::default();
    (header.flags, header.sequence_number) = (NLM_F_REQUEST, sequence);
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(RouteNetlinkMessage::GetRoute(route)));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn hop_of(answer: NetlinkPayload<RouteNetlinkMessage>) -> Result<Hop, NoRoute> {
    let route = match answer {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => route,
        NetlinkPayload::Error(error) => return Err(NoRoute::Kernel(error.code.map_or(0, |code| -code.get()))),
        other => return Err(NoRoute::Answer(format!("a message of type {}", other.message_type()))),
    };
    if route.header.kind != RouteType::Unicast {
        return Err(NoRoute::Kind(route.header.kind));
    }
    if route.attributes.iter().any(|one| matches!(one, RouteAttribute::Encap(_))) {
        return Err(NoRoute::Encapsulated);
    }
    let port =
        route.attributes.iter().find_map(|one| if let RouteAttribute::Oif(port) = one { Some(*port) } else { None });
    let router = route.attributes.iter().find_map(|one| match one {
        RouteAttribute::Gateway(RouteAddress::Inet(router)) | RouteAttribute::Via(RouteVia::Inet(router)) => {
            Some(IpAddr::from(*router))
        }
        RouteAttribute::Gateway(RouteAddress::Inet6(router)) | RouteAttribute::Via(RouteVia::Inet6(router)) => {
            Some(IpAddr::from(*router))
        }
        _ => None,
    });
    let port = port.ok_or_else(|| NoRoute::Answer("a route without an interface".into()))?;
    Ok(Hop { port, router })
}

/// Netlink socket that the kernel notifies of changes of routes, addresses or interfaces.
#[derive(Debug)]
pub struct Changes(Socket);

impl Changes {
    /// Opens a socket for all changes that may mean another route, in the network namespace that this thread is in.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub fn open() -> io::Result<Self> {
        Self::of(&GROUPS)
    }

    /// Opens a socket for interfaces that come, go or change.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub fn of_links() -> io::Result<Self> {
        Self::of(&[libc::RTNLGRP_LINK])
    }

    /// Opens a socket for changes of this machine's addresses.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub fn of_addresses() -> io::Result<Self> {
        Self::of(&[libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR])
    }

    fn of(groups: &[u32]) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        // A kernel that lacks one of these groups, such as those of IPv6, has no such changes to report.
        groups.iter().for_each(|group| drop(socket.add_membership(*group)));
        Ok(Self(socket))
    }

    /// Returns whether the kernel has reported a change since the last call.
    pub fn take(&self) -> bool {
        let mut changed = false;
        for _ in 0..NOTIFICATIONS {
            match self.0.recv(&mut &mut [0; 64][..], 0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A notification, perhaps cut to the buffer's 64 bytes, or an error. Of a notification, only the
                // arrival matters. The error ENOBUFS means that notifications were lost, so something may have changed,
                // too.
                _ => changed = true,
            }
        }
        changed
    }

    /// Returns the socket's descriptor, for poll(2).
    pub fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
