//! Information for the kernel, and for programs under `shunt run`. The kernel gets keys, by which TCP handshakes
//! between such programs prove which machine they come from. Programs learn from which stores the programs at each
//! address can fetch. A *store* has the payloads of a machine's programs, and a *source* is a store that programs can
//! fetch from.

use std::io;
use std::net::IpAddr;

use shunt_logic::store::ends::{Key, LOOPBACK};
use shunt_negotiation::Ends;
use shunt_odb::sources::Known;

use crate::os::random;

/// Returns the key for connections within this machine. If an earlier agent has left that key in the kernel, it stays
/// the same, because handshakes under way depend on it. Removes other machines' keys that an earlier agent has left.
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
