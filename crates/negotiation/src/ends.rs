//! Machines of the service by their addresses, as the programs of bpf/token.h look for them: the key that is shared with each.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

/// Key of the tokens of two machines' handshakes.
pub type Key = [u8; 16];

/// The address that stands for all loopback addresses of this machine.
pub const LOOPBACK: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// Of one negotiation. There is room for 16,384 addresses.
#[derive(Debug)]
pub struct Ends(MapHandle);

fn bytes_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(ipv4) => ipv4.to_ipv6_mapped().octets(),
        IpAddr::V6(ipv6) => ipv6.octets(),
    }
}

impl Ends {
    pub(crate) fn new(map: &libbpf_rs::MapMut<'_>) -> libbpf_rs::Result<Self> {
        MapHandle::try_from(map).map(Self)
    }

    /// Those that [`crate::keep`] has pinned in this directory.
    ///
    /// # Errors
    /// The kernel's: there are none.
    pub fn open(pins: &Path) -> libbpf_rs::Result<Self> {
        MapHandle::from_pinned_path(pins.join("ends")).map(Self)
    }

    /// Connections with this address are between programs under Shunt, where the other machine has the same key.
    ///
    /// # Errors
    /// The kernel's: there is no room.
    pub fn set(&self, address: IpAddr, key: &Key) -> libbpf_rs::Result<()> {
        self.0.update(&bytes_of(address), key, MapFlags::ANY)
    }

    /// No new connection with this address is, from now on.
    ///
    /// # Errors
    /// The kernel's. That there is no such address is none.
    pub fn remove(&self, address: IpAddr) -> libbpf_rs::Result<()> {
        match self.0.delete(&bytes_of(address)) {
            Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// The key towards an address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn key(&self, address: IpAddr) -> libbpf_rs::Result<Option<Key>> {
        let found = self.0.lookup(&bytes_of(address), MapFlags::ANY)?;
        Ok(found.and_then(|key| key.try_into().ok()))
    }

    /// All addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let address = |key: Vec<u8>| <[u8; 16]>::try_from(key).ok();
        let canonical = |octets| match IpAddr::from(Ipv6Addr::from(octets)) {
            LOOPBACK => LOOPBACK,
            address => address.to_canonical(),
        };
        self.0.keys().filter_map(address).map(canonical).collect()
    }
}
