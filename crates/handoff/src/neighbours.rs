//! The search for another frontend agent whose control group contains our servers, too. The programs of both agents
//! would run for each handoff: one would begin it, and the other would refuse it. So this agent does not start then. A
//! layout is a version of the contents of an agent's pinned maps.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use libbpf_rs::Link;
use libbpf_rs::query::LinkTypeInfo;

use crate::attach::{self, FE_IN, FE_SETSOCKOPT};
use crate::error::SteeringError;
use crate::ownership::pinned_program;
use crate::pins;

/// Looks for an agent with programs on an interface of this thread's network namespace, and with a control group above
/// or below ours, or the same. That agent may have ended. This call does not report an agent with programs on one of
/// our interfaces. Such an agent is found when our programs are attached.
///
/// # Errors
/// [`SteeringError::Neighbour`] if there is such an agent.
pub(crate) fn refuse(cgroup: &Path, pin_dir: &Path, interfaces: &[u32]) -> Result<(), SteeringError> {
    // Compared by device and inode, because a directory may be mounted twice.
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let ours = file(pin_dir);
    // Pins of other layouts are in directories below ours, and belong to the same agent.
    let is_ours = |directory: &Path| file(directory) == ours || directory.parent().and_then(file) == ours;
    let others = pins::directories().into_iter().filter(|directory| !is_ours(directory));
    let linked: Vec<(PathBuf, u64)> =
        others.filter_map(|directory| Some((directory.clone(), group_of(&directory.join(FE_SETSOCKOPT))?))).collect();
    if linked.is_empty() {
        return Ok(());
    }
    let (related, here) = (related(cgroup), attach::all_at(FE_IN)?);
    let on_ours: Vec<u32> = interfaces.iter().flat_map(|&ifindex| attach::programs_at(ifindex, FE_IN)).collect();
    let is_here = |id: u32| here.contains(&id) && !on_ours.contains(&id);
    let is_neighbour = |(directory, group): &(PathBuf, u64)| {
        related.contains(group) && pinned_program(&directory.join(FE_IN.program)).is_some_and(is_here)
    };
    match linked.into_iter().find(is_neighbour) {
        Some((pins, _)) => Err(SteeringError::Neighbour { cgroup: cgroup.into(), pins }),
        None => Ok(()),
    }
}

/// Id of the control group that a pinned link is attached to.
fn group_of(pin: &Path) -> Option<u64> {
    if !pin.exists() {
        return None;
    }
    match Link::open(pin).ok()?.info().ok()?.info {
        LinkTypeInfo::Cgroup(at) => Some(at.cgroup_id),
        _ => None,
    }
}

/// Ids of a control group, of all above it and of all below it. The id of a cgroup (v2) is its inode number (kernfs).
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
