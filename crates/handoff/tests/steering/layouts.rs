//! Tests of steering programs (BPF) of several layouts side by side. A *layout* is a version of the maps' contents. A
//! *flow* is the programs' record of a client connection, and a *region* is a range of the connection's bytes that a
//! backend sends. Programs of another layout stay until the connections in their table of flows have ended.
//!
//! Only one layout is built for these tests. An agent of another layout is one of ours whose maps get another number
//! afterwards, and whose programs move to that layout's handle on the interfaces.

use std::ffi::CString;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Program, TC_EGRESS, TC_INGRESS, TcHookBuilder, libbpf_sys};
use shunt_handoff::bpf::*;
use shunt_handoff::{Backend, Frontend, FrontendConfig, detach_all};
use shunt_sys::sockopt;
use zerocopy::{FromBytes, IntoBytes};

use super::host::{Host, cgroup, ifindex};
use super::loader::*;
use super::programs::{ACTIVE, CANCELLED, Pins, client, key, server};
use super::steered::{SHUNT_CANCEL, SHUNT_SOL, begin};

const HOUR: Duration = Duration::from_secs(3600);

/// Makes the maps and programs that an agent has left look like those of another layout.
fn make_other(pin_dir: &Path, layout: u32) {
    call_it(pin_dir, layout);
    let programs = [
        ("fe_in", FRONTEND_PRIORITY, TC_INGRESS),
        ("fe_out", FRONTEND_PRIORITY, TC_EGRESS),
        ("be_in", BACKEND_PRIORITY, TC_INGRESS),
        ("be_out", BACKEND_PRIORITY, TC_EGRESS),
    ];
    for (name, priority, point) in programs {
        let Ok(program) = Program::fd_from_pinned_path(pin_dir.join(name)) else { continue };
        for device in DEVICES.map(ifindex) {
            let mut builder = TcHookBuilder::new(program.as_fd());
            builder.ifindex(device as i32).priority(priority);
            let mut there = builder.handle(STEERING_LAYOUT).hook(point);
            if there.query().is_ok() {
                builder.handle(layout).hook(point).attach().expect("attach");
                there.detach().expect("detach");
            }
        }
    }
}

fn aside(pins: &Pins, layout: u32) -> PathBuf {
    pins.0.join(format!("older_{layout}"))
}

/// A connection within the test's network namespace.
struct Connection {
    server: TcpStream,
    _client: TcpStream,
}

impl Connection {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("connect");
        Self { server: listener.accept().expect("accept").0, _client: client }
    }

    fn key(&self) -> FlowKey {
        key(self.server.peer_addr().expect("an address"), self.server.local_addr().expect("an address"))
    }

    /// Puts an active region of this connection into the maps of a layout.
    fn is_active_in(&self, directory: &Path) {
        let mut flow = Flow::default();
        (flow.spaces.made, flow.spaces.status) = (1, ACTIVE);
        flows(directory).update(self.key().as_bytes(), flow.as_bytes(), MapFlags::ANY).expect("update");
    }

    /// Asserts that calls on this connection are answered by the layout whose maps are in this directory.
    fn is_answered_by(&self, directory: &Path) {
        self.is_active_in(directory);
        sockopt::set(&self.server, SHUNT_SOL, SHUNT_CANCEL, &0u32).expect("SHUNT_CANCEL");
        let flow = flows(directory).lookup(self.key().as_bytes(), MapFlags::ANY).expect("lookup").expect("a flow");
        let status = Flow::read_from_bytes(&flow).expect("a flow").spaces.status;
        assert_eq!(status, CANCELLED, "the layout in {} has not answered", directory.display());
    }
}

fn map(directory: &Path, name: &str) -> MapHandle {
    MapHandle::from_pinned_path(directory.join(name)).expect("pinned")
}

fn flows(directory: &Path) -> MapHandle {
    map(directory, "flows")
}

