//! Machines of the service, by address: the key that this machine shares with each. The programs of bpf/token.h look
//! addresses up here.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

/// Key of the tokens in handshakes between two machines.
pub type Key = [u8; 16];

/// Address that stands for all loopback addresses of this machine.
pub const LOOPBACK: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// Map from address to key of one negotiation. It has room for 16,384 addresses.
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

    /// Opens the map that [`crate::keep`] has pinned in this directory.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2): nothing is pinned there.
    pub fn open(pins: &Path) -> libbpf_rs::Result<Self> {
        MapHandle::from_pinned_path(pins.join("ends")).map(Self)
    }

    /// Sets the key for an address. Programs under Shunt negotiate with that address from now on, if its machine has
    /// the same key.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2): the map is full.
    pub fn set(&self, address: IpAddr, key: &Key) -> libbpf_rs::Result<()> {
        self.0.update(&bytes_of(address), key, MapFlags::ANY)
    }

    /// Removes an address: no new connection with it is negotiated from now on.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2). An address that is not in the map is no error.
    pub fn remove(&self, address: IpAddr) -> libbpf_rs::Result<()> {
        match self.0.delete(&bytes_of(address)) {
            Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Returns the key for an address; `None` where there is none.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn key(&self, address: IpAddr) -> libbpf_rs::Result<Option<Key>> {
        let found = self.0.lookup(&bytes_of(address), MapFlags::ANY)?;
        Ok(found.and_then(|key| key.try_into().ok()))
    }

    /// All addresses that have a key.
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
