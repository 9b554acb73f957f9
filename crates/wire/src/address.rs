//! IP addresses as all messages of Shunt have them: 16 bytes, IPv4 mapped into IPv6 (RFC 4291, 2.5.5.2).

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// An IPv6 address, or an IPv4 address as `::ffff:a.b.c.d`, in network order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Address(pub [u8; 16]);

impl Address {
    /// All zero: no address.
    pub const NONE: Self = Self([0; 16]);

    /// Converts to the standard library's type, with IPv4 unmapped.
    pub fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        Self(match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        })
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip())
    }
}

/// One end of a TCP connection. The port is in network order, as in the packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// IP address.
    pub address: Address,
    /// TCP port, in network order.
    pub port_be: [u8; 2],
}

impl Endpoint {
    /// Converts to the standard library's type.
    pub fn socket_addr(self) -> SocketAddr {
        SocketAddr::new(self.address.ip(), u16::from_be_bytes(self.port_be))
    }
}

/// Adds accessors to messages that name both ends of a client's connection.
macro_rules! with_ends {
    ($($name:ident),*) => {$(
        impl $name {
            /// The client's end.
            pub fn client(&self) -> $crate::Endpoint {
                $crate::Endpoint { address: self.client_address, port_be: self.client_port }
            }

            /// The frontend's end.
            pub fn server(&self) -> $crate::Endpoint {
                $crate::Endpoint { address: self.server_address, port_be: self.server_port }
            }

            /// Whether a connection can have these ends: neither port is 0, and the addresses have the same IP version.
            pub fn has_ends(&self) -> bool {
                self.client_port != [0; 2]
                    && self.server_port != [0; 2]
                    && self.client_address.ip().is_ipv4() == self.server_address.ip().is_ipv4()
            }
        }
    )*};
}
pub(crate) use with_ends;

impl From<SocketAddr> for Endpoint {
    fn from(at: SocketAddr) -> Self {
        Self { address: at.ip().into(), port_be: at.port().to_be_bytes() }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.socket_addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_is_mapped_and_comes_back() {
        let at: SocketAddr = "10.7.0.1:443".parse().unwrap();
        let endpoint = Endpoint::from(at);
        assert_eq!(endpoint.address.0[10..12], [0xff, 0xff]);
        assert_eq!(endpoint.port_be, [1, 187]);
        assert_eq!(endpoint.socket_addr(), at);
    }
}
