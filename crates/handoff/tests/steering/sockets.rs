//! The whole steering with real sockets: three hosts, three kernels' worth of TCP, one client connection.
//!
//! The frontend's server writes headers and footers. The payloads come from a socket that the backend restores from
//! SHUNT_STATE, with none of the agent's code in between. The client reads one stream and compares every byte.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libbpf_rs::{MapHandle, MapInfo, RingBufferBuilder};
use shunt_handoff::bpf::SteerPeer;
use shunt_handoff::counters::COUNTERS;
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, Frontend, FrontendConfig, detach_all};
use shunt_sys::repair::{Restored, close_silently, restore};
use shunt_sys::sockopt;
use shunt_wire::Endpoint;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::host::{Hosts, ifindex, root};

const SHUNT_SOL: i32 = 0x5348_5554;
const SHUNT_BEGIN: i32 = 1;
const SHUNT_CANCEL: i32 = 2;
const SHUNT_STATE: i32 = 1;
const PEER: u32 = 2;
const RING: u32 = 0;
const PORT: u16 = 7001;

/// `struct shunt_begin`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Begin {
    peer: u32,
    ring: u32,
    handoff: u64,
    length: u64,
}

/// `struct shunt_state`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct State {
    handoff: u64,
    acked: u64,
    regions: u32,
    status: u32,
    client_address: [u8; 16],
    server_address: [u8; 16],
    client_port: u16,
    server_port: u16,
    start: u32,
    rcv_nxt: u32,
    tsval: u32,
    ts_recent: u32,
    snd_wnd: u32,
    snd_cwnd: u32,
    snd_ssthresh: u32,
    srtt_us: u32,
    mss: u16,
    snd_wscale: u8,
    rcv_wscale: u8,
    options: u8,
    pad: [u8; 7],
}

fn get<T: FromBytes + IntoBytes>(socket: &TcpStream, level: i32, option: i32) -> std::io::Result<T> {
    let mut value = T::new_zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `value`, which is that long, and any bytes make a T.
    let status = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
    if status == 0 { Ok(value) } else { Err(std::io::Error::last_os_error()) }
}

fn state(socket: &TcpStream) -> std::io::Result<State> {
    get(socket, SHUNT_SOL, SHUNT_STATE)
}

fn begin(socket: &TcpStream, handoff: u64, length: u64) -> std::io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_BEGIN, &Begin { peer: PEER, ring: RING, handoff, length })
}

/// The backend's socket for one payload, and who writes into it.
struct Sending {
    socket: OwnedFd,
    writer: JoinHandle<()>,
}

impl Sending {
    /// All is acknowledged: the next socket may have the same addresses.
    fn finish(self) {
        self.writer.join().expect("the writer is done");
        close_silently(self.socket);
    }
}

/// Bytes that say where in which stream they are.
fn payload(handoff: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at ^ at >> 8 ^ at >> 16).wrapping_add(handoff) as u8).collect()
}

/// The frontend's and the backend's steering on three hosts, as two agents would have it.
struct Steered {
    hosts: Hosts,
    frontend: Frontend,
    backend: Backend,
    ring: OwnedFd,
    frontend_config: FrontendConfig,
    backend_config: BackendConfig,
}

pub fn cgroup() -> PathBuf {
    let mounts = std::fs::read_to_string("/proc/mounts").expect("/proc/mounts");
    let mount = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|mount| mount[2] == "cgroup2");
    PathBuf::from(mount.expect("cgroup v2 is mounted")[1])
}

