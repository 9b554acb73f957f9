//! Machines of the service, by address, with the key that this machine shares with each. The BPF programs look up an
//! address here to make or check a handshake's token (bpf/token.h).

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

/// Key of the tokens by which two machines prove that a TCP handshake is between programs under `shunt run`.
pub type Key = [u8; 16];

/// Address that stands for all loopback addresses of this machine.
pub const LOOPBACK: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// BPF map from the addresses of the service's machines to keys. It has room for 16,384 addresses.
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
    /// Returns the kernel's error of bpf(2), for example where nothing is pinned there.
    pub fn open(pins: &Path) -> libbpf_rs::Result<Self> {
        MapHandle::from_pinned_path(pins.join("ends")).map(Self)
    }

    /// Sets the key for an address. From now on, handshakes of programs under `shunt run` with that address carry a
    /// token. The machine at that address accepts the token if it has the same key.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2), for example where the map is full.
    pub fn set(&self, address: IpAddr, key: &Key) -> libbpf_rs::Result<()> {
        self.0.update(&bytes_of(address), key, MapFlags::ANY)
    }

    /// Removes an address. From now on, handshakes with it carry no token.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2). A missing address is no error.
    pub fn remove(&self, address: IpAddr) -> libbpf_rs::Result<()> {
        match self.0.delete(&bytes_of(address)) {
            Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Returns the key for an address, or `None` where it has none.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn key(&self, address: IpAddr) -> libbpf_rs::Result<Option<Key>> {
        let found = self.0.lookup(&bytes_of(address), MapFlags::ANY)?;
        Ok(found.and_then(|key| key.try_into().ok()))
    }

    /// Returns all addresses that have a key.
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
