//! Information for the kernel and for programs: keys that prove TCP handshakes between programs under `shunt run`, and
//! which stores can be reached from which addresses. A *store* has the payloads of a machine's programs, and a *source*
//! is a store that programs can fetch from.

use std::io;
use std::net::IpAddr;

use shunt_logic::store::ends::{Key, LOOPBACK};
use shunt_negotiation::Ends;
use shunt_odb::sources::Known;

use crate::os::random;

/// Returns the key for connections within this machine. It is the key that an earlier agent has left in the kernel, if
/// any, because handshakes under way depend on it. Removes from the kernel the keys of peers that an earlier agent has
/// left.
///
/// # Errors
/// Returns the kernel's error of bpf(2), or of getrandom(2).
pub(crate) fn begin(kernel: &Ends, own: &[IpAddr]) -> io::Result<Key> {
    let known = kernel.key(LOOPBACK).map_err(io::Error::other)?;
    let own_key = known.map_or_else(random::key, Ok)?;
    for address in kernel.addresses() {
        if address != LOOPBACK && !own.contains(&address) {
            kernel.remove(address).map_err(io::Error::other)?;
        }
    }
    Ok(own_key)
}

/// Memory from which programs read the sources: pairs of an address and a store.
#[derive(Debug)]
pub(crate) struct SourcesMemory {
    pub(crate) known: Known,
    /// Number of pairs for which there was no room.
    pub(crate) lost: usize,
}

impl SourcesMemory {
    pub(crate) fn new(known: Known) -> Self {
        Self { known, lost: 0 }
    }
}
