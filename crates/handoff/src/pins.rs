//! Maps that outlive the agent: they are pinned in a directory of a BPF file system. Only programs that give the same
//! meaning to a map's contents take it over. A *layout* is a version of the maps' contents.

use std::fs;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenMapMut};
use rustix::fs::statfs;

use crate::bpf::{MAX_FLOWS, STEERING_LAYOUT};
use crate::error::SteeringError;

const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Names of the files that the maps are pinned as.
pub(crate) const MAPS: [&str; 11] = [
    "counters",
    "flows",
    "handshakes",
    "layout",
    "older_flows",
    "peers",
    "ring_owners",
    "rings",
    "sender_slots",
    "senders",
    "watched_ports",
];

/// Makes the directory if it is missing.
///
/// # Errors
/// Returns an error if the directory cannot be made, or is in no BPF file system.
pub fn prepare(directory: &Path) -> Result<(), SteeringError> {
    // The file system is checked first: without a mounted BPF file system, sysfs would refuse the directory, and
    // another file system would wrongly get one.
    let there = directory.ancestors().find(|path| path.exists());
    if !there.is_some_and(is_bpf_fs) {
        return Err(SteeringError::NotBpffs { path: directory.into() });
    }
    fs::create_dir_all(directory).map_err(SteeringError::path("mkdir", directory))
}

fn is_bpf_fs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.f_type == BPF_FS_MAGIC)
}

/// Refuses pinned maps whose layout, or sizes of keys, values and tables, are not ours. Maps of another layout that can
/// stay were put aside before (older.rs). libbpf checks the rest when it takes the maps over.
pub(crate) fn check_layout<'obj>(
    directory: &Path,
    maps: impl IntoIterator<Item = &'obj OpenMapMut<'obj>>,
) -> Result<(), SteeringError> {
    let Some(found) = layout_of(directory)? else {
        return Ok(());
    };
    // 0: the agent that made the maps ended before it could write the layout's number. Then the maps are empty.
    if found != STEERING_LAYOUT && found != 0 {
        return Err(other_layout(directory, found));
    }
    for map in maps {
        let Ok(pinned) = MapHandle::from_pinned_path(directory.join(map.name())) else {
            continue;
        };
        let found = (pinned.key_size(), pinned.value_size(), pinned.max_entries());
        let ours = (map.key_size(), map.value_size(), map.max_entries());
        if found != ours {
            let name = map.name().to_string_lossy();
            return Err(mismatch(directory, format!("{name} is {found:?}"), format!("{ours:?}")));
        }
    }
    Ok(())
}

/// Number of the layout of the pinned maps. `None` if there are no maps.
pub(crate) fn layout_of(directory: &Path) -> Result<Option<u32>, SteeringError> {
    let Ok(layout) = MapHandle::from_pinned_path(directory.join("layout")) else {
        return Ok(None);
    };
    let found = layout.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(SteeringError::map("lookup", "layout"))?;
    Ok(Some(found.and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)))
}

/// Whether the maps have our layout, so that this program can read them.
pub(crate) fn is_our_layout(directory: &Path) -> bool {
    matches!(layout_of(directory), Ok(Some(STEERING_LAYOUT)))
}

/// Returns all entries of a table of connections, as bytes. An entry that comes or goes meanwhile may be missed.
/// `flags` has LOCK if the entries have a lock.
pub(crate) fn entries(table: &MapHandle, flags: MapFlags) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    // All entries are read with one call. Read one by one, a full table would keep an agent busy for so long that its
    // peers take it for dead. The batch has room for a full table, because smaller batches could lose entries: the
    // kernel ends a batch early if the table's next bucket does not fit, and libbpf-rs takes a batch that is not full
    // for the last one.
    table.lookup_batch(MAX_FLOWS, flags, MapFlags::ANY).into_iter().flatten()
}

/// Writes our layout's number into the map `layout`. To be called once the maps exist.
pub(crate) fn write_layout(layout: &impl MapCore) -> Result<(), SteeringError> {
    layout
        .update(&0u32.to_ne_bytes(), &STEERING_LAYOUT.to_ne_bytes(), MapFlags::ANY)
        .map_err(SteeringError::map("update", "layout"))
}

/// Error for pinned maps of another layout that could not be put aside: no agent can start beside them.
pub(crate) fn other_layout(directory: &Path, found: u32) -> SteeringError {
    mismatch(directory, format!("layout {found}"), format!("layout {STEERING_LAYOUT}"))
}

fn mismatch(directory: &Path, found: String, ours: String) -> SteeringError {
    SteeringError::Layout { path: directory.into(), found, ours }
}

/// Returns every directory of every BPF file system that this process sees.
pub(crate) fn directories() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mounts = mounts.filter(|fields| fields.get(2) == Some(&"bpf")).map(|fields| PathBuf::from(fields[1]));
    let (mut found, mut left) = (Vec::new(), mounts.collect::<Vec<_>>());
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        left.extend(entries.filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir())).map(|one| one.path()));
        found.push(directory);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_file_system_is_left_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        // sysfs refuses new directories. /sys/fs/bpf is a part of sysfs if nothing is mounted there.
        for path in [directory.path().join("one/two"), "/sys/kernel/shunt".into()] {
            let error = prepare(&path).unwrap_err();
            assert!(error.to_string().contains("`mount -t bpf bpf /sys/fs/bpf`"), "{error}");
            assert!(!path.exists() && !directory.path().join("one").exists());
        }
    }
}
