//! The frontend's side of steering: loads bpf/frontend.bpf.c, and writes and reads its maps. A *flow* is the record of
//! a client connection in one of these maps. A *peer* is a backend's agent. A *handoff* is a server's permission for a
//! peer to send one payload on the connection, and a *region* is the range of sequence numbers that this payload has. A
//! *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its regions. A peer's *word*
//! confirms that the client has acknowledged a whole payload. A *layout* is a version of the maps' contents.

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use rustix::time::{ClockId, clock_gettime};
use shunt_sys::mapped::MappedArray;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::attach::{self, FE_DELIVERED, FE_IN, FE_OUT, TcPrograms};
use crate::bpf::frontend::{FrontendSkel, FrontendSkelBuilder, OpenFrontendSkel};
use crate::bpf::{
    BEGUN_OF_A_RING, BREAKS, Begun, FLOW_CLIENT_FIN, FLOW_QUEUES, FLOW_RESET, FLOW_SERVER_FIN, MAX_FLOWS, MAX_PEERS,
    MAX_RINGS, RING_BYTES,
};
use crate::calls::{self, CALLS};
use crate::counters::{self, Counter};
use crate::error::SteeringError;
use crate::noted::Noted;
use crate::older::{self, Older};
use crate::{neighbours, pins};

pub use crate::bpf::{Flow, FlowKey, SteerPeer};

/// Result of the programs for "done" (TC_ACT_UNSPEC).
const PASS: i32 = -1;
/// Length of the Ethernet header before the argument of a program that runs without a packet, in bytes.
const ETHERNET_BYTES: usize = 14;

/// A backend's message on the spacing of ACKs of a flow: `struct spacing` of bpf/steering.h. No map contains that
/// struct, so its Rust type is not generated.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct Spacing {
    /// The flow's key.
    pub flow: FlowKey,
    /// Number of the peer whose message this is. Only the message of the peer that sends the newest region counts.
    pub peer: u32,
    /// Number of payload bytes between two ACKs that the backend needs.
    pub bytes: u32,
}

/// A backend's word that a client has acknowledged all of a payload: `struct delivery` of bpf/steering.h.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct Delivery {
    /// The flow's key.
    pub flow: FlowKey,
    /// Number of the peer whose word it is. Only the word of the peer that sends the newest region counts.
    pub peer: u32,
    /// Number of the handoff that the payload is for.
    pub handoff: u64,
}

/// Result of [`Frontend::collect_garbage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collected {
    /// Number of connections that were forgotten.
    pub forgotten: usize,
    /// Number of connections that are still known.
    pub left: usize,
}

/// Time for which a region that has begun is taken to be still active. If its server tells the agent of the handoff
/// only after this time, the agent looks the region up among the flows. A server does without its agent only if the
/// agent has been stopped or gone for longer than this time (NGX_HTTP_SHUNT_PULSE_GONE).
const FRESH: Duration = Duration::from_secs(1);

/// Status of a region that is active (SHUNT_REGION_ACTIVE).
pub const ACTIVE: u32 = 1;

/// A region that is active: neither complete nor ended in another way.
#[derive(Clone, Copy, Debug)]
pub struct ActiveRegion {
    /// Key of the connection.
    pub key: FlowKey,
    /// Number of the handoff, chosen by its server.
    pub handoff: u64,
    /// Number of the peer that sends.
    pub peer: u32,
    /// Number of bytes of the region that the client has acknowledged.
    pub acked: u64,
    /// Whether the client lacks bytes of the payload, but has no room for a whole segment. Then the sender is not at
    /// fault if the payload makes no progress.
    pub is_shut: bool,
    /// Round-trip time of the connection when the region began.
    pub round_trip: Duration,
    /// Time since the last packet of either side.
    pub quiet: Duration,
    /// Whether the server may write behind the region (SHUNT_APPEND).
    pub queues: bool,
    /// Number of the ring that gets the region's completion.
    pub ring: u32,
}

