//! Network namespaces for one test. A [`Host`] has a port towards clients, a port towards backends, and a view of what
//! leaves them. [`Hosts`] are three namespaces with a client, a frontend and a backend.
//!
//! In a [`Host`], the far ends of both ports are in the same namespace. They are up and have no addresses: frames that
//! leave arrive there, and a packet socket sees them.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, netdevice, recv, socket_with};
use shunt_sys::netns::Netns;
use shunt_sys::sockopt;
use shunt_testbed::{PATIENCE, needs_root, of_process, wait_at_most};

use super::segment::Segment;

const ETH_P_ALL: u32 = 3;
const SOL_PACKET: i32 = 263;
const PACKET_IGNORE_OUTGOING: i32 = 23;

fn pins(number: u32, what: &str) -> PathBuf {
    format!("{}{number}-{what}", of_process().pins_prefix()).into()
}

static MADE: AtomicU32 = AtomicU32::new(0);

/// A network namespace. The calling thread is in it from `new` until the thread ends.
pub struct Host {
    /// Name of the namespace. No other test uses the same name.
    pub name: String,
    number: u32,
    /// Index of the port towards clients.
    pub client_port: u32,
    /// Index of the port towards backends.
    pub backend_port: u32,
    wire: rustix::fd::OwnedFd,
}

impl Host {
    pub fn new() -> Self {
        needs_root();
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{number}", of_process().namespace_prefix());
        ip(&["netns", "add", &name]);
        Netns::named(&name).and_then(|netns| netns.enter()).expect("the new namespace can be entered");
        for (port, far) in [("client0", "client1"), ("backend0", "backend1")] {
            ip(&["link", "add", port, "type", "veth", "peer", "name", far]);
            // The kernel would send packets for duplicate address detection, and only the tests' packets are wanted.
            for device in [port, far] {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/accept_dad"), "0").expect("sysctl");
                ip(&["link", "set", device, "up"]);
            }
        }
        ip(&["link", "set", "lo", "up"]);
        for (device, address) in [("client0", "10.0.0.1/24"), ("backend0", "10.1.0.1/24")] {
            ip(&["addr", "add", address, "dev", device]);
        }
        for (device, address) in [("client0", "fd00::1/64"), ("backend0", "fd01::1/64")] {
            ip(&["addr", "add", address, "dev", device, "nodad"]);
        }
        for address in ["10.1.0.2", "10.1.0.3", "fd01::2"] {
            ip(&["neigh", "add", address, "lladdr", "02:00:00:00:0b:0e", "nud", "permanent", "dev", "backend0"]);
        }
        Self { name, number, client_port: ifindex("client0"), backend_port: ifindex("backend0"), wire: wire() }
    }

    /// Path for a directory of the BPF file system, in which this test pins programs.
    pub fn pins(&self, what: &str) -> PathBuf {
        pins(self.number, what)
    }

    /// Waits until `expected` TCP segments that `wanted` accepts have arrived at any port, and returns them. Returns
    /// fewer if the others do not arrive within [`PATIENCE`]. If none is expected, waits for 30 ms, so that an
    /// unexpected one is found.
    pub fn arrived(&self, expected: usize, wanted: impl Fn(&Segment) -> bool) -> Vec<Segment> {
        let time = if expected == 0 { Duration::from_millis(30) } else { PATIENCE };
        let mut segments = Vec::new();
        let mut frame = vec![0; 70_000];
        let _ = wait_at_most(time, "segments arrive", || {
            while segments.len() < expected || expected == 0 {
                let (_, bytes) = recv(&self.wire, frame.as_mut_slice(), RecvFlags::DONTWAIT)?;
                segments.extend(Segment::read(&frame[..bytes]).ok().filter(&wanted));
            }
            Ok(())
        });
        segments
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

/// Runs `ip` in the calling thread's namespace.
pub fn ip(arguments: &[&str]) {
    run("ip", arguments);
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("iproute2 is there");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Directory where cgroup v2 is mounted.
pub fn cgroup() -> std::path::PathBuf {
    shunt_sys::cgroup::root().expect("cgroup v2 is mounted")
}

pub fn ifindex(name: &str) -> u32 {
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).expect("socket");
    netdevice::name_to_index(any, name).expect("the device is there")
}

/// Opens a packet socket that sees every frame that arrives, before any program on the port (BPF) does.
fn wire() -> rustix::fd::OwnedFd {
    let protocol = Protocol::from_raw((ETH_P_ALL << 8).try_into().expect("not 0"));
    let wire = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol));
    let wire = wire.expect("packet socket");
    sockopt::set_i32(&wire, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1).expect("PACKET_IGNORE_OUTGOING");
    wire
}

