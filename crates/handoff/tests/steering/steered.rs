//! The steering of both sides on three hosts, as two agents would set it up, and the socket options by which a server
//! uses it. A *flow* is the programs' record of a client connection. A *region* is a range of the connection's sequence
//! numbers that the backend sends: one payload. The backend's *word* confirms that the client has acknowledged a whole
//! payload. A *ring* is the BPF ring buffer by which the programs answer the server.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use libbpf_rs::{MapCore, MapHandle, MapInfo, RingBufferBuilder};
use shunt_handoff::bpf::{FlowKey, SteerPeer};
use shunt_handoff::counters::COUNTERS;
use shunt_handoff::frontend::{Delivery, Spacing};
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, Frontend, FrontendConfig, detach_all};
use shunt_sys::odb;
use shunt_sys::repair::{Restored, close_silently, restore};
use shunt_sys::sockopt;
use shunt_testbed::{assert_same_bytes, wait_for};
use shunt_wire::Endpoint;
use shunt_wire::flow::FlowState;
use shunt_wire::local::Event;
pub use shunt_wire::local::State;
pub use shunt_wire::options::Begin;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::host::{Hosts, cgroup, ifindex};
use super::programs::{event, key};

pub const SHUNT_SOL: i32 = 0x5348_5554;
pub const SHUNT_BEGIN: i32 = 1;
pub const SHUNT_CANCEL: i32 = 2;
pub const SHUNT_STATE: i32 = 3;
pub const SHUNT_MOVE: i32 = 4;
pub const SHUNT_APPEND: i32 = 5;
pub const SHUNT_UNDO: i32 = 6;
pub const SHUNT_TAKE: i32 = 8;
pub const PEER: u32 = 2;
pub const RING: u32 = 0;
const PORT: u16 = 7001;

/// The argument of SHUNT_MOVE (`struct shunt_move`).
#[derive(IntoBytes, Immutable)]
#[repr(C)]
pub struct Move {
    pub peer: u32,
    pub ring: u32,
    pub handoff: u64,
    pub from: u64,
}

/// The argument of SHUNT_TAKE (`struct shunt_take`).
#[derive(IntoBytes, Immutable)]
#[repr(C)]
pub struct Take {
    pub ring: u32,
    pub when: u32,
    pub handoff: u64,
}

pub fn get<T: FromBytes + IntoBytes>(socket: &TcpStream, level: i32, option: i32) -> std::io::Result<T> {
    let mut value = T::new_zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `value`, which is that long. Any bytes are a valid T.
    let status = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
    if status == 0 { Ok(value) } else { Err(std::io::Error::last_os_error()) }
}

pub fn begin(socket: &TcpStream, handoff: u64, length: u64) -> std::io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_BEGIN, &Begin { peer: PEER, ring: RING, handoff, length })
}

/// Begins a region behind what the server has written. The server may write on (SHUNT_APPEND).
pub fn append(socket: &TcpStream, handoff: u64, length: u64) -> std::io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_APPEND, &Begin { peer: PEER, ring: RING, handoff, length })
}

/// The backend's socket for one payload, and the thread that writes into it.
pub struct Sending {
    socket: OwnedFd,
    writer: JoinHandle<()>,
}

impl Sending {
    /// Closes the socket. To be called when all is acknowledged, because the next socket may have the same addresses.
    pub fn finish(self) {
        self.writer.join().expect("the writer is done");
        close_silently(self.socket);
    }
}

/// Makes a payload whose bytes depend on the handoff and on their place.
pub fn payload(handoff: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at ^ at >> 8 ^ at >> 16).wrapping_add(handoff) as u8).collect()
}

/// The steering of the frontend and the backend on three hosts, as two agents would set it up.
pub struct Steered {
    pub hosts: Hosts,
    pub frontend: Frontend,
    backend: RefCell<Backend>,
    /// Payloads for which the backend owes a word: the client's endpoint, the flow, the handoff.
    owed: RefCell<Vec<(Endpoint, FlowKey, u64)>>,
    ring: OwnedFd,
    pub frontend_config: FrontendConfig,
    backend_config: BackendConfig,
    /// On each flow, the backend asks the frontend again and again for ACKs that are this number of payload bytes
    /// apart. `None`: it asks for nothing, and gets each ACK.
    pub spacing: Option<u32>,
    /// The flow whose payload was handed off last.
    newest: RefCell<Option<FlowKey>>,
}

