//! Tests of loading the steering programs, of taking over those that an earlier agent has left, and of taking them off
//! interfaces. A *flow* is the programs' record of a client connection. A *layout* is a version of the maps' contents.

use std::path::{Path, PathBuf};
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, MapHandle, TC_EGRESS, TC_INGRESS, TcHookBuilder};
use shunt_handoff::bpf::*;
use shunt_handoff::frontend::Collected;
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, Frontend, FrontendConfig, SteeringError, detach_all, end_handoffs};
use zerocopy::{FromBytes, IntoBytes};

use super::host::{Host, cgroup, ifindex};
use super::programs::{Pins, client, key, server};
use super::steered::cookie;

pub fn frontend_config(host: &Host, pins: &Pins) -> FrontendConfig {
    let interfaces = vec![host.client_port];
    FrontendConfig { pin_dir: pins.0.clone(), netns_cookie: cookie(), cgroup: cgroup(), interfaces }
}

pub fn backend_config(host: &Host, pins: &Pins) -> BackendConfig {
    BackendConfig {
        pin_dir: pins.0.clone(),
        netns_cookie: 1,
        cgroup: cgroup(),
        interfaces: vec![host.backend_port],
        ports: 7000..=7009,
    }
}

/// A loaded frontend, and the map of its flows.
pub struct Loaded {
    pub flows: MapHandle,
    pub frontend: Frontend,
    pub pins: Pins,
    pub host: Host,
}

impl Loaded {
    /// Loads a frontend.
    pub fn new() -> Self {
        let host = Host::new();
        let pins = Pins::new(&host, "loader");
        let frontend = Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads");
        let flows = MapHandle::from_pinned_path(pins.0.join("flows")).expect("pinned");
        Self { flows, frontend, pins, host }
    }
}

/// Time since the machine started, in nanoseconds. The machine may have started just now, so tests use parts of this
/// time as ages of flows.
fn monotonic_ns() -> u64 {
    Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Monotonic)).expect("after 0").as_nanos()
        as u64
}

/// Adds a flow, as if the client had a connection from the port `port`.
pub fn put(flows: &MapHandle, port: u16, flow: &Flow) {
    let mut at = client();
    at.set_port(port);
    flows.update(key(at, server()).as_bytes(), flow.as_bytes(), MapFlags::ANY).expect("update");
}

/// Returns the interfaces that have a filter of our layout at this priority. For each: whether it has one at ingress,
/// and at egress.
fn attached(priority: u32) -> Vec<(u32, bool, bool)> {
    attached_at(STEERING_LAYOUT, priority)
}

/// Does the same as [`attached`] for any layout, whose number is the handle of its filters.
pub fn attached_at(layout: u32, priority: u32) -> Vec<(u32, bool, bool)> {
    let any = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let found = |ifindex: u32, point| {
        let mut builder = TcHookBuilder::new(std::os::fd::AsFd::as_fd(&any));
        builder.ifindex(ifindex as i32).handle(layout).priority(priority).hook(point).query().is_ok()
    };
    let both = DEVICES.map(ifindex).map(|device| (device, found(device, TC_INGRESS), found(device, TC_EGRESS)));
    both.into_iter().filter(|(_, ingress, egress)| *ingress || *egress).collect()
}

pub const DEVICES: [&str; 5] = ["lo", "client0", "client1", "backend0", "backend1"];
pub const FRONTEND_PRIORITY: u32 = 0x5346;
pub const BACKEND_PRIORITY: u32 = 0x5342;

#[test]
fn both_sides_share_a_directory_and_leave_nothing_behind() {
    let host = Host::new();
    let pins = Pins::new(&host, "loader");
    let _frontend = Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads");
    let _backend = Backend::load(&backend_config(&host, &pins)).expect("the backend loads");
    assert_eq!(attached(FRONTEND_PRIORITY), [(host.client_port, true, true)]);
    assert_eq!(attached(BACKEND_PRIORITY), [(host.backend_port, true, true)]);

    detach_all(&pins.0).expect("detach_all");
    assert_eq!((attached(FRONTEND_PRIORITY), attached(BACKEND_PRIORITY)), (vec![], vec![]));
    assert!(!pins.0.exists(), "links end with their pins");
    detach_all(&pins.0).expect("and again");
}