fn cookie() -> u64 {
    sockopt::netns_cookie(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")).expect("SO_NETNS_COOKIE")
}

impl Steered {
    /// The calling thread is at the frontend from here on.
    fn new() -> Self {
        let hosts = Hosts::new();
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
        let frontend = Frontend::load(&frontend_config).expect("the frontend loads");
        let peer = SteerPeer {
            address: Endpoint::from(SocketAddr::from((hosts.backend_address, PORT))).address.0,
            port: PORT.to_be(),
            up: 1,
            ifindex: ifindex("backends"),
        };
        frontend.set_peer(PEER, &peer).expect("set_peer");
        let ring = frontend.create_ring(RING).expect("create_ring");
        Self { hosts, frontend, backend, ring, frontend_config, backend_config }
    }

    /// A connection: the frontend's end, and the client's.
    fn connect(&self) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((self.hosts.frontend_address, 0)).expect("listen");
        let at = listener.local_addr().expect("bound");
        let client = self.hosts.client.run(|| TcpStream::connect(at)).expect("netns").expect("connect");
        let (server, _) = listener.accept().expect("accept");
        for end in [&client, &server] {
            end.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            end.set_nodelay(true).expect("nodelay");
        }
        (server, client)
    }

    /// Hands `payload` off on `server`'s connection and sends it from the backend.
    fn hand_off(&mut self, server: &TcpStream, handoff: u64, payload: &[u8]) -> Sending {
        let until = Instant::now() + Duration::from_secs(5);
        while let Err(error) = begin(server, handoff, payload.len() as u64) {
            assert!(Instant::now() < until, "SHUNT_BEGIN: {error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let state = state(server).expect("SHUNT_STATE");
        assert_eq!((state.handoff, state.status, state.acked), (handoff, 1, 0));
        let socket = self.restore(&state);
        let sending = socket.try_clone().expect("dup");
        let payload = payload.to_vec();
        let writer = std::thread::spawn(move || {
            let mut socket = TcpStream::from(sending);
            socket.set_nonblocking(false).expect("blocking");
            // It fails where the client leaves.
            let _ = socket.write_all(&payload);
        });
        Sending { socket, writer }
    }

    fn restore(&mut self, state: &State) -> OwnedFd {
        let end = |address, port: u16| Endpoint { address: shunt_wire::Address(address), port_be: port.to_ne_bytes() };
        let client = end(state.client_address, state.client_port);
        let slot = Slot {
            server: end(state.server_address, state.server_port),
            live: true,
            start: state.start,
            seq_delta: 0,
            ts_delta: 0,
            rcv_nxt: state.rcv_nxt,
            ack: state.rcv_nxt,
            snd_cwnd: state.snd_cwnd,
            ts_recent: state.ts_recent,
        };
        self.backend.write_slot(7, &slot);
        self.backend.insert(&SenderKey { client, port: PORT }, 7).expect("a free sender");
        let restored = Restored {
            local: (self.hosts.backend_address, PORT).into(),
            remote: client.socket_addr(),
            snd_nxt: state.start,
            rcv_nxt: state.rcv_nxt,
            snd_wnd: state.snd_wnd,
            rcv_wnd: 65535,
            mss: state.mss,
            window_scale: (state.options & 4 != 0).then_some((state.snd_wscale, state.rcv_wscale)),
            sack: state.options & 2 != 0,
            tsval: (state.options & 1 != 0).then_some(state.tsval),
        };
        self.hosts.backend.run(|| restore(&restored)).expect("netns").expect("the socket is restored").0
    }

    /// The next event of the ring: handoff, bytes acknowledged, kind.
    fn event(&self) -> (u64, u64, u32) {
        let mut events = Vec::new();
        {
            let id = MapInfo::new(self.ring.as_fd()).expect("a map").info.id;
            let map = MapHandle::from_map_id(id).expect("the ring");
            let mut builder = RingBufferBuilder::new();
            let read = |bytes: &[u8]| {
                let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
                events.push((u64_at(0), u64_at(8), u32::from_ne_bytes(bytes[16..20].try_into().unwrap())));
                0
            };
            builder.add(&map, read).expect("a ring");
            let ring = builder.build().expect("a ring");
            while let Err(error) = ring.poll(Duration::from_secs(20)) {
                assert_eq!(error.kind(), libbpf_rs::ErrorKind::Interrupted, "{error}");
            }
        }
        assert_eq!(events.len(), 1, "one event: {:?}", self.counted());
        events[0]
    }

    /// All counters that are not 0.
    fn counted(&self) -> BTreeMap<&'static str, u64> {
        let mut counters = self.frontend.counters().expect("counters");
        counters.extend(self.backend.counters().expect("counters"));
        let counted = counters.into_iter().map(|counter| (counter.name, counter.value));
        counted.filter(|(_, value)| *value > 0).collect()
    }

    fn count(&self, name: &str) -> u64 {
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

/// Reads what is expected and fails at the first byte that differs.
fn expect(client: &mut TcpStream, expected: &[u8]) {
    let mut read = vec![0; expected.len()];
    let mut at = 0;
    while at < read.len() {
        let bytes = client.read(&mut read[at..]).unwrap_or_else(|error| panic!("after {at} bytes: {error}"));
        assert!(bytes > 0, "the end after {at} of {} bytes", expected.len());
        assert_eq!(read[at..at + bytes], expected[at..at + bytes], "between {at} and {}", at + bytes);
        at += bytes;
    }
}

/// `lengths.len()` responses on one connection, each header, payload, footer.
fn serve(steered: &mut Steered, lengths: &[usize]) {
    let (mut server, mut client) = steered.connect();
    let expected: Vec<Vec<u8>> = lengths
        .iter()
        .enumerate()
        .map(|(n, &length)| {
            let header = format!("header {n}\n").into_bytes();
            [header, payload(n as u64 + 1, length), format!("footer {n}\n").into_bytes()].concat()
        })
        .collect();
    let reader = std::thread::spawn(move || {
        for (n, expected) in expected.iter().enumerate() {
            client.write_all(format!("request {n}").as_bytes()).expect("the request goes out");
            expect(&mut client, expected);
        }
        assert_eq!(client.read(&mut [0]).expect("a clean end"), 0);
    });
    for (n, &length) in lengths.iter().enumerate() {
        let handoff = n as u64 + 1;
        let request = format!("request {n}");
        let mut read = vec![0; request.len()];
        server.read_exact(&mut read).expect("the request comes in");
        assert_eq!(read, request.as_bytes());
        server.write_all(format!("header {n}\n").as_bytes()).expect("header");
        let sending = steered.hand_off(&server, handoff, &payload(handoff, length));
        assert_eq!(steered.event(), (handoff, length as u64, 1));
        sending.finish();
        assert_eq!(state(&server).unwrap().status, 2);
        server.write_all(format!("footer {n}\n").as_bytes()).expect("footer");
    }
    drop(server);
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn responses_of_all_sizes_arrive_whole_on_one_connection() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    let started = Instant::now();
    serve(&mut steered, &[1, 100, 1460, 65_536, 1_000_000, 1, 8_000_000, 4096]);
    assert!(started.elapsed() < Duration::from_secs(3), "no retransmission timeout: {:?}", started.elapsed());
    assert_eq!(steered.count("fe_completed"), 8);
    for nothing in ["fe_drop_early_write", "fe_drop_bad_ack", "fe_drop_rewrite", "fe_event_lost", "be_drop_rewrite"] {
        assert_eq!(steered.count(nothing), 0, "{nothing}");
    }
}

#[test]
fn they_arrive_whole_over_a_link_that_loses_packets() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    steered.hosts.congest();
    serve(&mut steered, &[3000, 300_000, 1_000_000, 50_000]);
    assert_eq!(steered.count("fe_completed"), 4);
    assert!(steered.hosts.lost() > 0, "nothing was lost");
}

#[test]
fn they_arrive_whole_without_segmentation_offload() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    steered.hosts.without_segmentation_offload();
    serve(&mut steered, &[1, 100_000, 700_000]);
}

#[test]
fn what_the_client_sends_meanwhile_reaches_the_frontend() {
    if !root() {
        return;
    }
    upload_during_a_handoff(&mut Steered::new(), 300_000, 400_000);
}

#[test]
fn checksums_are_good_whoever_finishes_them() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    steered.hosts.checksums_in_software();
    upload_during_a_handoff(&mut steered, 10_000_000, 20_000_000);
    serve(&mut steered, &[1, 100_000]);
    assert!(steered.count("fe_in_stripped") > 0, "nothing was uploaded during the payload");
    assert_eq!(steered.hosts.checksum_errors(), 0);
}