/// A host where agents of other layouts have run, one after the other, and then ours. Each of the other layouts has a
/// connection.
struct Several {
    connections: Vec<(u32, Connection)>,
    frontend: Frontend,
    config: FrontendConfig,
    pins: Pins,
    _host: Host,
}

impl Several {
    fn new(layouts: &[u32]) -> Self {
        Self::started_with(layouts, frontend_config)
    }

    fn started_with(layouts: &[u32], config: impl Fn(&Host, &Pins) -> FrontendConfig) -> Self {
        let host = Host::new();
        let pins = Pins::new(&host, "loader");
        let config = config(&host, &pins);
        let load = |layout: &u32| {
            drop(Frontend::load(&config).expect("the frontend loads"));
            let connection = Connection::new();
            connection.is_active_in(&pins.0);
            make_other(&pins.0, *layout);
            (*layout, connection)
        };
        let connections = layouts.iter().map(load).collect();
        let frontend = Frontend::load(&config).expect("the frontend loads");
        Self { connections, frontend, config, pins, _host: host }
    }

    fn load(&mut self) {
        self.frontend = Frontend::load(&self.config).expect("the frontend loads");
    }

    /// Asserts that each layout's programs answer calls on that layout's connections, and that our programs answer
    /// calls on all others.
    fn all_are_answered(&self) {
        for (layout, connection) in &self.connections {
            connection.is_answered_by(&aside(&self.pins, *layout));
        }
        Connection::new().is_answered_by(&self.pins.0);
    }
}

impl Drop for Several {
    fn drop(&mut self) {
        let _ = detach_all(&self.pins.0);
    }
}

