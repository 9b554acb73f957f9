//! Another frontend agent whose servers would be ours, too. A control group runs the programs of both for each handoff: one
//! would begin it, and the other refuse it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use libbpf_rs::Link;
use libbpf_rs::query::LinkTypeInfo;

use crate::attach::{self, FE_IN, FE_SETSOCKOPT};
use crate::error::SteeringError;
use crate::frontend::FrontendConfig;
use crate::ownership::pinned_program;
use crate::pins;

/// Looks for one that has programs on an interface of this thread's network namespace, and a control group above or below
/// ours; it may have ended. One that has them on an interface of ours is told of when ours are put there.
///
/// # Errors
/// [`SteeringError::Neighbour`].
pub(crate) fn refuse(config: &FrontendConfig) -> Result<(), SteeringError> {
    let FrontendConfig { cgroup, pin_dir, interfaces, .. } = config;
    // By number: it may be mounted twice.
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let ours = file(pin_dir);
    let others = pins::directories().into_iter().filter(|directory| file(directory) != ours);
    let linked: Vec<(PathBuf, u64)> =
        others.filter_map(|directory| Some((directory.clone(), group_of(&directory.join(FE_SETSOCKOPT))?))).collect();
    if linked.is_empty() {
        return Ok(());
    }
    let (related, here) = (related(cgroup), attach::all_at(FE_IN)?);
    let on_ours: Vec<u32> = interfaces.iter().filter_map(|&ifindex| attach::filter_at(ifindex, FE_IN)).collect();
    let is_here = |id: u32| here.contains(&id) && !on_ours.contains(&id);
    let is_neighbour = |(directory, group): &(PathBuf, u64)| {
        related.contains(group) && pinned_program(&directory.join(FE_IN.program)).is_some_and(is_here)
    };
    match linked.into_iter().find(is_neighbour) {
        Some((pins, _)) => Err(SteeringError::Neighbour { cgroup: cgroup.clone(), pins }),
        None => Ok(()),
    }
}

/// The control group that a pinned link is attached to.
fn group_of(pin: &Path) -> Option<u64> {
    if !pin.exists() {
        return None;
    }
    match Link::open(pin).ok()?.info().ok()?.info {
        LinkTypeInfo::Cgroup(at) => Some(at.cgroup_id),
        _ => None,
    }
}

/// A control group, those above it and those below, by number: cgroup v2 numbers them by inode (kernfs).
fn related(cgroup: &Path) -> Vec<u64> {
    let Ok(cgroup) = cgroup.canonicalize() else { return Vec::new() };
    let Ok(device) = fs::metadata(&cgroup).map(|found| found.dev()) else { return Vec::new() };
    let number = |path: &Path| fs::metadata(path).ok().filter(|found| found.dev() == device).map(|found| found.ino());
    let mut related: Vec<u64> = cgroup.ancestors().filter_map(number).collect();
    let mut left = vec![cgroup];
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        let below = entries.filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir())).map(|one| one.path());
        left.extend(below.inspect(|path| related.extend(number(path))));
    }
    related
}
