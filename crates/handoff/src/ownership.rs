//! Ownership of the programs on an interface. Each agent pins its maps in a directory of its own, and its programs use those: a
//! filter that uses none of them is another agent's, or other software's, and is left alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapHandle};

/// Numbers of the maps that are pinned in a directory.
pub(crate) fn maps_pinned_in(directory: &Path) -> BTreeSet<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let maps = entries.filter_map(|entry| MapHandle::from_pinned_path(entry.path()).ok());
    maps.filter_map(|map| Some(map.info().ok()?.info.id)).collect()
}

/// A loaded program.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) name: String,
    maps: Vec<u32>,
}

impl Loaded {
    pub(crate) fn numbered(id: u32) -> Option<Self> {
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let found = ProgInfoIter::with_query_opts(options).find(|program| program.id == id)?;
        Some(Self { name: found.name.to_string_lossy().into_owned(), maps: found.map_ids })
    }

    pub(crate) fn uses(&self, maps: &BTreeSet<u32>) -> bool {
        self.maps.iter().any(|map| maps.contains(map))
    }

    /// The directory of the agent whose program it is, beside ours.
    pub(crate) fn pins_beside(&self, ours: &Path) -> Option<PathBuf> {
        let entries = fs::read_dir(ours.parent()?).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).find(|directory| directory != ours && self.uses(&maps_pinned_in(directory)))
    }
}