#[test]
fn another_layout_stays_until_its_connections_have_ended() {
    let Loaded { host, pins, frontend, flows } = Loaded::new();
    drop(frontend);
    put(&flows, client().port(), &Flow { handoff: 99, ..Default::default() });
    drop(flows);
    make_other(&pins.0, OTHER_LAYOUT);

    let mut frontend = Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads beside it");
    let aside = aside(&pins, OTHER_LAYOUT);
    let theirs = map(&aside, "flows");
    assert_eq!((theirs.keys().count(), frontend.flows().count()), (1, 0), "each layout has its own table");
    assert_eq!(frontend.older().iter().map(|older| older.layout).collect::<Vec<_>>(), [OTHER_LAYOUT]);
    let known = map(&pins.0, "older_flows");
    assert_eq!(known.keys().next().as_deref(), Some(key(client(), server()).as_bytes()));
    assert!(aside.join("fe_setsockopt").exists(), "nobody answers calls on its connections");
    for layout in [OTHER_LAYOUT, STEERING_LAYOUT] {
        assert_eq!(attached_at(layout, FRONTEND_PRIORITY), [(host.client_port, true, true)], "layout {layout}");
    }

    let now = Instant::now();
    assert!(frontend.collect_older(now, Duration::ZERO, |_| true).expect("collect").is_empty(), "a connection lives");
    assert!(frontend.collect_older(now, HOUR, |_| false).expect("collect").is_empty(), "late packets may come");
    assert!(frontend.collect_older(now + HOUR, HOUR, |_| true).expect("collect").is_empty(), "it lives after all");
    assert!(frontend.collect_older(now + HOUR, HOUR, |_| false).expect("collect").is_empty(), "it has just ended");
    let done = frontend.collect_older(now + 2 * HOUR, HOUR, |_| false).expect("collect");
    assert_eq!((done.len(), frontend.older().len(), known.keys().count()), (1, 0, 0));
    done.into_iter().for_each(|older| older.take_out().expect("take_out"));
    assert!(!aside.exists());
    assert_eq!(attached_at(OTHER_LAYOUT, FRONTEND_PRIORITY), [], "theirs stay");
    assert_eq!(attached_at(STEERING_LAYOUT, FRONTEND_PRIORITY), [(host.client_port, true, true)], "ours stay");
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn an_agent_takes_its_own_layout_back() {
    let Loaded { host, pins, frontend, flows } = Loaded::new();
    drop(frontend);
    put(&flows, client().port(), &Flow { handoff: 99, ..Default::default() });
    drop(flows);
    make_other(&pins.0, OTHER_LAYOUT);
    drop(Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads beside it"));
    // The layout that was put aside gets our number, and the maps in our directory another one.
    make_other(&pins.0, OTHER_LAYOUT + 1);
    call_it(&aside(&pins, OTHER_LAYOUT), STEERING_LAYOUT);
    std::fs::rename(aside(&pins, OTHER_LAYOUT), aside(&pins, STEERING_LAYOUT)).expect("rename");
    let theirs = Connection::new();
    theirs.is_active_in(&pins.0);

    let frontend = Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads");
    assert_eq!(frontend.flow(&key(client(), server())).expect("lookup").expect("the flow").handoff, 99);
    assert!(!aside(&pins, STEERING_LAYOUT).exists(), "two links answer its calls");
    theirs.is_answered_by(&aside(&pins, OTHER_LAYOUT + 1));
    Connection::new().is_answered_by(&pins.0);
    detach_all(&pins.0).expect("detach_all");
    assert!(!pins.0.exists(), "what was put aside stays");
}

#[test]
fn senders_of_another_layout_do_not_stay() {
    let host = Host::new();
    let pins = Pins::new(&host, "loader");
    drop(Backend::load(&backend_config(&host, &pins)).expect("the backend loads"));
    make_other(&pins.0, OTHER_LAYOUT);
    assert_eq!(attached_at(OTHER_LAYOUT, BACKEND_PRIORITY), [(host.backend_port, true, true)]);
    drop(Backend::load(&backend_config(&host, &pins)).expect("the backend loads in its place"));
    assert!(!aside(&pins, OTHER_LAYOUT).exists());
    assert_eq!(attached_at(OTHER_LAYOUT, BACKEND_PRIORITY), []);
    assert_eq!(attached_at(STEERING_LAYOUT, BACKEND_PRIORITY), [(host.backend_port, true, true)]);
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn an_agent_without_backend_takes_the_senders_programs_of_another_layout_out() {
    let Loaded { host, pins, frontend, flows: _flows } = Loaded::new();
    drop(frontend);
    drop(Backend::load(&backend_config(&host, &pins)).expect("the backend loads"));
    make_other(&pins.0, OTHER_LAYOUT);
    let mut frontend = Frontend::load(&frontend_config(&host, &pins)).expect("the frontend loads");
    let done = frontend.collect_older(Instant::now(), Duration::ZERO, |_| false).expect("collect");
    done.into_iter().for_each(|older| older.take_out().expect("take_out"));
    assert_eq!(attached_at(OTHER_LAYOUT, BACKEND_PRIORITY), []);
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn calls_reach_the_layout_of_their_connection() {
    let mut several = Several::new(&[OTHER_LAYOUT, OTHER_LAYOUT + 1]);
    several.all_are_answered();
    several.load();
    several.all_are_answered();
}

#[test]
fn calls_are_answered_while_an_agent_starts() {
    let several = Several::new(&[OTHER_LAYOUT, OTHER_LAYOUT + 1]);
    let config = several.config.clone();
    let starts = std::thread::spawn(move || {
        for _ in 0..3 {
            drop(Frontend::load(&config).expect("the frontend loads"));
        }
    });
    while !starts.is_finished() {
        several.all_are_answered();
    }
    starts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn calls_reach_the_layout_of_their_connection_in_another_control_group() {
    let group = Group::new("former");
    let former = |host: &Host, pins: &Pins| FrontendConfig { cgroup: group.0.clone(), ..frontend_config(host, pins) };
    let mut several = Several::started_with(&[OTHER_LAYOUT], former);
    make_other(&several.pins.0, OTHER_LAYOUT + 1);
    several.connections.push((OTHER_LAYOUT + 1, Connection::new()));
    several.connections[1].1.is_active_in(&several.pins.0);
    several.config.cgroup = cgroup();
    several.load();
    several.all_are_answered();
    // The control group may also change without the layout.
    several.config.cgroup = group.0.clone();
    several.load();
    let id = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&group.0).expect("a control group"));
    for layout in [OTHER_LAYOUT, OTHER_LAYOUT + 1] {
        let link = Link::open(aside(&several.pins, layout).join("fe_setsockopt")).expect("a link");
        let LinkTypeInfo::Cgroup(at) = link.info().expect("info").info else { panic!("a link of a control group") };
        assert_eq!(at.cgroup_id, id, "layout {layout}");
    }
}

/// Attaches a layout's program by one more link, and pins the link. An agent that ends while it starts leaves such a
/// link.
fn begin_new_link(directory: &Path) {
    let program = Program::fd_from_pinned_path(directory.join("fe_setsockopt_program")).expect("pinned");
    let group = std::fs::File::open(cgroup()).expect("a control group");
    let pin = CString::new(directory.join("fe_setsockopt_next").as_os_str().as_bytes()).expect("a path");
    let (program, group, kind) = (program.as_raw_fd(), group.as_raw_fd(), libbpf_sys::BPF_CGROUP_SETSOCKOPT);
    // SAFETY: both descriptors are open, and libbpf takes NULL for no options.
    let link = unsafe { libbpf_sys::bpf_link_create(program, group, kind, std::ptr::null()) };
    assert!(link >= 0, "bpf_link_create: {link}");
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    // SAFETY: the descriptor is open, and the path is a string that ends with 0.
    assert_eq!(unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), pin.as_ptr()) }, 0);
}