impl ActiveRegion {
    fn of(key: FlowKey, flow: &Flow) -> Option<Self> {
        let newest = flow.spaces.breaks[(flow.spaces.made.wrapping_sub(1) % BREAKS) as usize];
        let window = u32::from(flow.client_window) << flow.snd_wscale;
        (flow.spaces.made > 0 && flow.spaces.status == ACTIVE).then(|| Self {
            key,
            handoff: flow.handoff,
            peer: newest.peer,
            acked: flow.spaces.acked,
            is_shut: window < u32::from(flow.mss) && flow.spaces.acked < newest.length,
            round_trip: Duration::from_micros(flow.srtt_us.into()),
            quiet: Duration::from_nanos(monotonic_ns().saturating_sub(flow.last_seen_ns)),
            queues: u32::from(flow.flags) & FLOW_QUEUES != 0,
            ring: flow.ring,
        })
    }
}

fn is_begun(begun: &Begun, handoff: u64, peer: u32, key: &FlowKey, now_ns: u64) -> bool {
    let is_it = begun.handoff == handoff && begun.peer == peer && begun.flow.as_bytes() == key.as_bytes();
    is_it && now_ns.saturating_sub(begun.begun_ns) < FRESH.as_nanos() as u64
}

/// Configuration of the frontend's programs.
#[derive(Clone, Debug)]
pub struct FrontendConfig {
    /// Directory in a BPF file system, for this agent alone. Made if it is missing. [`crate::Backend`] may share it.
    pub pin_dir: PathBuf,
    /// SO_NETNS_COOKIE of the namespace whose servers may hand off. 0: any namespace.
    pub netns_cookie: u64,
    /// Directory of the cgroup (v2) that contains the servers that may hand off.
    pub cgroup: PathBuf,
    /// Indices of the interfaces on which client packets arrive, in the calling thread's network namespace.
    pub interfaces: Vec<u32>,
}

/// The frontend's loaded programs, with their maps open. The programs stay loaded when the value is dropped, until
/// [`crate::detach_all`].
#[derive(Debug)]
pub struct Frontend {
    flows: MapHandle,
    peers: MapHandle,
    rings: MapHandle,
    ring_owners: MapHandle,
    counters: MapHandle,
    begun: MappedArray<Begun>,
    fe_spacing: OwnedFd,
    fe_delivered: OwnedFd,
    fe_forget: OwnedFd,
    fe_cancel: OwnedFd,
    tc: Arc<TcPrograms>,
    older: Vec<Older>,
    noted: Noted,
    /// Keys of connections of other layouts that seem to have ended, and when that was first seen.
    ended: HashMap<Vec<u8>, Instant>,
}

/// Sets the values that the verifier takes for constants. The verifier skips the branches that they make unreachable.
pub(crate) fn set_constants(open: &mut OpenFrontendSkel<'_>, netns_cookie: u64, has_older: bool) {
    if let Some(rodata) = open.maps.rodata_data.as_mut() {
        rodata.netns_cookie = netns_cookie;
        rodata.has_older = has_older.into();
    }
}

impl Frontend {
    /// Loads and attaches the programs. They replace those of an earlier agent, whose flows stay. Flows of another
    /// layout stay with their programs (older.rs).
    ///
    /// # Errors
    /// Returns an error if something that the configuration names is missing, if the kernel refuses, if another agent
    /// has the interfaces or the servers, or if the maps under `pin_dir` have a layout that leaves no room for another.
    pub fn load(config: &FrontendConfig) -> Result<Self, SteeringError> {
        attach::log_libbpf();
        pins::prepare(&config.pin_dir)?;
        neighbours::refuse(&config.cgroup, &config.pin_dir, &config.interfaces)?;
        older::set_aside(&config.pin_dir)?;
        attach::until_not_interrupted(|| Self::load_once(config))
    }