/// Returns the cookie of the calling thread's network namespace.
pub fn cookie() -> u64 {
    sockopt::netns_cookie(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")).expect("SO_NETNS_COOKIE")
}

impl Steered {
    /// Sets up the hosts over IPv4. From here on the calling thread is at the frontend.
    pub fn new() -> Self {
        Self::on(Hosts::new())
    }

    /// Sets up the hosts over IPv6.
    pub fn ipv6() -> Self {
        Self::on(Hosts::new().ipv6())
    }

    fn on(hosts: Hosts) -> Self {
        let backend_config = hosts.backend.run(|| BackendConfig {
            pin_dir: hosts.pins("backend"),
            netns_cookie: cookie(),
            cgroup: cgroup(),
            interfaces: vec![ifindex("uplink")],
            ports: 7000..=7009,
        });
        let backend_config = backend_config.expect("the backend's namespace");
        let backend = hosts.backend.run(|| Backend::load(&backend_config)).expect("netns").expect("the backend loads");
        let frontend_config = FrontendConfig {
            pin_dir: hosts.pins("frontend"),
            netns_cookie: cookie(),
            cgroup: cgroup(),
            interfaces: vec![ifindex("clients")],
        };
        let mut frontend = Frontend::load(&frontend_config).expect("the frontend loads");
        let mut peer = SteerPeer { port: PORT.to_be(), up: 1, ..Default::default() };
        let address = shunt_wire::Address::from(hosts.backend_address).0;
        if hosts.backend_address.is_ipv4() {
            (peer.ipv4, peer.ipv4_ifindex) = (address, ifindex("backends"));
        } else {
            (peer.ipv6, peer.ipv6_ifindex) = (address, ifindex("backends"));
        }
        frontend.set_peer(PEER, &peer).expect("set_peer");
        let ring = frontend.create_ring(RING, 0).expect("create_ring");
        let (backend, owed) = (RefCell::new(backend), RefCell::default());
        Self {
            hosts,
            frontend,
            backend,
            owed,
            ring,
            frontend_config,
            backend_config,
            spacing: None,
            newest: RefCell::default(),
        }
    }

    /// Makes a connection. Returns the frontend's end and the client's.
    pub fn connect(&self) -> (TcpStream, TcpStream) {
        self.connect_to(self.hosts.frontend_address, self.hosts.frontend_address)
    }

    /// Makes a connection: the server listens at `listening`, which may be the wildcard address, and the client
    /// connects to `address`. Returns the frontend's end and the client's.
    pub fn connect_to(&self, listening: IpAddr, address: IpAddr) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((listening, 0)).expect("listen");
        odb::watch(&listener).expect("SHUNT_WATCH");
        let port = listener.local_addr().expect("bound").port();
        self.connect_by(&listener, (address, port).into())
    }

    /// Makes a connection that `listener` accepts. The client connects to `at`.
    pub fn connect_by(&self, listener: &TcpListener, at: SocketAddr) -> (TcpStream, TcpStream) {
        let client = self.hosts.client.run(|| TcpStream::connect(at)).expect("netns").expect("connect");
        let (server, _) = listener.accept().expect("accept");
        for end in [&client, &server] {
            end.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            end.set_nodelay(true).expect("nodelay");
        }
        (server, client)
    }

    /// Makes a connection whose server has written the header of a response, and whose client has read it.
    pub fn connect_and_send_header(&self) -> (TcpStream, TcpStream) {
        let (mut server, mut client) = self.connect();
        server.write_all(b"header").expect("header");
        expect(&mut client, b"header");
        (server, client)
    }

    /// Hands `payload` off on `server`'s connection, and sends it from the backend.
    pub fn hand_off(&mut self, server: &TcpStream, handoff: u64, payload: &[u8]) -> Sending {
        wait_for("SHUNT_BEGIN succeeds", || Ok(begin(server, handoff, payload.len() as u64)?)).unwrap();
        let state = self.answer();
        assert_eq!((state.handoff, state.status, state.acked), (handoff, 1, 0));
        *self.newest.borrow_mut() = Some(key(state.flow.client().socket_addr(), state.flow.server().socket_addr()));
        assert!(self.ask_for_spacing(), "the flow is this peer's");
        self.send(&state, payload)
    }

    /// Asks for `spacing` on the newest flow. Returns false if the backend does not send on this flow.
    fn ask_for_spacing(&self) -> bool {
        let (Some(bytes), Some(flow)) = (self.spacing, *self.newest.borrow()) else { return true };
        self.frontend.set_spacing(&Spacing { flow, peer: PEER, bytes }).expect("BPF_PROG_TEST_RUN")
    }

    /// Sends a payload from the backend as a `struct shunt_state` describes.
    pub fn send(&mut self, state: &State, payload: &[u8]) -> Sending {
        let socket = self.restore(state);
        if state.flow.options & FlowState::WORD != 0 {
            let flow = key(state.flow.client().socket_addr(), state.flow.server().socket_addr());
            self.owed.borrow_mut().push((state.flow.client(), flow, state.handoff));
            self.backend.borrow_mut().await_end(7, state.flow.start.wrapping_add(payload.len() as u32));
        }
        let sending = socket.try_clone().expect("dup");
        let payload = payload.to_vec();
        let writer = std::thread::spawn(move || {
            let mut socket = TcpStream::from(sending);
            socket.set_nonblocking(false).expect("blocking");
            // The write fails if the client leaves.
            let _ = socket.write_all(&payload);
        });
        Sending { socket, writer }
    }

    pub fn restore(&mut self, state: &State) -> OwnedFd {
        let client = state.flow.client();
        let slot = Slot {
            server: state.flow.server(),
            live: true,
            start: state.flow.start,
            seq_delta: 0,
            // In TCP_REPAIR mode, a timestamp whose lowest bit is set would ask for a clock in microseconds.
            ts_delta: state.flow.tsval & 1,
            rcv_nxt: state.flow.token,
            ack: state.flow.rcv_nxt,
            snd_cwnd: state.flow.snd_cwnd,
            ts_recent: state.flow.ts_recent,
            ahead: state.flow.ahead,
        };
        self.backend.borrow_mut().write_slot(7, &slot);
        self.backend.borrow_mut().insert(&SenderKey { client, port: PORT }, 7).expect("a free sender");
        let restored = Restored {
            local: (self.hosts.backend_address, PORT).into(),
            remote: client.socket_addr(),
            snd_nxt: state.flow.start,
            rcv_nxt: state.flow.token,
            snd_wnd: state.flow.snd_wnd,
            rcv_wnd: 65535,
            mss: state.flow.mss,
            window_scale: (state.flow.options & 4 != 0).then_some((state.flow.snd_wscale, state.flow.rcv_wscale)),
            sack: state.flow.options & 2 != 0,
            tsval: (state.flow.options & 1 != 0).then_some(state.flow.tsval & !1),
        };
        // Another test's thread may be starting a program. Between fork and exec, the child holds our last socket open.
        let make = || Ok(Some(self.hosts.backend.run(|| restore(&restored)).expect("netns")?));
        wait_for("the socket is restored", make).unwrap().0
    }

    /// Opens a map of the frontend's programs.
    pub fn frontend_map(&self, name: &str) -> MapHandle {
        MapHandle::from_pinned_path(self.frontend_config.pin_dir.join(name)).expect("a pinned map")
    }

    /// Deletes the flow of a connection.
    pub fn forget(&self, key: &FlowKey) {
        self.frontend_map("flows").delete(key.as_bytes()).expect("a flow");
    }

    /// Returns the answer that a socket option, for example SHUNT_BEGIN or SHUNT_STATE, has left in the ring.
    pub fn answer(&self) -> State {
        let record = self.record(Duration::ZERO);
        assert_eq!(event(&record).2, Event::STATE);
        State::read_from_bytes(&record).expect("a struct shunt_state")
    }

    /// Asks for the state of a connection (SHUNT_STATE).
    pub fn state(&self, server: &TcpStream) -> State {
        sockopt::set(server, SHUNT_SOL, SHUNT_STATE, &RING).expect("SHUNT_STATE");
        self.answer()
    }

    /// Waits for the next event of the ring: handoff, bytes acknowledged, kind. Meanwhile the backend gives its words.
    pub fn event(&self) -> (u64, u64, u32) {
        let look = || {
            self.say_words();
            self.ask_for_spacing();
            let records = self.records(Duration::from_millis(10));
            (!records.is_empty()).then_some(records)
        };
        event(&one(wait_for("an event", look).unwrap_or_default(), self))
    }

    fn say_words(&self) {
        for report in self.backend.borrow_mut().take_reports() {
            let is_of = |(client, ..): &&(Endpoint, FlowKey, u64)| *client == report.client;
            let owed = self.owed.borrow();
            let (_, flow, handoff) = owed.iter().rfind(is_of).expect("a word is owed");
            let word = Delivery { flow: *flow, peer: PEER, handoff: *handoff };
            self.frontend.set_delivered(&word).expect("BPF_PROG_TEST_RUN");
        }
    }

    fn record(&self, wait: Duration) -> Vec<u8> {
        one(self.records(wait), self)
    }

    fn records(&self, wait: Duration) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        {
            let id = MapInfo::new(self.ring.as_fd()).expect("a map").info.id;
            let map = MapHandle::from_map_id(id).expect("the ring");
            let mut builder = RingBufferBuilder::new();
            let read = |bytes: &[u8]| {
                records.push(bytes.to_vec());
                0
            };
            builder.add(&map, read).expect("a ring");
            let ring = builder.build().expect("a ring");
            // A record that does not wake the reader is not found by poll, so it is consumed directly.
            let look = || if wait.is_zero() { ring.consume() } else { ring.poll(wait) };
            while let Err(error) = look() {
                assert_eq!(error.kind(), libbpf_rs::ErrorKind::Interrupted, "{error}");
            }
        }
        records
    }

    /// Returns all counters that are not 0.
    pub fn counted(&self) -> BTreeMap<&'static str, u64> {
        let mut counters = self.frontend.counters().expect("counters");
        counters.extend(self.backend.borrow().counters().expect("counters"));
        let counted = counters.into_iter().map(|counter| (counter.name, counter.value));
        counted.filter(|(_, value)| *value > 0).collect()
    }

    pub fn count(&self, name: &str) -> u64 {
        assert!(COUNTERS.iter().any(|(known, _)| *known == name), "no counter {name}");
        self.counted().get(name).copied().unwrap_or(0)
    }
}