#[test]
fn links_that_an_agent_has_begun_to_make_do_not_stay() {
    let mut several = Several::new(&[OTHER_LAYOUT, OTHER_LAYOUT + 1]);
    let directories =
        [several.pins.0.clone(), aside(&several.pins, OTHER_LAYOUT), aside(&several.pins, OTHER_LAYOUT + 1)];
    directories.iter().for_each(|directory| begin_new_link(directory));
    several.all_are_answered();
    several.load();
    several.all_are_answered();
    assert!(directories.iter().all(|directory| !directory.join("fe_setsockopt_next").exists()));
}

/// Moves all pins from one directory to another, except the link (fe_setsockopt).
fn move_all(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("readdir").map(|entry| entry.expect("an entry")) {
        if !entry.file_type().expect("a type").is_dir() && entry.file_name() != "fe_setsockopt" {
            std::fs::rename(entry.path(), to.join(entry.file_name())).expect("rename");
        }
    }
}

#[test]
fn each_layout_keeps_its_program_where_a_way_back_fails() {
    let mut several = Several::new(&[OTHER_LAYOUT]);
    let ours = Connection::new();
    ours.is_active_in(&several.pins.0);
    // An agent of the other layout puts our pins aside, takes its own back, and ends.
    std::fs::create_dir(aside(&several.pins, STEERING_LAYOUT)).expect("mkdir");
    move_all(&several.pins.0, &aside(&several.pins, STEERING_LAYOUT));
    move_all(&aside(&several.pins, OTHER_LAYOUT), &several.pins.0);
    several.load();
    ours.is_answered_by(&several.pins.0);
    several.all_are_answered();
}

