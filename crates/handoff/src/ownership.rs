//! Ownership of the programs on an interface. Each agent pins its maps and its programs in a separate directory. A
//! filter that is not one of these programs, and uses none of these maps, belongs to another agent or to other
//! software. It is left alone. A layout is a version of the maps' contents.
//!
//! A pinned program is recognized by its id. A program that has no pin, because its agent ended while it replaced
//! programs, is recognized by its maps. The kernel lists a program's maps only for a process with CAP_SYS_ADMIN.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapHandle, Program};

use crate::pins::MAPS;

/// Objects that an agent has pinned, by their ids.
#[derive(Debug)]
pub(crate) struct Owned {
    programs: BTreeSet<u32>,
    maps: BTreeSet<u32>,
}

impl Owned {
    /// Reads a directory of pins, and the directories of other layouts below it (older.rs).
    pub(crate) fn by_all(directory: &Path) -> Self {
        let mut all = Self::by(directory);
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let below = Self::by(&entry.path());
            all.programs.extend(below.programs);
            all.maps.extend(below.maps);
        }
        all
    }

    /// Reads a directory of pins of one layout.
    pub(crate) fn by(directory: &Path) -> Self {
        let maps = MAPS.iter().filter_map(|name| MapHandle::from_pinned_path(directory.join(name)).ok());
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        Self {
            maps: maps.filter_map(|map| Some(map.info().ok()?.info.id)).collect(),
            programs: entries.filter_map(|entry| pinned_program(&entry.path())).collect(),
        }
    }

    pub(crate) fn has(&self, program: &Tc) -> bool {
        self.programs.contains(&program.0) || program.uses(&self.maps)
    }
}

/// Id of the program that is pinned at a path. `None` if no program is.
pub(crate) fn pinned_program(path: &Path) -> Option<u32> {
    Program::id_from_fd(Program::fd_from_pinned_path(path).ok()?.as_fd()).ok()
}

/// A program on an interface, by its id.
#[derive(Debug)]
pub(crate) struct Tc(pub(crate) u32);

impl Tc {
    /// Name of the program, or its id if the kernel does not tell the name.
    pub(crate) fn name(&self) -> String {
        self.told(|name, _| name).unwrap_or_else(|| format!("number {}", self.0))
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.told(|told, _| told == name).unwrap_or(false)
    }

    /// Ids of the maps that the program uses, as far as the kernel tells.
    pub(crate) fn maps(&self) -> Vec<u32> {
        self.told(|_, maps| maps).unwrap_or_default()
    }

    fn uses(&self, maps: &BTreeSet<u32>) -> bool {
        self.maps().iter().any(|map| maps.contains(map))
    }

    fn told<T>(&self, what: impl Fn(String, Vec<u32>) -> T) -> Option<T> {
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let found = ProgInfoIter::with_query_opts(options).find(|program| program.id == self.0)?;
        Some(what(found.name.to_string_lossy().into_owned(), found.map_ids))
    }

    /// Directory of pins of the agent that owns the program, searched for beside our own directory.
    pub(crate) fn pins_beside(&self, ours: &Path) -> Option<PathBuf> {
        let entries = fs::read_dir(ours.parent()?).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).find(|directory| directory != ours && Owned::by_all(directory).has(self))
    }
}
