//! Code that build.rs generates from bpf/: the loadable objects, and the types and numbers of bpf/steering.h. Public
//! for the tests, which run the programs one packet at a time.
#![allow(clippy::all, missing_docs)]

pub use skeletons::*;

#[allow(clippy::undocumented_unsafe_blocks, dead_code)]
mod skeletons {
    /// Skeleton of bpf/frontend.bpf.c.
    pub mod frontend {
        include!(concat!(env!("OUT_DIR"), "/frontend.skel.rs"));
    }
    /// Skeleton of bpf/backend.bpf.c.
    pub mod backend {
        include!(concat!(env!("OUT_DIR"), "/backend.skel.rs"));
    }
}

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

include!(concat!(env!("OUT_DIR"), "/types.rs"));
include!(concat!(env!("OUT_DIR"), "/constants.rs"));

impl FlowKey {
    /// Key of a client's connection, by its two endpoints.
    pub fn of(client: shunt_wire::Endpoint, server: shunt_wire::Endpoint) -> Self {
        Self {
            client_address: client.address.0,
            server_address: server.address.0,
            client_port: u16::from_ne_bytes(client.port_be),
            server_port: u16::from_ne_bytes(server.port_be),
        }
    }
}
