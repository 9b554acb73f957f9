//! Answers of this machine to the logic's questions ([`Machine`]): flow table, senders, routes to clients, files,
//! store. A *sender* is this machine's kernel socket for a client of a frontend; it is *parked* while it waits for the
//! next payload. A *flow* is the steering programs' (BPF) record of a client connection, and a *region* a range of its
//! sequence numbers that a backend sends.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use shunt_handoff::frontend::ActiveRegion as KernelRegion;
use shunt_handoff::identity::FileIdentity;
use shunt_handoff::payload;
use shunt_handoff::reading::Reads;
use shunt_handoff::sender::{EVICTED_AT_ONCE, Failure, Senders};
use shunt_logic::limits::SPARE_DESCRIPTORS;
use shunt_logic::machine::{ActiveRegion, Known, Machine, Region, Want};
use shunt_odb::reference::Holder;
use shunt_odb::store::pinned::Shelf;
use shunt_wire::Endpoint;
use shunt_wire::local::{Handoff, Offer, Reason};
use shunt_wire::peer::Claim;

use crate::backend::digests::Digests;
use crate::backend::paths::Paths;
use crate::backend::steering::BackendSteering;
use crate::frontend::steering::FrontendSteering;

/// If less than one FREE_PART-th of the descriptors (all but SPARE_DESCRIPTORS) is free, parked senders are closed
/// until that part is free. So there is room for files and connections that come before the next tick (100 ms).
const FREE_PART: u64 = 8;

/// The parts of this machine from which the logic's questions are answered.
pub(crate) struct Kernel {
    pub(crate) frontend: Option<FrontendSteering>,
    pub(crate) senders: Option<Senders<BackendSteering>>,
    /// Routes to clients. `None` if this machine is no backend.
    pub(crate) paths: Option<Paths>,
    pub(crate) digests: Digests,
    pub(crate) reads: Reads,
    /// The store's name and its payloads. `None` without `[store]` in the configuration: a store has the payloads of
    /// programs under `shunt run`.
    pub(crate) store: Option<(Holder, Shelf)>,
    /// Names of the peers, for the log.
    pub(crate) peers: Vec<String>,
    /// Number of the process's descriptors that do not belong to senders, as last counted.
    pub(crate) other_descriptors: u64,
    /// Most descriptors of the process (RLIMIT_NOFILE).
    pub(crate) descriptor_limit: u64,
    /// Since the last check of the limits, descriptors were short, and all senders were examined for payloads that are
    /// acknowledged.
    has_swept: bool,
    /// Senders that have failed while a question was answered.
    pub(crate) failures: Vec<Failure>,
    pub(crate) now: Instant,
}

impl Kernel {
    /// Builds the value from the machine's parts. `store` and `descriptor_limit` are set later.
    pub(crate) fn new(
        frontend: Option<FrontendSteering>,
        senders: Option<Senders<BackendSteering>>,
        paths: Option<Paths>,
        digests: Digests,
        reads: Reads,
        peers: Vec<String>,
        now: Instant,
    ) -> Self {
        Self {
            frontend,
            senders,
            paths,
            digests,
            reads,
            store: None,
            peers,
            other_descriptors: 0,
            descriptor_limit: u64::MAX,
            has_swept: false,
            failures: Vec::new(),
            now,
        }
    }

    /// Returns the number of the process's descriptors, as a sum over everything that has descriptors. Counting
    /// /proc/self/fd would take longer with each descriptor.
    pub(crate) fn descriptors(&self) -> u64 {
        let senders = self.senders.as_ref().map_or(0, |senders| senders.len() + senders.busy());
        self.other_descriptors + senders as u64
    }

    /// Makes room before descriptors are used up: closes parked senders until one FREE_PART-th of the descriptors is
    /// free, or no sender is parked any more. Called at each check of the limits.
    pub(crate) fn keep_room(&mut self) {
        self.has_swept = false;
        let room = self.descriptor_limit.saturating_sub(SPARE_DESCRIPTORS).max(1);
        let over = self.descriptors().saturating_sub(room - room / FREE_PART);
        if over > 0 {
            self.make_room(usize::try_from(over).unwrap_or(usize::MAX));
        }
    }

    /// Frees descriptors. First parks each sender whose payload is acknowledged, and closes the payload's file: once
    /// between two checks of the limits. Then closes up to `descriptors` parked senders.
    fn make_room(&mut self, descriptors: usize) {
        let is_first = !std::mem::replace(&mut self.has_swept, true);
        let Some(senders) = &mut self.senders else { return };
        if is_first {
            self.failures.extend(senders.sweep_all(self.now));
        }
        senders.evict_parked(descriptors);
    }
}

impl Machine for Kernel {
    type File = File;
    type State = FileIdentity;

    fn region(&mut self, handoff: &Handoff, ring: u32) -> Region {
        let Some(frontend) = &mut self.frontend else { return Region::Unknown };
        if frontend.knows(handoff, ring) {
            return Region::Active;
        }
        frontend.end_of(handoff, ring).map_or(Region::Unknown, Region::Over)
    }

    fn active_regions(&mut self, peer: Option<u32>) -> Vec<ActiveRegion> {
        let regions = self.frontend.as_ref().map(|frontend| frontend.active_regions(peer)).unwrap_or_default();
        regions.iter().map(for_logic).collect()
    }

    fn region_now(&mut self, region: &ActiveRegion) -> Option<ActiveRegion> {
        self.frontend.as_ref()?.region_now(region).as_ref().map(for_logic)
    }

    fn find_place(&mut self, peer: usize, claim: &Claim, local: SocketAddr) -> Result<(), Reason> {
        let senders = self.senders.as_mut().ok_or(Reason::UnknownOffer)?;
        if senders.has(claim, local.port())? {
            return Ok(());
        }
        if !senders.has_room() {
            return Err(Reason::Limit);
        }
        self.reaches(peer, local.ip(), claim.flow.client_address.ip())
    }

    fn reaches(&mut self, peer: usize, local: IpAddr, client: IpAddr) -> Result<(), Reason> {
        let Some(paths) = &mut self.paths else { return Ok(()) };
        paths.ask(peer, &self.peers[peer], local, client, self.now)
    }

    fn has_descriptors(&mut self) -> bool {
        let has = |kernel: &Self| kernel.descriptors() + SPARE_DESCRIPTORS / 2 < kernel.descriptor_limit;
        if !has(self) {
            self.make_room(EVICTED_AT_ONCE);
        }
        has(self)
    }

    fn state(&self, file: &File) -> Option<FileIdentity> {
        FileIdentity::at_hand(file).ok()
    }

    fn is_unchanged(&self, file: &File, offer: &Offer, proven: Option<FileIdentity>) -> bool {
        payload::is_unchanged(file, offer, proven)
    }

    fn digest(&mut self, file: &File, state: FileIdentity, want: Want) -> Known {
        self.digests.ask(file, state, want)
    }
}

/// Converts a region into the logic's type.
fn for_logic(region: &KernelRegion) -> ActiveRegion {
    let end = |address, port: u16| Endpoint { address: shunt_wire::Address(address), port_be: port.to_ne_bytes() };
    let &KernelRegion { key, handoff, peer, acked, is_shut, round_trip, quiet, queues, ring } = region;
    let client = end(key.client_address, key.client_port);
    let server = end(key.server_address, key.server_port);
    ActiveRegion { client, server, handoff, peer, acked, is_shut, round_trip, quiet, queues, ring }
}