#[test]
fn a_restart_keeps_the_flows_and_moves_to_the_configured_interfaces() {
    let Loaded { host, pins, frontend, flows } = Loaded::new();
    drop(frontend);
    put(&flows, client().port(), &Flow { handoff: 99, ..Default::default() });

    let mut config = frontend_config(&host, &pins);
    config.interfaces = vec![host.backend_port];
    let frontend = Frontend::load(&config).expect("the frontend loads again");
    assert_eq!(frontend.flow(&key(client(), server())).expect("lookup").expect("the flow").handoff, 99);
    assert_eq!(frontend.flows().count(), 1);
    assert_eq!(attached(FRONTEND_PRIORITY), [(host.backend_port, true, true)]);
    detach_all(&pins.0).expect("detach_all");
}

/// Writes another layout's number into the pinned maps, as if an agent of that layout had made them.
pub fn call_it(directory: &Path, number: u32) {
    let layout = MapHandle::from_pinned_path(directory.join("layout")).expect("pinned");
    layout.update(&0u32.to_ne_bytes(), &number.to_ne_bytes(), MapFlags::ANY).expect("update");
}

/// Number of another layout than that of these tests. Like our programs, those of this layout can run beside programs
/// of other layouts.
pub const OTHER_LAYOUT: u32 = STEERING_LAYOUT + 1;