#[test]
fn an_interrupted_move_of_pins_is_finished_or_taken_back() {
    let mut several = Several::new(&[OTHER_LAYOUT]);
    let ours = Connection::new();
    ours.is_active_in(&several.pins.0);
    // An agent of another layout has ended while it put our pins aside.
    let pins = several.pins.0.clone();
    std::fs::create_dir(aside(&several.pins, STEERING_LAYOUT)).expect("mkdir");
    for name in ["counters", "flows"] {
        std::fs::rename(pins.join(name), aside(&several.pins, STEERING_LAYOUT).join(name)).expect("rename");
    }
    several.load();
    assert_eq!(several.frontend.flows().count(), 1);
    // Another such agent has ended while it took its own pins back. Such an agent moves the pin `layout` first.
    std::fs::create_dir(aside(&several.pins, STEERING_LAYOUT)).expect("mkdir");
    move_all(&pins, &aside(&several.pins, STEERING_LAYOUT));
    for name in ["layout", "counters", "flows"] {
        std::fs::rename(aside(&several.pins, OTHER_LAYOUT).join(name), pins.join(name)).expect("rename");
    }
    several.load();
    ours.is_answered_by(&several.pins.0);
    several.all_are_answered();
}

/// Counts the calls that were refused because another layout steers the connection, or may steer it.
fn refused_older(frontend: &Frontend) -> u64 {
    let counters = frontend.counters().expect("counters");
    counters.iter().find(|counter| counter.name.ends_with("refused_older")).expect("a counter").value
}

#[test]
fn nothing_begins_where_other_layouts_have_more_connections_than_can_be_noted() {
    let host = Host::new();
    let pins = Pins::new(&host, "loader");
    let config = frontend_config(&host, &pins);
    for (layout, server_port) in [(OTHER_LAYOUT, 1), (OTHER_LAYOUT + 1, 2)] {
        drop(Frontend::load(&config).expect("the frontend loads"));
        let (flows, flow) = (flows(&pins.0), Flow::default());
        for client_port in 0..=(MAX_FLOWS / 2) as u16 {
            let key = FlowKey { client_port, server_port, ..Default::default() };
            flows.update(key.as_bytes(), flow.as_bytes(), MapFlags::ANY).expect("update");
        }
        make_other(&pins.0, layout);
    }
    let mut frontend = Frontend::load(&config).expect("the frontend loads");
    let connection = Connection::new();
    begin(&connection.server, 1, 100).expect_err("another layout may have this connection");
    assert_eq!(refused_older(&frontend), 1);
    let is_first = |key: &FlowKey| key.server_port == 1;
    let done = frontend.collect_older(Instant::now(), Duration::ZERO, is_first).expect("collect");
    done.into_iter().for_each(|older| older.take_out().expect("take_out"));
    begin(&connection.server, 1, 100).expect_err("there is no such ring");
    assert_eq!(refused_older(&frontend), 1, "all connections of other layouts are noted");
    connection.is_answered_by(&pins.0);
    detach_all(&pins.0).expect("detach_all");
}

#[test]
fn connections_that_no_other_layout_has_any_more_are_not_noted() {
    let mut several = Several::new(&[OTHER_LAYOUT]);
    let noted = || map(&several.pins.0, "older_flows").keys().count();
    let gone = several.connections[0].1.key();
    assert_eq!(noted(), 1);
    // The client has connected again from the same port, so fe_in (program on ingress) of the other layout has
    // forgotten the flow.
    flows(&aside(&several.pins, OTHER_LAYOUT)).delete(gone.as_bytes()).expect("delete");
    put(&flows(&aside(&several.pins, OTHER_LAYOUT)), 1, &Flow::default());
    let done = several.frontend.collect_older(Instant::now(), HOUR, |_| true).expect("collect");
    assert_eq!((done.len(), noted()), (0, 1), "the other connection alone");
    assert!(map(&several.pins.0, "older_flows").lookup(gone.as_bytes(), MapFlags::ANY).expect("lookup").is_none());
    let done = several.frontend.collect_older(Instant::now() + HOUR, Duration::ZERO, |_| false).expect("collect");
    assert_eq!((done.len(), noted()), (1, 0));
    done.into_iter().for_each(|older| older.take_out().expect("take_out"));

    // An agent that ended has left this entry.
    map(&several.pins.0, "older_flows").update(gone.as_bytes(), &[1], MapFlags::ANY).expect("update");
    several.load();
    assert_eq!(map(&several.pins.0, "older_flows").keys().count(), 0);
}
