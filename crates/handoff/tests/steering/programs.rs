//! Loads the steering programs (BPF) in a new network namespace for each test, and runs them one packet at a time
//! (BPF_PROG_TEST_RUN). fe_in is the frontend's program on ingress, and be_in the backend's. A *flow* is the frontend's
//! record of a client connection. A *copy* is a client's packet as fe_in rewrites it for a backend. A *sender* is a
//! backend's socket for a client. A peer's *word* confirms that the client has acknowledged a whole payload. A *ring*
//! is a BPF ring buffer with the programs' records for a server.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::path::PathBuf;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, ProgramInput, ProgramMut, RingBufferBuilder, libbpf_sys};
use libbpf_rs::{TC_INGRESS, TcHookBuilder};
use shunt_handoff::bpf::backend::{BackendSkel, BackendSkelBuilder};
use shunt_handoff::bpf::frontend::{FrontendSkel, FrontendSkelBuilder};
use shunt_handoff::bpf::*;
use shunt_handoff::counters::COUNTERS;
use shunt_handoff::frontend::Delivery;
use shunt_handoff::{SteeringError, until_not_interrupted};
use shunt_wire::Endpoint;
use zerocopy::{FromBytes, IntoBytes};

use super::host::Host;
use super::segment::Segment;

pub const PASS: i32 = -1;
pub const SHOT: i32 = 2;
pub const REDIRECT: i32 = 7;

pub const ACTIVE: u32 = 1;
pub const COMPLETE: u32 = 2;
pub const CANCELLED: u32 = 3;

pub const PEER: u32 = 5;
pub const OTHER_PEER: u32 = 6;
pub const RING: u32 = 3;
pub const COPY_MARK: u32 = 0x5348_0000 | STEERING_LAYOUT << 8;

/// Priority of the steering programs on an interface (tc). Programs with a lower number run before them.
pub const PRIORITY: u32 = 2;

/// Offsets of fields in struct __sk_buff (linux/bpf.h).
const MARK: std::ops::Range<usize> = 8..12;
const IFINDEX: std::ops::Range<usize> = 40..44;
const SK_BUFF_BYTES: usize = 192;

pub fn client() -> SocketAddr {
    "10.0.0.2:40000".parse().unwrap()
}
pub fn server() -> SocketAddr {
    "10.0.0.1:80".parse().unwrap()
}
pub fn peer() -> SocketAddr {
    "10.1.0.2:7001".parse().unwrap()
}
pub fn other_peer() -> SocketAddr {
    "10.1.0.3:7001".parse().unwrap()
}

/// Result of running a program with a packet.
#[derive(Debug)]
pub struct Outcome {
    pub verdict: i32,
    pub frame: Vec<u8>,
    pub mark: u32,
}

impl Outcome {
    pub fn segment(&self) -> Segment {
        Segment::from_frame(&self.frame)
    }
}

pub fn run(program: &ProgramMut<'_>, ifindex: u32, frame: &[u8], mark: u32) -> Outcome {
    let mut context_in = [0u8; SK_BUFF_BYTES];
    context_in[MARK].copy_from_slice(&mark.to_ne_bytes());
    context_in[IFINDEX].copy_from_slice(&ifindex.to_ne_bytes());
    let mut context_out = [0u8; SK_BUFF_BYTES];
    let mut out = vec![0; frame.len() + 256];
    let (verdict, bytes) = {
        let input = ProgramInput {
            context_in: Some(&mut context_in),
            context_out: Some(&mut context_out),
            data_in: Some(frame),
            data_out: Some(&mut out),
            ..Default::default()
        };
        let output = program.test_run(input).expect("BPF_PROG_TEST_RUN");
        (output.return_value as i32, output.data.map_or(0, |data| data.len()))
    };
    out.truncate(bytes);
    let mark = u32::from_ne_bytes(context_out[MARK].try_into().unwrap());
    Outcome { verdict, frame: out, mark }
}

/// Returns the counters that have grown since the last call, and by how much.
fn grown(map: &impl MapCore, before: &mut Vec<u64>) -> BTreeMap<&'static str, u64> {
    let mut grown = BTreeMap::new();
    before.resize(COUNTERS.len(), 0);
    for (index, (name, _)) in COUNTERS.iter().enumerate() {
        let per_cpu = map.lookup_percpu(&(index as u32).to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
        let now: u64 = per_cpu.iter().map(|bytes| u64::from_ne_bytes(bytes.as_slice().try_into().unwrap())).sum();
        if now > before[index] {
            grown.insert(*name, now - before[index]);
        }
        before[index] = now;
    }
    grown
}

/// A directory of the BPF file system that is removed at the end of the test.
pub struct Pins(pub PathBuf);

