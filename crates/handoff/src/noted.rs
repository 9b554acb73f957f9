//! Map of the connections that programs of other layouts steer. A *layout* is a version of the pinned maps' contents.
//! Our programs begin no handoff on these connections (bpf/sockopt.h). While the map lacks any of them, our programs
//! begin handoffs only on connections that are in our own table `flows`: any other connection may be another layout's.

use std::collections::HashSet;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::older::Older;
use crate::pins;

/// The maps that tell our programs of other layouts' connections.
#[derive(Debug)]
pub(crate) struct Noted {
    pub(crate) older_flows: MapHandle,
    /// Map whose one value tells whether `older_flows` has all of these connections.
    pub(crate) older_noted: MapHandle,
}

impl Noted {
    /// Enters `keys`, the keys in the other layouts' tables, into the map. Removes keys that are in none of these
    /// tables any more. Returns `false` if the map has no room for all.
    pub(crate) fn set(&self, keys: &HashSet<Vec<u8>>, older: &[Older]) -> bool {
        let noted: HashSet<Vec<u8>> = pins::entries(&self.older_flows, MapFlags::ANY).map(|(key, _)| key).collect();
        // `keys` may lack some if the kernel had no memory for the answer. So the tables are asked, too.
        let is_free = |key: &[u8]| older.iter().all(|older| matches!(older.flows.lookup(key, MapFlags::ANY), Ok(None)));
        for gone in noted.difference(keys).filter(|key| is_free(key)) {
            let _ = self.older_flows.delete(gone);
        }
        keys.difference(&noted).all(|key| self.older_flows.update(key, &[1], MapFlags::ANY).is_ok())
    }

    /// Tells the programs whether the map has all connections of other layouts.
    pub(crate) fn are_all(&self, are_all: bool) -> libbpf_rs::Result<()> {
        self.older_noted.update(&0u32.to_ne_bytes(), &u32::from(are_all).to_ne_bytes(), MapFlags::ANY)
    }
}