    fn load_once(config: &FrontendConfig) -> Result<Self, SteeringError> {
        let load = |source| SteeringError::Load { object: "frontend", source };

        let mut storage = MaybeUninit::uninit();
        let mut builder = FrontendSkelBuilder::default();
        builder.obj_builder.pin_root_path(&config.pin_dir).map_err(load)?;
        let mut open = builder.open(&mut storage).map_err(load)?;
        let older = Older::open_all(&config.pin_dir)?;
        set_constants(&mut open, config.netns_cookie, !older.is_empty());
        let maps = &open.maps;
        pins::check_layout(
            &config.pin_dir,
            [
                &maps.flows,
                &maps.peers,
                &maps.rings,
                &maps.ring_owners,
                &maps.counters,
                &maps.handshakes,
                &maps.watched_ports,
            ],
        )?;
        let mut loaded = open.load().map_err(load)?;
        pins::write_layout(&loaded.maps.layout)?;
        // Agents of other layouts need these two: fe_delivered may get a backend's word about a payload of ours, and
        // fe_setsockopt answers calls on our connections.
        attach::pin_program(&mut loaded.progs.fe_delivered, FE_DELIVERED, &config.pin_dir)?;
        attach::pin_program(&mut loaded.progs.fe_setsockopt, CALLS, &config.pin_dir)?;

        let program = |program: BorrowedFd<'_>, name| {
            program.try_clone_to_owned().map_err(|source| SteeringError::map("dup", name)(source.into()))
        };
        let handle = |map, name| MapHandle::try_from(map).map_err(SteeringError::map("dup", name));
        let mut frontend = Self {
            flows: handle(&*loaded.maps.flows, "flows")?,
            peers: handle(&*loaded.maps.peers, "peers")?,
            rings: handle(&*loaded.maps.rings, "rings")?,
            ring_owners: handle(&*loaded.maps.ring_owners, "ring_owners")?,
            counters: handle(&*loaded.maps.counters, "counters")?,
            begun: MappedArray::new(&loaded.maps.begun, (MAX_RINGS * BEGUN_OF_A_RING) as usize)
                .map_err(|source| SteeringError::map("mmap", "begun")(source.into()))?,
            fe_spacing: program(loaded.progs.fe_spacing.as_fd(), "fe_spacing")?,
            fe_delivered: program(loaded.progs.fe_delivered.as_fd(), "fe_delivered")?,
            fe_forget: program(loaded.progs.fe_forget.as_fd(), "fe_forget")?,
            fe_cancel: program(loaded.progs.fe_cancel.as_fd(), "fe_cancel")?,
            tc: Arc::new(TcPrograms(Vec::new())),
            older,
            noted: Noted {
                older_flows: handle(&*loaded.maps.older_flows, "older_flows")?,
                older_noted: handle(&*loaded.maps.older_noted, "older_noted")?,
            },
            ended: HashMap::new(),
        };
        frontend.attach(&mut loaded, config)?;
        Ok(frontend)
    }

    /// Attaches the programs. Those of an earlier agent answer until ours do.
    fn attach(&mut self, loaded: &mut FrontendSkel<'_>, config: &FrontendConfig) -> Result<(), SteeringError> {
        // Other layouts may get more connections until our programs are attached. Most are noted now, so that the rest
        // takes a short time: until all are noted, our programs begin no handoff on new connections.
        self.noted.set(&self.keys_of_older(), &self.older);
        // The tc programs come first: a handoff may begin as soon as the socket option is there.
        self.tc = Arc::new(TcPrograms(vec![
            attach::attach_tc(&mut loaded.progs.fe_in, FE_IN, &config.interfaces, &config.pin_dir)?,
            attach::attach_tc(&mut loaded.progs.fe_out, FE_OUT, &config.interfaces, &config.pin_dir)?,
        ]));
        let aside = older::directories(&config.pin_dir);
        calls::attach(&loaded.progs.fe_setsockopt, &config.cgroup, &config.pin_dir, &aside)?;
        older::leave_place(&config.pin_dir)?;
        // From here on, programs of other layouts begin no handoff, so all their connections can be noted.
        if !self.note_older(&self.keys_of_older())? {
            tracing::warn!(
                "more than {MAX_FLOWS} connections of other layouts: new ones get no shortcut until some of those end"
            );
        }
        Ok(())
    }

    /// Programs for the interfaces on which client packets arrive.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        Arc::clone(&self.tc)
    }

    /// Sets what the programs know of a backend. With `up` 0, new handoffs to it are refused, and active ones stay.
    ///
    /// # Errors
    /// Returns an error for an index that is not below MAX_PEERS, or the kernel's error of bpf(2).
    pub fn set_peer(&self, index: u32, peer: &SteerPeer) -> Result<(), SteeringError> {
        check_index("peer", index, MAX_PEERS)?;
        self.peers
            .update(&index.to_ne_bytes(), peer.as_bytes(), MapFlags::ANY)
            .map_err(SteeringError::map("update", "peers"))
    }

    /// Tells the programs how far apart the ACKs of a flow may be that its backend gets. Returns `false` if that
    /// backend does not send the flow's newest region.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2), BPF_PROG_TEST_RUN.
    pub fn set_spacing(&self, spacing: &Spacing) -> io::Result<bool> {
        ask(&self.fe_spacing, spacing.as_bytes())
    }

    /// Tells the programs that, by its backend's word, all of a payload is acknowledged. Returns `false` if the payload
    /// is not that backend's, or is over already.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2), BPF_PROG_TEST_RUN.
    pub fn set_delivered(&self, delivery: &Delivery) -> io::Result<bool> {
        if ask(&self.fe_delivered, delivery.as_bytes())? {
            return Ok(true);
        }
        for older in &self.older {
            if ask(&older.fe_delivered, delivery.as_bytes())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Cancels a region whose sender is gone. If the server's kernel then still sends bytes or a FIN on the connection,
    /// fe_out makes a reset of them. Returns `false` if the region has ended already.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2), BPF_PROG_TEST_RUN.
    pub fn cancel(&self, region: &ActiveRegion) -> io::Result<bool> {
        ask(&self.fe_cancel, &[&region.handoff.to_ne_bytes(), region.key.as_bytes()].concat())
    }

    /// Makes completion ring `index`, in place of an older one, and returns its descriptor for a worker to map. Only
    /// processes of the user `owner` (a uid) can name the ring in their handoffs.
    ///
    /// # Errors
    /// Returns an error for an index past the end, or the kernel's error of bpf(2).
    pub fn create_ring(&mut self, index: u32, owner: u32) -> Result<OwnedFd, SteeringError> {
        check_index("ring", index, MAX_RINGS)?;
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let ring = MapHandle::create(MapType::RingBuf, Some("shunt_ring"), 0, 0, RING_BYTES, &options)
            .map_err(SteeringError::map("create", "ring"))?;
        let descriptor = ring.as_fd().as_raw_fd() as u32;
        // The agent must not find regions of the ring's last server when the ring's next server tells it of a handoff.
        for row in 0..BEGUN_OF_A_RING {
            self.begun.write_field((index * BEGUN_OF_A_RING + row) as usize, offset_of!(Begun, handoff), 0u64);
        }
        self.ring_owners
            .update(&index.to_ne_bytes(), &owner.to_ne_bytes(), MapFlags::ANY)
            .map_err(SteeringError::map("update", "ring_owners"))?;
        self.rings
            .update(&index.to_ne_bytes(), &descriptor.to_ne_bytes(), MapFlags::ANY)
            .map_err(SteeringError::map("update", "rings"))?;
        // The programs of other layouts answer calls of this server, too. Without the ring they refuse these calls.
        for older in &self.older {
            let owner = older.ring_owners.update(&index.to_ne_bytes(), &owner.to_ne_bytes(), MapFlags::ANY);
            let ring = older.rings.update(&index.to_ne_bytes(), &descriptor.to_ne_bytes(), MapFlags::ANY);
            if let Err(error) = owner.and(ring) {
                tracing::warn!(%error, layout = older.layout, "cannot enter a completion ring in another layout's maps");
            }
        }
        ring.as_fd().try_clone_to_owned().map_err(|source| SteeringError::map("dup", "ring")(source.into()))
    }

    /// Returns the numbers of the rings that an earlier agent has left. Its servers may still name them in calls, until
    /// they have rings of this agent. To be called before [`create_ring`](Self::create_ring).
    pub fn left_rings(&self) -> Vec<u32> {
        let maps = || std::iter::once(&self.rings).chain(self.older.iter().map(|older| &older.rings));
        let is_there =
            |index: &u32| maps().any(|rings| matches!(rings.lookup(&index.to_ne_bytes(), MapFlags::ANY), Ok(Some(_))));
        (0..MAX_RINGS).filter(is_there).collect()
    }

    /// Removes a ring. From here on handoffs that name it are refused, and completions on their way to it are counted
    /// as lost. It is no error if there is no such ring.
    ///
    /// # Errors
    /// Returns an error for an index past the end, or the kernel's error of bpf(2).
    pub fn remove_ring(&self, index: u32) -> Result<(), SteeringError> {
        check_index("ring", index, MAX_RINGS)?;
        self.older.iter().for_each(|older| drop(older.rings.delete(&index.to_ne_bytes())));
        match self.rings.delete(&index.to_ne_bytes()) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(SteeringError::map("delete", "rings")(error))
            }
            _ => Ok(()),
        }
    }

    /// Reads the programs' record of one connection.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn flow(&self, key: &FlowKey) -> Result<Option<Flow>, SteeringError> {
        let bytes = self.flows.lookup(key.as_bytes(), MapFlags::LOCK).map_err(SteeringError::map("lookup", "flows"))?;
        Ok(bytes.and_then(|bytes| Flow::read_from_bytes(&bytes).ok()))
    }

    /// Reads the records of all connections. A connection that comes or goes meanwhile may be missed.
    pub fn flows(&self) -> impl Iterator<Item = (FlowKey, Flow)> {
        pins::entries(&self.flows, MapFlags::LOCK)
            .filter_map(|(key, flow)| Some((FlowKey::read_from_bytes(&key).ok()?, Flow::read_from_bytes(&flow).ok()?)))
    }

    /// Active region of a connection, if there is one.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn active_region(&self, key: &FlowKey) -> Result<Option<ActiveRegion>, SteeringError> {
        Ok(self.flow(key)?.and_then(|flow| ActiveRegion::of(*key, &flow)))
    }

    /// Whether the server that owns `ring` has just begun this handoff on this connection, or moved it to this peer.
    /// `true` means that the region is active, as [`Self::active_region`] would find with a system call. `false` can
    /// also mean that this is not known, or that an earlier call has returned `true` for the handoff.
    pub fn take_begun(&mut self, ring: u32, handoff: u64, peer: u32, key: &FlowKey) -> bool {
        if ring >= MAX_RINGS || handoff == 0 {
            return false;
        }
        let index = (ring * BEGUN_OF_A_RING) as usize + (handoff % u64::from(BEGUN_OF_A_RING)) as usize;
        let is_it = is_begun(&self.begun.read(index), handoff, peer, key, monotonic_ns());
        if is_it {
            self.begun.write_field(index, offset_of!(Begun, handoff), 0u64);
        }
        is_it
    }

    /// Active regions of all connections. A connection that comes or goes meanwhile may be missed.
    pub fn active_regions(&self) -> impl Iterator<Item = ActiveRegion> {
        self.flows().filter_map(|(key, flow)| ActiveRegion::of(key, &flow))
    }

    /// Forgets connections that have had no packet for `quiet` and have ended. A connection has ended if a reset or the
    /// FINs of both sides were seen, or if `is_alive` does not know it.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn collect_garbage(
        &self,
        quiet: Duration,
        mut is_alive: impl FnMut(&FlowKey) -> bool,
    ) -> Result<Collected, SteeringError> {
        let now = monotonic_ns();
        let quiet_since = now.saturating_sub(quiet.as_nanos() as u64);
        let mut flows = 0;
        let dead: Vec<(FlowKey, Flow)> = self
            .flows()
            .inspect(|_| flows += 1)
            .filter(|(_, flow)| flow.last_seen_ns < quiet_since)
            .filter(|(key, flow)| has_ended(flow) || !is_alive(key))
            .collect();
        let mut forgotten = 0;
        for (key, flow) in &dead {
            // A new connection may have the same addresses and ports by now. So fe_forget compares `last_seen_ns`.
            let forgetting = [&flow.last_seen_ns.to_ne_bytes(), key.as_bytes()].concat();
            let asked = ask(&self.fe_forget, &forgetting);
            if asked.map_err(|error| SteeringError::map("delete", "flows")(error.into()))? {
                forgotten += 1;
            }
        }
        Ok(Collected { forgotten, left: flows - forgotten })
    }

    fn keys_of_older(&self) -> HashSet<Vec<u8>> {
        self.older.iter().flat_map(Older::keys).collect()
    }

    /// Notes the connections of other layouts, which have these keys: our programs begin no handoff on them. Returns
    /// `false` if there are too many. Then our programs begin no handoff on any connection that they do not know.
    fn note_older(&self, keys: &HashSet<Vec<u8>>) -> Result<bool, SteeringError> {
        let are_all = self.noted.set(keys, &self.older);
        self.noted.are_all(are_all).map_err(SteeringError::map("update", "older_noted"))?;
        Ok(are_all)
    }

    /// Programs and maps of other layouts, whose connections have not all ended.
    pub fn older(&self) -> &[Older] {
        &self.older
    }

    /// Forgets connections of other layouts that `is_alive` has not known for `quiet`. Returns the layouts that have no
    /// connection left. The caller takes those out ([`Older::take_out`]).
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn collect_older(
        &mut self,
        now: Instant,
        quiet: Duration,
        is_alive: impl Fn(&FlowKey) -> bool,
    ) -> Result<Vec<Older>, SteeringError> {
        let is_dead = |key: &[u8]| FlowKey::read_from_bytes(key).is_ok_and(|key| !is_alive(&key));
        let (mut seen, mut done, mut left) = (HashSet::new(), Vec::new(), HashSet::new());
        for (number, older) in self.older.iter().enumerate() {
            let mut is_empty = true;
            for key in older.keys() {
                if is_dead(&key) {
                    if now.duration_since(*self.ended.entry(key.clone()).or_insert(now)) >= quiet {
                        forget(&older.flows, &key).map_err(SteeringError::map("delete", "flows"))?;
                        continue;
                    }
                    seen.insert(key.clone());
                }
                left.insert(key);
                is_empty = false;
            }
            // `keys` returns none if the kernel had no memory for the whole table. So the table is also asked for a
            // first key.
            if is_empty && older.flows.keys().next().is_none() {
                done.push(number);
            }
        }
        self.note_older(&left)?;
        self.ended.retain(|key, _| seen.contains(key));
        Ok(done.into_iter().rev().map(|number| self.older.remove(number)).collect())
    }

    /// Reads the programs' counters.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn counters(&self) -> Result<Vec<Counter>, SteeringError> {
        counters::read(&self.counters, "fe_")
    }

    /// Number of handoffs that the kernel has refused because the flow table is full.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn refused_full(&self) -> Result<u64, SteeringError> {
        counters::read_one(&self.counters, "fe_refused_full")
    }
}

