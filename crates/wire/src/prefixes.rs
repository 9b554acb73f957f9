//! Addresses of servers, as prefixes (ranges of addresses). A backend sends payloads, which are bodies of responses,
//! only with certain server addresses as source. The backend's agent tells the frontend's agent which ones. The
//! frontend's agent puts them on the board, memory that it shares with its servers. A *peer* is another machine's
//! agent.

use std::net::SocketAddr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::Address;
use crate::frame::{FrameHeader, kind};
use crate::reason::Reason;

/// Largest number of prefixes for one peer (`SHUNT_PREFIXES_MAX`).
pub const PREFIXES_MAX: usize = 64;
/// Number of bits before the IPv4 address itself in a mapped IPv4 address (RFC 4291, 2.5.5.2).
pub const MAPPED_BITS: u8 = 96;

/// A range of addresses, at one port or at all ports (`struct shunt_prefix`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Prefix {
    pub address: Address,
    /// Length of the prefix in bits. For IPv4 it includes [`MAPPED_BITS`].
    pub bits: u8,
    pub pad: u8,
    /// TCP port in network order; 0: all ports.
    pub port: [u8; 2],
}

impl Prefix {
    const NONE: Self = Self { address: Address::NONE, bits: 0, pad: 0, port: [0; 2] };

    /// Whether the prefix covers a server's address and port. An IPv6 prefix covers no IPv4 address, however short the
    /// prefix is.
    #[must_use]
    pub fn covers(&self, server: SocketAddr) -> bool {
        let of = |address: Address| u128::from_be_bytes(address.0);
        let address = Address::from(server.ip().to_canonical());
        let same = of(address) ^ of(self.address);
        let in_prefix = same.checked_shr(128 - u32::from(self.bits)).unwrap_or(0) == 0;
        let family = !address.ip().is_ipv4() || self.bits >= MAPPED_BITS;
        family && in_prefix && (self.port == [0; 2] || u16::from_be_bytes(self.port) == server.port())
    }
}

/// A list of prefixes.
#[derive(Clone, Copy, Debug)]
pub struct Prefixes {
    list: [Prefix; PREFIXES_MAX],
    count: usize,
}

impl Default for Prefixes {
    fn default() -> Self {
        Self { list: [Prefix::NONE; PREFIXES_MAX], count: 0 }
    }
}

impl Prefixes {
    /// Makes a list of these prefixes. `None` where there are more than [`PREFIXES_MAX`].
    #[must_use]
    pub fn new(prefixes: &[Prefix]) -> Option<Self> {
        let mut all = Self { count: prefixes.len(), ..Self::default() };
        all.list.get_mut(..prefixes.len())?.copy_from_slice(prefixes);
        Some(all)
    }

    /// Returns the prefixes in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Prefix] {
        &self.list[..self.count]
    }

    /// Returns the number of valid entries, and all entries, as the board has them.
    #[must_use]
    pub fn list(&self) -> (u32, [Prefix; PREFIXES_MAX]) {
        (self.count as u32, self.list)
    }

    /// Appends the list as one frame (SPEAKS_FOR).
    pub fn emit(&self, out: &mut Vec<u8>) {
        FrameHeader::emit(kind::SPEAKS_FOR, &[self.as_slice().as_bytes()], out);
    }

    /// Reads the body of a frame.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where it is no list of prefixes, or one longer than [`PREFIXES_MAX`].
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Reason> {
        let prefixes = <[Prefix]>::ref_from_bytes(body).map_err(|_| Reason::Malformed)?;
        if prefixes.iter().any(|prefix| prefix.bits > 128 || prefix.pad != 0) {
            return Err(Reason::Malformed);
        }
        Self::new(prefixes).ok_or(Reason::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(address: &str, bits: u8, port: u16) -> Prefix {
        let address: std::net::IpAddr = address.parse().unwrap();
        let bits = if address.is_ipv4() { bits + MAPPED_BITS } else { bits };
        Prefix { address: address.into(), bits, pad: 0, port: port.to_be_bytes() }
    }

    #[test]
    fn a_prefix_has_its_addresses_and_its_port() {
        let covers = |prefix: Prefix, server: &str| prefix.covers(server.parse().unwrap());
        assert!(
            covers(prefix("192.0.2.0", 24, 0), "192.0.2.9:80") && !covers(prefix("192.0.2.0", 24, 0), "192.0.3.9:80")
        );
        assert!(covers(prefix("192.0.2.1", 32, 0), "[::ffff:192.0.2.1]:80"));
        assert!(
            covers(prefix("192.0.2.1", 32, 443), "192.0.2.1:443")
                && !covers(prefix("192.0.2.1", 32, 443), "192.0.2.1:80")
        );
        assert!(covers(prefix("::", 0, 0), "[2001:db8::1]:1") && !covers(prefix("::", 0, 0), "192.0.2.1:1"));
        assert!(covers(prefix("0.0.0.0", 0, 0), "192.0.2.1:1") && !covers(prefix("0.0.0.0", 0, 0), "[2001:db8::1]:1"));
        assert!(
            covers(prefix("2001:db8::", 64, 0), "[2001:db8::7]:1")
                && !covers(prefix("2001:db8::", 64, 0), "[2001:db8:1::]:1")
        );
    }

    #[test]
    fn a_list_is_as_long_as_its_frame() {
        let one = prefix("192.0.2.1", 32, 80);
        assert_eq!(Prefixes::parse(&[]).unwrap().as_slice(), []);
        assert_eq!(Prefixes::parse([one, one].as_bytes()).unwrap().as_slice(), [one, one]);
        assert!(Prefixes::parse([one; PREFIXES_MAX].as_bytes()).is_ok());
        assert!(Prefixes::parse([one; PREFIXES_MAX + 1].as_bytes()).is_err());
        assert!(Prefixes::parse(&one.as_bytes()[1..]).is_err());
        assert!(Prefixes::parse(Prefix { bits: 129, ..one }.as_bytes()).is_err());
    }
}