impl Pins {
    pub fn new(host: &Host, what: &str) -> Self {
        let path = host.pins(what);
        std::fs::create_dir(&path).expect("a directory in /sys/fs/bpf");
        Self(path)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The frontend's programs. fe_in is attached to the port towards clients, so that it also handles the clones that it
/// makes.
pub struct Frontend {
    pub host: Host,
    pub skel: FrontendSkel<'static>,
    before: Vec<u64>,
    ring: MapHandle,
    _pins: Pins,
}

impl Frontend {
    pub fn new() -> Self {
        let host = Host::new();
        let pins = Pins::new(&host, "frontend");
        let skel = until_not_interrupted(|| {
            let storage = Box::leak(Box::new(MaybeUninit::uninit()));
            let mut builder = FrontendSkelBuilder::default();
            builder.obj_builder.pin_root_path(&pins.0).expect("a path");
            let open = builder.open(storage).expect("the object opens");
            open.load().map_err(|source| SteeringError::Load { object: "frontend", source })
        })
        .expect("the frontend's programs load");
        TcHookBuilder::new(std::os::fd::AsFd::as_fd(&skel.progs.fe_in))
            .ifindex(host.client_port as i32)
            .replace(true)
            .handle(1)
            .priority(PRIORITY)
            .hook(TC_INGRESS)
            .create()
            .and_then(|mut hook| hook.attach())
            .expect("fe_in on the client port");
        let ring = ring();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&ring)) as u32;
        skel.maps.rings.update(&RING.to_ne_bytes(), &descriptor.to_ne_bytes(), MapFlags::ANY).unwrap();
        let mut frontend = Self { host, skel, before: Vec::new(), ring, _pins: pins };
        frontend.set_peer(PEER, peer());
        frontend.set_peer(OTHER_PEER, other_peer());
        frontend.counted();
        frontend
    }

    /// Loads the programs, with one flow.
    pub fn with_flow(flow: &Flow) -> Self {
        let frontend = Self::new();
        frontend.set_flow(flow);
        frontend
    }

    pub fn set_peer(&self, index: u32, at: SocketAddr) {
        let endpoint = Endpoint::from(at);
        let mut peer = SteerPeer { port: u16::from_ne_bytes(endpoint.port_be), up: 1, ..Default::default() };
        if at.is_ipv4() {
            (peer.ipv4, peer.ipv4_ifindex) = (endpoint.address.0, self.host.backend_port);
        } else {
            (peer.ipv6, peer.ipv6_ifindex) = (endpoint.address.0, self.host.backend_port);
        }
        self.skel.maps.peers.update(&index.to_ne_bytes(), peer.as_bytes(), MapFlags::ANY).unwrap();
    }

    pub fn set_flow(&self, flow: &Flow) {
        self.set_flow_of(client(), server(), flow);
    }

    pub fn set_flow_of(&self, client: SocketAddr, server: SocketAddr, flow: &Flow) {
        self.skel.maps.flows.update(key(client, server).as_bytes(), flow.as_bytes(), MapFlags::ANY).unwrap();
    }

    pub fn find_flow(&self) -> Option<Flow> {
        let bytes = self.skel.maps.flows.lookup(key(client(), server()).as_bytes(), MapFlags::LOCK).unwrap();
        bytes.map(|bytes| Flow::read_from_bytes(&bytes).unwrap())
    }

    pub fn flow(&self) -> Flow {
        self.find_flow().expect("the flow is there")
    }

    pub fn fe_in(&self, segment: &Segment) -> Outcome {
        run(&self.skel.progs.fe_in, self.host.client_port, &segment.to_frame(), 0)
    }

    pub fn fe_out(&self, segment: &Segment) -> Outcome {
        run(&self.skel.progs.fe_out, self.host.client_port, &segment.to_frame(), 0)
    }

    /// Runs fe_delivered with a peer's word about a handoff on the connection of `client`. Returns the verdict.
    pub fn deliver(&self, client: SocketAddr, peer: u32, handoff: u64) -> i32 {
        let word = Delivery { flow: key(client, server()), peer, handoff };
        let frame = [&[0; 14], word.as_bytes()].concat();
        run(&self.skel.progs.fe_delivered, 1, &frame, 0).verdict
    }

    /// Returns the copies that have arrived at the far end of the port towards backends.
    pub fn copies(&self, expected: usize) -> Vec<Segment> {
        self.host.arrived(expected, |segment| segment.to.port() == peer().port())
    }

    pub fn counted(&mut self) -> BTreeMap<&'static str, u64> {
        grown(&self.skel.maps.counters, &mut self.before)
    }

    /// Returns the events in the ring: handoff, bytes acknowledged, kind.
    pub fn events(&self) -> Vec<(u64, u64, u32)> {
        records(&self.ring).iter().map(|record| event(record)).collect()
    }
}