impl Drop for Steered {
    fn drop(&mut self) {
        let _ = detach_all(&self.frontend_config.pin_dir);
        let _ = self.hosts.backend.run(|| detach_all(&self.backend_config.pin_dir));
    }
}

fn one(mut records: Vec<Vec<u8>>, steered: &Steered) -> Vec<u8> {
    assert_eq!(records.len(), 1, "one record: {:?}", steered.counted());
    records.remove(0)
}

/// Reads the expected bytes, and fails as soon as one differs.
pub fn expect(client: &mut TcpStream, expected: &[u8]) {
    let mut read = vec![0; expected.len()];
    let mut at = 0;
    while at < read.len() {
        let bytes = match client.read(&mut read[at..]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            bytes => bytes.unwrap_or_else(|error| panic!("after {at} bytes: {error}")),
        };
        assert!(bytes > 0, "the end after {at} of {} bytes", expected.len());
        assert_same_bytes(
            &read[at..at + bytes],
            &expected[at..at + bytes],
            format_args!("what comes after {at} bytes"),
        );
        at += bytes;
    }
}

/// Reads once from a connection that is about to end. Returns the number of bytes, or the error.
pub fn ending(client: &mut TcpStream) -> std::io::Result<usize> {
    loop {
        match client.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            ended => return ended,
        }
    }
}