/// Sends a frame by a device of the calling thread's namespace, as if the kernel had made it.
pub fn send_frame(device: &str, frame: &[u8]) {
    let packets = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None);
    let packets = packets.expect("a packet socket");
    // SAFETY: zeros are a valid sockaddr_ll.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    (to.sll_family, to.sll_ifindex) = (libc::AF_PACKET as u16, ifindex(device) as i32);
    let length = size_of_val(&to) as libc::socklen_t;
    let (from, to) = (packets.as_raw_fd(), (&raw const to).cast());
    // SAFETY: the frame and the address have the lengths that are passed.
    let sent = unsafe { libc::sendto(from, frame.as_ptr().cast(), frame.len(), 0, to, length) };
    assert_eq!(sent, frame.len() as isize, "{}", std::io::Error::last_os_error());
}

/// Three hosts. The calling thread is at the frontend, which has a port towards clients and one towards backends.
pub struct Hosts {
    name: String,
    number: u32,
    pub client: Netns,
    pub backend: Netns,
    pub frontend_address: std::net::IpAddr,
    pub backend_address: std::net::IpAddr,
}

impl Hosts {
    pub fn new() -> Self {
        needs_root();
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{number}", of_process().namespace_prefix());
        let named = |role: &str| format!("{name}-{role}");
        for role in ["client", "frontend", "backend"] {
            ip(&["netns", "add", &named(role)]);
        }
        let open = |role: &str| Netns::named(&named(role)).expect("the new namespace");
        for (device, far, network) in [("clients", "client", 0), ("backends", "backend", 1)] {
            let (near, far) = (named("frontend"), named(far));
            ip(&["link", "add", device, "netns", &near, "type", "veth", "peer", "name", "uplink", "netns", &far]);
            for (host, device, number) in [(&near, device, 1), (&far, "uplink", 2)] {
                ip(&["-n", host, "addr", "add", &format!("10.{network}.0.{number}/24"), "dev", device]);
                ip(&["-n", host, "addr", "add", &format!("fd0{network}::{number}/64"), "dev", device, "nodad"]);
                ip(&["-n", host, "link", "set", device, "up"]);
                ip(&["-n", host, "link", "set", "lo", "up"]);
            }
            // The routes between client and backend lead through the frontend's machine, which forwards their packets.
            ip(&["-n", &far, "route", "add", "default", "via", &format!("10.{network}.0.1")]);
            ip(&["-n", &far, "-6", "route", "add", "default", "via", &format!("fd0{network}::1")]);
        }
        open("frontend").enter().expect("the frontend's namespace");
        for forward in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            std::fs::write(format!("/proc/sys/net/{forward}"), "1").expect("forwarding");
        }
        for device in ["all", "clients", "backends"] {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/rp_filter"), "0").expect("rp_filter");
            std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/accept_local"), "1").expect("accept_local");
        }
        Self {
            client: open("client"),
            backend: open("backend"),
            name,
            number,
            frontend_address: [10, 0, 0, 1].into(),
            backend_address: [10, 1, 0, 2].into(),
        }
    }

    /// Uses the hosts' IPv6 addresses from here on.
    pub fn ipv6(mut self) -> Self {
        self.frontend_address = "fd00::1".parse().expect("an address");
        self.backend_address = "fd01::2".parse().expect("an address");
        self
    }

    /// Path for a directory of the BPF file system, to pin the programs of one agent.
    pub fn pins(&self, role: &str) -> PathBuf {
        pins(self.number, role)
    }

    /// Makes the link to the client slow, with a short queue. Packets of a burst are lost if the queue is full.
    pub fn congest(&self) {
        let shape =
            ["qdisc", "add", "dev", "clients", "root", "tbf", "rate", "100mbit", "burst", "20k", "limit", "40k"];
        run("tc", &shape);
    }

    /// Number of packets that the slow link has lost.
    pub fn lost(&self) -> u64 {
        let statistics = run("tc", &["-s", "qdisc", "show", "dev", "clients"]);
        let tbf = statistics.split("qdisc ").find(|qdisc| qdisc.starts_with("tbf")).expect("congest was called");
        let dropped = tbf.split("dropped ").nth(1).and_then(|rest| rest.split(',').next());
        dropped.and_then(|number| number.parse().ok()).expect("tc -s says how many")
    }

    /// Drops the client's packets from here on, or delivers them again. The client gets the packets of others in both
    /// cases.
    pub fn client_is_heard(&self, heard: bool) {
        // A token bucket into which no packet fits.
        let add = ["add", "dev", "uplink", "root", "tbf", "rate", "1kbit", "burst", "10", "limit", "10"];
        let arguments = if heard { &["del", "dev", "uplink", "root"][..] } else { &add };
        self.client.run(|| run("tc", &[&["qdisc"], arguments].concat())).expect("setns");
    }

    /// Switches segmentation offload off, so that each segment is a packet.
    pub fn without_segmentation_offload(&self) {
        self.offload(&["tso", "off", "gso", "off", "gro", "off"]);
    }

    /// Puts VLAN tags into the frames on the wire, and not beside them as metadata.
    pub fn tags_in_frames(&self) {
        self.offload(&["txvlan", "off"]);
    }

    /// Finishes checksums in software for packets that leave the frontend and the backend, so that the receivers verify
    /// these checksums. The client's packets keep an unfinished checksum (CHECKSUM_PARTIAL), as is normal on a veth.
    pub fn checksums_in_software(&self) {
        for (role, device) in [("frontend", "clients"), ("frontend", "backends"), ("backend", "uplink")] {
            self.ethtool(role, device, &["tx", "off"]);
        }
    }

    fn offload(&self, features: &[&str]) {
        for (role, device) in
            [("client", "uplink"), ("frontend", "clients"), ("frontend", "backends"), ("backend", "uplink")]
        {
            self.ethtool(role, device, features);
        }
    }

    fn ethtool(&self, role: &str, device: &str, features: &[&str]) {
        let host = Netns::named(&format!("{}-{role}", self.name)).expect("one of ours");
        host.run(|| run("ethtool", &[&["-K", device], features].concat())).expect("setns");
    }

    /// Number of segments with a wrong checksum that the three kernels have seen.
    pub fn checksum_errors(&self) -> u64 {
        self.counted_by_kernels("snmp", "Tcp:", "InCsumErrors")
    }

    /// Number of retransmission timeouts of all sockets of the three kernels.
    pub fn timeouts(&self) -> u64 {
        self.counted_by_kernels("netstat", "TcpExt:", "TCPTimeouts")
    }

    /// Number of losses that sockets without SACK have taken from duplicate ACKs, in the three kernels.
    pub fn losses_by_duplicate_acks(&self) -> u64 {
        self.counted_by_kernels("netstat", "TcpExt:", "TCPRenoRecovery")
    }

    /// Sum of a counter of the three kernels. In /proc/net/snmp and /proc/net/netstat, a line of names stands before
    /// each line of values.
    fn counted_by_kernels(&self, file: &str, group: &str, counter: &str) -> u64 {
        let count = || {
            let all = std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).expect("/proc");
            let mut lines = all.lines().filter(|line| line.starts_with(group)).map(|line| line.split(' '));
            let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
            let (_, value) = names.zip(values).find(|(name, _)| *name == counter).expect("since Linux 3.10");
            value.parse::<u64>().expect("a number")
        };
        count() + self.client.run(count).expect("setns") + self.backend.run(count).expect("setns")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for role in ["client", "frontend", "backend"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}-{role}", self.name)]).status();
        }
    }
}