/// The client sends `upload` bytes from the header on, while it gets `download` bytes from the backend.
fn upload_during_a_handoff(steered: &mut Steered, upload: usize, download: usize) {
    let (mut server, mut client) = steered.connect();
    let body = payload(9, download);
    let upload = payload(8, upload);
    server.write_all(b"header").expect("header");
    let (sent, read) = (upload.clone(), body.clone());
    let client_end = std::thread::spawn(move || {
        expect(&mut client, b"header");
        let mut writing = client.try_clone().expect("dup");
        let writer = std::thread::spawn(move || writing.write_all(&sent).expect("the upload goes out"));
        expect(&mut client, &read);
        expect(&mut client, b"footer");
        writer.join().expect("all written");
    });
    let server_reads = server.try_clone().expect("dup");
    let reader = std::thread::spawn(move || expect(&mut { server_reads }, &upload));
    let sending = steered.hand_off(&server, 1, &body);
    assert_eq!(steered.event(), (1, body.len() as u64, 1));
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    server.write_all(b"footer").expect("footer");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    sending.finish();
}

#[test]
fn a_new_agent_takes_over_in_the_middle_of_a_handoff() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    let body = payload(1, 30_000_000);
    server.write_all(b"header").expect("header");
    let read = body.clone();
    let client_end = std::thread::spawn(move || {
        expect(&mut client, b"header");
        expect(&mut client, &read);
        expect(&mut client, b"footer");
    });
    let sending = steered.hand_off(&server, 1, &body);
    steered.frontend = Frontend::load(&steered.frontend_config).expect("the frontend loads again");
    assert_eq!(steered.event(), (1, body.len() as u64, 1));
    server.write_all(b"footer").expect("footer");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    sending.finish();
    assert_eq!(steered.count("fe_begun"), 1, "the counters go on");
}

