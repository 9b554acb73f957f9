//! Steering programs that are on an interface but whose pins are gone: somebody emptied the BPF file system, or mounted
//! it anew. Then nothing in the kernel tells whose they were. A process that has one of them open is an agent that
//! works with it. A *handoff* lets another machine send a payload on a client's connection.

use std::fs;
use std::path::Path;

use libbpf_rs::{MapCore, MapHandle};

use crate::attach::{self, TcPlace};
use crate::bpf::{Flow, FlowKey};
use crate::error::SteeringError;
use crate::moved::moved;
use crate::ownership::{Owned, Tc};
use crate::pins;

/// A steering program without pins.
#[derive(Debug)]
pub struct Stray {
    ifindex: u32,
    place: TcPlace,
    handle: u32,
    program: Tc,
}

/// Finds stray programs on an interface of this thread's network namespace, at the places of the frontend's programs or
/// of the backend's. Programs with other names belong to other software. Needs CAP_SYS_ADMIN: without it none is found.
pub fn strays(ifindex: u32, is_frontend: bool) -> Vec<Stray> {
    attach::log_libbpf();
    let places = attach::places(is_frontend).into_iter();
    let at = |place: TcPlace| {
        let filters = attach::filters_at(ifindex, place).into_iter();
        filters.map(move |(handle, program)| Stray { ifindex, place, handle, program: Tc(program) })
    };
    let found = places.flat_map(at).filter(|stray| stray.program.is_named(stray.place.program));
    let found: Vec<Stray> = found.collect();
    if found.is_empty() {
        return found;
    }
    let pinned: Vec<Owned> = pins::directories().iter().map(|directory| Owned::by(directory)).collect();
    found.into_iter().filter(|stray| !pinned.iter().any(|owned| owned.has(&stray.program))).collect()
}

impl Stray {
    /// Name of the program.
    pub fn name(&self) -> &'static str {
        self.place.program
    }

    /// Id of a process that has the program open, and so works with it.
    pub fn process(&self) -> Option<i32> {
        let mut all = fs::read_dir("/proc").ok()?.flatten();
        all.find_map(|entry| {
            let process = entry.file_name().to_str()?.parse().ok()?;
            self.is_open_in(&entry.path().join("fdinfo")).then_some(process)
        })
    }

    fn is_open_in(&self, descriptors: &Path) -> bool {
        let line = format!("prog_id:\t{}", self.program.0);
        let mut all = fs::read_dir(descriptors).into_iter().flatten().flatten();
        all.any(|one| fs::read_to_string(one.path()).is_ok_and(|text| text.lines().any(|found| found == line)))
    }

    /// Returns the connections that have had a handoff, as [`crate::end_handoffs`] does. No handoff can begin any more,
    /// because the program that begins them (fe_setsockopt) ended with its pin.
    pub fn moved(&self) -> Vec<FlowKey> {
        let maps = self.program.maps().into_iter().filter_map(|map| MapHandle::from_map_id(map).ok());
        let flows = maps.filter(|map| map.name() == "flows");
        flows.flat_map(|map| moved(&map, map.value_size() as usize == size_of::<Flow>())).collect()
    }

    /// Takes the program off the interface.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn take_off(&self) -> Result<(), SteeringError> {
        attach::take_off(self.ifindex, self.place, self.handle)
    }
}