/// Deletes an entry, if it is there.
fn forget(map: &MapHandle, key: &[u8]) -> libbpf_rs::Result<()> {
    match map.delete(key) {
        Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Runs a program of bpf/requests.h with `request`, and returns its answer.
fn ask(program: &OwnedFd, request: &[u8]) -> io::Result<bool> {
    let frame = [&[0; ETHERNET_BYTES], request].concat();
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        repeat: 1,
        ..Default::default()
    };
    // SAFETY: the descriptor is a program's. `options` holds the length of `frame`, and the kernel only reads `frame`.
    let status = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut options) };
    if status == 0 { Ok(options.retval as i32 == PASS) } else { Err(io::Error::from_raw_os_error(-status)) }
}

fn has_ended(flow: &Flow) -> bool {
    let flags = u32::from(flow.flags);
    let both = FLOW_CLIENT_FIN | FLOW_SERVER_FIN;
    flags & FLOW_RESET != 0 || flags & both == both
}

fn check_index(what: &'static str, index: u32, limit: u32) -> Result<(), SteeringError> {
    if index < limit { Ok(()) } else { Err(SteeringError::Index { what, index, limit }) }
}

/// Current time of the clock of `last_seen_ns` (bpf_ktime_get_coarse_ns), in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_has_ended_by_a_reset_or_by_both_fins() {
        let flow = |flags: u32| Flow { flags: flags as u8, ..Default::default() };
        assert!(has_ended(&flow(FLOW_RESET)));
        assert!(has_ended(&flow(FLOW_CLIENT_FIN | FLOW_SERVER_FIN)));
        assert!(!has_ended(&flow(FLOW_CLIENT_FIN)));
        assert!(!has_ended(&flow(FLOW_SERVER_FIN)));
    }

    #[test]
    fn a_region_has_begun_where_all_agrees_and_not_long_ago() {
        let (key, other) = (FlowKey { client_port: 1, ..Default::default() }, FlowKey::default());
        let begun = Begun { handoff: 5, begun_ns: 1_000, flow: key, peer: 2 };
        let fresh_until = 1_000 + FRESH.as_nanos() as u64;
        assert!(is_begun(&begun, 5, 2, &key, 1_000) && is_begun(&begun, 5, 2, &key, fresh_until - 1));
        assert!(!is_begun(&begun, 5, 2, &key, fresh_until), "it may be over by now");
        assert!(!is_begun(&begun, 6, 2, &key, 1_000) && !is_begun(&begun, 5, 3, &key, 1_000));
        assert!(!is_begun(&begun, 5, 2, &other, 1_000));
    }

    #[test]
    fn only_an_open_region_is_active_and_its_newest_break_says_whose() {
        let mut flow = Flow { mss: 1448, client_window: 2, snd_wscale: 10, ..Default::default() };
        assert!(ActiveRegion::of(FlowKey::default(), &flow).is_none(), "nothing has begun");
        flow.spaces.made = BREAKS + 1;
        (flow.spaces.status, flow.spaces.acked) = (ACTIVE, 77);
        (flow.spaces.breaks[0].peer, flow.spaces.breaks[0].length) = (9, 78);
        let region = ActiveRegion::of(FlowKey::default(), &flow).unwrap();
        assert_eq!((region.peer, region.acked, region.is_shut), (9, 77, false));
        flow.last_seen_ns = u64::MAX;
        assert_eq!(ActiveRegion::of(FlowKey::default(), &flow).unwrap().quiet, Duration::ZERO, "a packet just now");
        flow.last_seen_ns = monotonic_ns() - 3_000_000_000;
        assert!(ActiveRegion::of(FlowKey::default(), &flow).unwrap().quiet >= Duration::from_secs(3));
        flow.client_window = 1;
        assert!(ActiveRegion::of(FlowKey::default(), &flow).unwrap().is_shut);
        flow.spaces.acked = 78;
        assert!(!ActiveRegion::of(FlowKey::default(), &flow).unwrap().is_shut, "there is nothing that it could take");
        flow.spaces.status = 2;
        assert!(ActiveRegion::of(FlowKey::default(), &flow).is_none(), "complete");
    }

    #[test]
    fn an_index_past_the_end_is_refused_by_name() {
        let error = check_index("ring", MAX_RINGS, MAX_RINGS).unwrap_err();
        assert_eq!(error.to_string(), "no ring number 512: there are 512");
    }
}