#[test]
fn a_server_that_leaves_in_the_middle_resets_its_client() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    server.write_all(b"header").expect("header");
    expect(&mut client, b"header");
    let sending = steered.hand_off(&server, 1, &payload(1, 100));
    assert_eq!(steered.event().2, 1);
    sending.finish();
    begin(&server, 2, 200).expect("SHUNT_BEGIN");
    drop(server);
    let mut read = vec![0; 300];
    let error = loop {
        match client.read(&mut read) {
            Ok(0) => panic!("a clean end of half a response"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(steered.count("fe_cancelled") == 1 && steered.count("fe_out_fin_to_rst") >= 1);
}

#[test]
fn a_client_that_resets_is_reported() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    server.write_all(b"header").expect("header");
    expect(&mut client, b"header");
    client.write_all(b"never read").expect("a request");
    server.read_exact(&mut [0; 10]).expect("the request");
    let sending = steered.hand_off(&server, 1, &payload(1, 3_000_000));
    client.read_exact(&mut [0; 1000]).expect("some of it");
    drop(client); // with unread data: a reset
    let (handoff, acked, kind) = steered.event();
    assert_eq!((handoff, kind), (1, 2));
    assert!(acked < 3_000_000);
    assert_eq!(steered.count("fe_client_reset"), 1);
    sending.finish();
}

#[test]
fn begin_is_refused_where_it_must_be() {
    if !root() {
        return;
    }
    let steered = Steered::new();
    let (mut server, _client) = steered.connect();
    server.write_all(b"header").expect("header");
    std::thread::sleep(Duration::from_millis(20));
    let refused = |begin: Begin, counter: &str| {
        let before = steered.count(counter);
        let error = sockopt::set(&server, SHUNT_SOL, SHUNT_BEGIN, &begin).expect_err(counter);
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{counter}");
        assert_eq!(steered.count(counter), before + 1, "{counter}");
    };
    let good = || Begin { peer: PEER, ring: RING, handoff: 1, length: 1 };
    refused(Begin { length: 0, ..good() }, "fe_refused_argument");
    refused(Begin { length: 1 << 48, ..good() }, "fe_refused_argument");
    refused(Begin { ring: 1, ..good() }, "fe_refused_argument");
    refused(Begin { ring: 64, ..good() }, "fe_refused_argument");
    refused(Begin { peer: 1, ..good() }, "fe_refused_peer");
    refused(Begin { peer: 64, ..good() }, "fe_refused_peer");
    assert_eq!(state(&server).expect("SHUNT_STATE").status, 0, "nothing has begun");

    let short = sockopt::set(&server, SHUNT_SOL, SHUNT_BEGIN, &0u32).expect_err("too short");
    assert_eq!(short.raw_os_error(), Some(libc::EPERM));
    let unknown = sockopt::set(&server, SHUNT_SOL, 77, &0u32).expect_err("no such option");
    assert_eq!(unknown.raw_os_error(), Some(libc::ENOPROTOOPT));

    begin(&server, 1, 10).expect("SHUNT_BEGIN");
    refused(good(), "fe_refused_active");
    sockopt::set(&server, SHUNT_SOL, SHUNT_CANCEL, &0u32).expect("SHUNT_CANCEL");
    assert_eq!(state(&server).expect("SHUNT_STATE").status, 3);
    assert_eq!(steered.count("fe_cancelled"), 1);
    refused(good(), "fe_refused_ended");
}

#[test]
fn unsent_bytes_refuse_a_handoff() {
    if !root() {
        return;
    }
    let steered = Steered::new();
    let (mut server, _client) = steered.connect();
    server.set_nonblocking(true).expect("nonblocking");
    while server.write(&[0; 65536]).is_ok() {}
    let error = begin(&server, 1, 1).expect_err("a full send buffer");
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    assert_eq!(steered.count("fe_refused_unsent"), 1);
}

#[test]
fn the_state_is_what_the_kernel_says_of_the_connection() {
    if !root() {
        return;
    }
    let steered = Steered::new();
    let (mut server, client) = steered.connect();
    server.write_all(b"header").expect("header");
    std::thread::sleep(Duration::from_millis(20));
    begin(&server, 5, 10).expect("SHUNT_BEGIN");
    let state = state(&server).expect("SHUNT_STATE");
    let end = |address, port: u16| {
        Endpoint { address: shunt_wire::Address(address), port_be: port.to_ne_bytes() }.socket_addr()
    };
    assert_eq!(end(state.client_address, state.client_port), client.local_addr().unwrap());
    assert_eq!(end(state.server_address, state.server_port), client.peer_addr().unwrap());
    let tsval = get::<u32>(&server, libc::IPPROTO_TCP, libc::TCP_TIMESTAMP).expect("TCP_TIMESTAMP");
    // The kernel's answer has its lowest bit cleared (Linux 6.7).
    assert!((tsval | 1).wrapping_sub(state.tsval) < 50, "{tsval} now, {} then", state.tsval);
    assert_ne!(state.ts_recent, 0);
    assert_eq!(state.options, 7, "timestamps, SACK and window scaling");
    assert_eq!(state.mss, 1448);
    assert!(state.snd_wscale > 0 && state.rcv_wscale > 0);
    assert!(state.snd_wnd > 10_000, "{}", state.snd_wnd);
    assert!(state.snd_cwnd >= 10 && state.srtt_us > 0);
    assert_eq!(state.regions, 1);
}

#[test]
fn a_restored_socket_has_the_frontends_congestion_window() {
    if !root() {
        return;
    }
    let mut steered = Steered::new();
    let (mut server, _client) = steered.connect();
    server.write_all(b"header").expect("header");
    std::thread::sleep(Duration::from_millis(20));
    begin(&server, 1, 10).expect("SHUNT_BEGIN");
    let state = State { snd_cwnd: 77, ..state(&server).expect("SHUNT_STATE") };
    let socket = TcpStream::from(steered.restore(&state));
    // struct tcp_info: tcpi_snd_cwnd.
    let information: [u32; 26] = get(&socket, libc::IPPROTO_TCP, libc::TCP_INFO).expect("TCP_INFO");
    assert_eq!(information[20], 77);
}

#[test]
fn another_namespaces_servers_are_not_answered() {
    if !root() {
        return;
    }
    let steered = Steered::new();
    let error = steered.hosts.client.run(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let client = TcpStream::connect(listener.local_addr().unwrap()).expect("connect");
        begin(&client, 1, 1).expect_err("no Shunt there")
    });
    assert_eq!(error.expect("netns").raw_os_error(), Some(libc::ENOPROTOOPT));
    assert_eq!(steered.count("fe_refused_argument"), 0);
}
