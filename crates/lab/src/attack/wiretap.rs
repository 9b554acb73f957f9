//! Reader of the packets that arrive at a host. A client may read the packets of its own machine in this way.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RawProtocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use crate::host::Host;
use crate::segment::Segment;

/// ETH_P_IP in network byte order, as packet(7) requires.
const IPV4: u32 = 0x0800_u16.to_be() as u32;

/// Packet socket for every IPv4 packet that a host receives. Packets that the host sends are not needed.
pub(super) struct Wiretap {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Wiretap {
    /// Opens the socket on a host.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn on(host: &Host) -> Result<Self> {
        let protocol = Protocol::from_raw(RawProtocol::new(IPV4).context("ETH_P_IP")?);
        let open = || socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol));
        let socket = host.run(open)?.context("opening a packet socket")?;
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_millis(5)))?;
        Ok(Self { socket, buffer: vec![0; 64 << 10] })
    }

    /// Returns the next TCP segment. `None` if no packet has come for 5 ms, or the next packet is no TCP segment.
    ///
    /// # Errors
    /// When the socket fails.
    pub(super) fn next(&mut self) -> Result<Option<Segment>> {
        match recv(&self.socket, &mut self.buffer[..], RecvFlags::empty()) {
            Ok((bytes, _)) => Ok(Segment::parse(Duration::ZERO, &self.buffer[..bytes], bytes)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error).context("capturing a host's packets"),
        }
    }
}