#[test]
fn maps_of_a_layout_that_leaves_no_room_are_refused_with_what_to_do() {
    let Loaded { host, pins, frontend, .. } = Loaded::new();
    drop(frontend);
    let config = frontend_config(&host, &pins);
    call_it(&pins.0, 12);
    let error = Frontend::load(&config).expect_err("another layout");
    assert!(matches!(error, SteeringError::Layout { .. }), "{error}");
    assert!(error.to_string().contains("shuntd --detach"), "{error}");
    detach_all(&pins.0).expect("detach_all");
    Frontend::load(&config).expect("the sentence was right");
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn connections_with_breaks_are_told_before_the_programs_go() {
    let Loaded { host: _host, pins, frontend, flows } = Loaded::new();
    drop(frontend);
    let mut moved = Flow::default();
    moved.spaces.made = 1;
    put(&flows, 1, &moved);
    put(&flows, 2, &Flow::default());
    let ports = || {
        let told = end_handoffs(&pins.0).expect("end_handoffs");
        let mut ports: Vec<u16> = told.iter().map(|key| u16::from_be(key.client_port)).collect();
        ports.sort_unstable();
        ports
    };
    assert_eq!(ports(), [1]);
    assert!(!pins.0.join("fe_setsockopt").exists(), "a handoff could begin");
    call_it(&pins.0, OTHER_LAYOUT);
    assert_eq!(ports(), [1, 2], "of another layout: any may have some");
    detach_all(&pins.0).expect("detach_all");
    assert_eq!(end_handoffs(&pins.0).expect("end_handoffs").len(), 0);
}

#[test]
fn a_directory_elsewhere_is_refused_with_what_to_do() {
    let host = Host::new();
    let pins = Pins(PathBuf::from(format!("/tmp/{}-not-bpffs", host.name)));
    let error = Frontend::load(&frontend_config(&host, &pins)).expect_err("not a BPF file system");
    assert!(error.to_string().contains("mount -t bpf"), "{error}");
}

#[test]
fn garbage_is_what_has_ended_or_nobody_knows_and_is_quiet() {
    let Loaded { host: _host, pins, frontend, flows } = Loaded::new();
    let now = monotonic_ns();
    let add = |port: u16, flags: u32, last_seen_ns: u64| {
        put(&flows, port, &Flow { flags: flags as u8, last_seen_ns, ..Default::default() });
    };
    add(1, FLOW_RESET, 1);
    add(2, FLOW_CLIENT_FIN | FLOW_SERVER_FIN, 1);
    add(3, 0, 1); // not known to be alive
    add(4, FLOW_CLIENT_FIN, 1); // known to be alive
    add(5, FLOW_RESET, now); // late packets may come
    let mut asked = Vec::new();
    let collected = frontend.collect_garbage(Duration::from_nanos(now / 2), |key| {
        asked.push(u16::from_be(key.client_port));
        u16::from_be(key.client_port) == 4
    });
    assert_eq!(collected.expect("collect"), Collected { forgotten: 3, left: 2 });
    asked.sort_unstable();
    assert_eq!(asked, [3, 4], "only those in doubt");
    let mut left: Vec<u16> = frontend.flows().map(|(key, _)| u16::from_be(key.client_port)).collect();
    left.sort_unstable();
    assert_eq!(left, [4, 5]);
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn a_new_connection_from_the_port_of_an_ended_one_is_no_garbage() {
    let Loaded { host: _host, pins, frontend, flows } = Loaded::new();
    put(&flows, 1, &Flow { flags: FLOW_RESET as u8, last_seen_ns: 1, ..Default::default() });
    put(&flows, 2, &Flow { last_seen_ns: 1, ..Default::default() }); // not ended: the closure below is asked about it
    let collected = frontend.collect_garbage(Duration::from_nanos(monotonic_ns() / 2), |_| {
        // Runs after the table was read and before anything is deleted: the client connects again, and is handed off.
        put(&flows, 1, &Flow { last_seen_ns: 2, handoff: 7, ..Default::default() });
        true
    });
    assert_eq!(collected.expect("collect"), Collected { forgotten: 0, left: 2 });
    let handoffs: Vec<u64> = frontend.flows().map(|(_, flow)| flow.handoff).filter(|name| *name != 0).collect();
    assert_eq!(handoffs, [7]);
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn a_table_of_many_flows_is_read_whole() {
    let Loaded { host: _host, pins, frontend, flows } = Loaded::new();
    for number in 0..20_000 {
        put(&flows, number, &Flow { last_seen_ns: u64::from(number), ..Default::default() });
    }
    let mut found: Vec<u64> = frontend.flows().map(|(_, flow)| flow.last_seen_ns).collect();
    found.sort_unstable();
    assert!(found.iter().copied().eq(0..20_000), "{} of 20000 flows", found.len());
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn rings_come_and_go_by_number() {
    let Loaded { host: _host, pins, mut frontend, .. } = Loaded::new();
    frontend.create_ring(MAX_RINGS - 1, 0).expect("the last");
    frontend.create_ring(MAX_RINGS - 1, 0).expect("in place of the first");
    frontend.remove_ring(MAX_RINGS - 1).expect("there");
    frontend.remove_ring(MAX_RINGS - 1).expect("not there");
    assert!(matches!(frontend.create_ring(MAX_RINGS, 0), Err(SteeringError::Index { .. })));
    assert!(matches!(frontend.set_peer(MAX_PEERS, &SteerPeer::default()), Err(SteeringError::Index { .. })));
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn senders_are_written_found_and_forgotten() {
    let host = Host::new();
    let pins = Pins::new(&host, "loader");
    let config = backend_config(&host, &pins);
    let mut backend = Backend::load(&config).expect("the backend loads");
    let slot = Slot {
        server: server().into(),
        live: true,
        start: 1,
        seq_delta: 2,
        ts_delta: 3,
        rcv_nxt: 4,
        ack: 5,
        snd_cwnd: 6,
        ts_recent: 7,
        ahead: 8,
    };
    let slots = MapHandle::from_pinned_path(pins.0.join("sender_slots")).expect("pinned");
    let read = || {
        let bytes = slots.lookup(&8u32.to_ne_bytes(), MapFlags::ANY).expect("lookup").expect("an array");
        SenderSlot::read_from_bytes(&bytes).expect("a slot")
    };
    slots
        .update(&8u32.to_ne_bytes(), SenderSlot { window: 9, ..Default::default() }.as_bytes(), MapFlags::ANY)
        .unwrap();
    backend.write_slot(8, &slot);
    assert_eq!((read().live, read().start, read().ts_recent), (1, 1, 7));
    assert_eq!(backend.window(8), 9, "the window is the programs'");

    let senders = MapHandle::from_pinned_path(pins.0.join("senders")).expect("pinned");
    let key = SenderKey { client: client().into(), port: 7001 };
    backend.insert(&key, 8).expect("insert");
    assert_eq!(senders.keys().count(), 1);
    backend.remove(&key);
    backend.remove(&key);
    assert_eq!(senders.keys().count(), 0);
    backend.insert(&key, 8).expect("insert");
    let _backend = Backend::load(&config).expect("the backend loads again");
    assert_eq!(senders.keys().count(), 0, "their sockets ended with the agent");
    detach_all(&pins.0).expect("detach_all");
}

/// A control group (cgroup v2) for one test, which is removed at the test's end.
pub struct Group(pub PathBuf);

impl Group {
    pub fn new(name: &str) -> Self {
        let path = cgroup().join(format!("shunt-test-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).expect("a control group");
        Self(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn two_agents_share_no_interface_and_take_out_their_own_alone() {
    let (host, groups) = (Host::new(), ["one", "other"].map(Group::new));
    let (pins, others) = (Pins::new(&host, "loader"), Pins::new(&host, "loader-other"));
    let of = |pins, group: &Group| FrontendConfig { cgroup: group.0.clone(), ..frontend_config(&host, pins) };
    let _first = Frontend::load(&of(&pins, &groups[0])).expect("the frontend loads");
    let config = of(&others, &groups[1]);
    let error = Frontend::load(&config).expect_err("the interface is another agent's").to_string();
    assert!(error.starts_with("interface \"client0\" has the program fe_in of another agent"), "{error}");
    assert!(error.contains(&pins.0.display().to_string()), "it does not name the other: {error}");
    assert_eq!(attached(FRONTEND_PRIORITY), [(host.client_port, true, true)]);

    let _second =
        Frontend::load(&FrontendConfig { interfaces: vec![host.backend_port], ..config }).expect("another one");
    let both = [(host.client_port, true, true), (host.backend_port, true, true)];
    assert_eq!(attached(FRONTEND_PRIORITY), both, "it has taken the first one's programs out");
    detach_all(&others.0).expect("detach_all");
    assert_eq!(attached(FRONTEND_PRIORITY), both[..1]);
    detach_all(&pins.0).expect("detach_all");
    assert_eq!(attached(FRONTEND_PRIORITY), []);
}

/// A second agent with the same servers is refused. Otherwise one agent's program would begin each handoff of these
/// servers, and the other agent's program would refuse it.
#[test]
fn the_servers_of_a_control_group_are_one_agents() {
    let Loaded { host, pins, .. } = Loaded::new();
    let (others, below) = (Pins::new(&host, "loader-other"), Group::new("below"));
    let config = FrontendConfig { interfaces: vec![host.backend_port], ..frontend_config(&host, &others) };
    for cgroup in [cgroup(), below.0.clone()] {
        let error = Frontend::load(&FrontendConfig { cgroup, ..config.clone() }).expect_err("another's servers");
        assert!(matches!(error, SteeringError::Neighbour { .. }), "{error}");
        assert!(error.to_string().contains(&pins.0.display().to_string()), "it does not name the other: {error}");
    }
    assert_eq!(attached(FRONTEND_PRIORITY), [(host.client_port, true, true)]);
    detach_all(&pins.0).expect("detach_all");
    let _alone = Frontend::load(&config).expect("the other one is gone");
    detach_all(&others.0).expect("detach_all");
}