/// Returns the records in a ring.
fn records(ring: &dyn MapCore) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    {
        let mut builder = RingBufferBuilder::new();
        let read = |bytes: &[u8]| {
            records.push(bytes.to_vec());
            0
        };
        builder.add(ring, read).unwrap();
        builder.build().unwrap().consume().unwrap();
    }
    records
}

/// Reads an event of the ring (`struct shunt_event`): handoff, bytes acknowledged, kind.
pub fn event(bytes: &[u8]) -> (u64, u64, u32) {
    let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    (u64_at(0), u64_at(8), u32::from_ne_bytes(bytes[16..20].try_into().unwrap()))
}

fn ring() -> MapHandle {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(MapType::RingBuf, Some("test"), 0, 0, RING_BYTES, &options).unwrap()
}

pub fn key(client: SocketAddr, server: SocketAddr) -> FlowKey {
    FlowKey::of(client.into(), server.into())
}

/// Changes a flow as the setsockopt SHUNT_BEGIN does, for tests that have no socket.
pub fn begin(flow: &mut Flow, local: u32, start: u32, length: u64, peer: u32) {
    let spaces = &mut flow.spaces;
    spaces.breaks[(spaces.made % BREAKS) as usize] = FlowBreak { local, start, length, peer, end: 0 };
    spaces.made += 1;
    spaces.status = ACTIVE;
    spaces.acked = 0;
    flow.hold_until = 0;
    flow.regions += 1;
    flow.start = start;
    flow.rcv_nxt = flow.server_ack;
    flow.edge = start.wrapping_add(length.min(1 << 30) as u32);
    flow.ring = RING;
    flow.handoff += 1;
    flow.flags &= !(FLOW_START_ACKED as u8);
}

pub fn complete(flow: &mut Flow) {
    flow.spaces.status = COMPLETE;
    flow.spaces.acked = flow.spaces.breaks[((flow.spaces.made - 1) % BREAKS) as usize].length;
}

/// The backend's programs. Ports 7000 to 7009 are reserved for senders.
pub struct Backend {
    pub host: Host,
    pub skel: BackendSkel<'static>,
    before: Vec<u64>,
    _pins: Pins,
}

impl Backend {
    pub fn new() -> Self {
        let host = Host::new();
        let pins = Pins::new(&host, "backend");
        let skel = until_not_interrupted(|| {
            let storage = Box::leak(Box::new(MaybeUninit::uninit()));
            let mut builder = BackendSkelBuilder::default();
            builder.obj_builder.pin_root_path(&pins.0).expect("a path");
            let mut open = builder.open(storage).expect("the object opens");
            let rodata = open.maps.rodata_data.as_mut().expect("the programs have parameters");
            rodata.sender_port_low = 7000;
            rodata.sender_port_high = 7009;
            open.load().map_err(|source| SteeringError::Load { object: "backend", source })
        })
        .expect("the backend's programs load");
        let mut backend = Self { host, skel, before: Vec::new(), _pins: pins };
        backend.counted();
        backend
    }

    pub fn set_sender(&self, client: SocketAddr, port: u16, index: u32, slot: &SenderSlot) {
        let endpoint = Endpoint::from(client);
        let key = SenderKey {
            client_address: endpoint.address.0,
            client_port: u16::from_ne_bytes(endpoint.port_be),
            port: port.to_be(),
        };
        self.skel.maps.senders.update(key.as_bytes(), &index.to_ne_bytes(), MapFlags::ANY).unwrap();
        self.skel.maps.sender_slots.update(&index.to_ne_bytes(), slot.as_bytes(), MapFlags::ANY).unwrap();
    }

    /// Returns the senders that be_in has reported to the agent: the end of their payload is acknowledged.
    pub fn reports(&self) -> Vec<SenderKey> {
        let reports = records(&self.skel.maps.words);
        reports.iter().map(|report| SenderKey::read_from_prefix(report).expect("a struct sender_key").0).collect()
    }

    pub fn slot(&self, index: u32) -> SenderSlot {
        let bytes = self.skel.maps.sender_slots.lookup(&index.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
        SenderSlot::read_from_bytes(&bytes).unwrap()
    }

    pub fn be_in(&self, segment: &Segment) -> Outcome {
        run(&self.skel.progs.be_in, self.host.backend_port, &segment.to_frame(), 0)
    }

    pub fn be_out(&self, segment: &Segment) -> Outcome {
        run(&self.skel.progs.be_out, self.host.backend_port, &segment.to_frame(), 0)
    }

    pub fn counted(&mut self) -> BTreeMap<&'static str, u64> {
        grown(&self.skel.maps.counters, &mut self.before)
    }
}

/// Returns exactly these counters, with the value 1 each.
pub fn once(names: &[&'static str]) -> BTreeMap<&'static str, u64> {
    names.iter().map(|name| (*name, 1)).collect()
}
