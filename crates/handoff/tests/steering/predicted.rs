//! Tests of the window that a client offers to its *sender*, the backend's socket for the client. A kernel predicts the
//! window field of the next ACK. An ACK with the predicted field leaves the window that the kernel knows as it is.
//! TCP_REPAIR_WINDOW changes the window that the kernel knows, but not the prediction.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{SendFlags, send, sockopt};
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, detach_all};
use shunt_sys::repair::{Restored, clock_ms, restore, set_window};
use shunt_sys::sockopt::unacknowledged;
use shunt_testbed::wait_for;

use super::host::{Host, cgroup, ip, send_frame};
use super::programs::{Pins, server};
use super::segment::Segment;

const PORT: u16 = 7001;
const START: u32 = 70_000;
/// Receive sequence number of the socket, which never changes. The client's ACKs carry its lower half as a token.
const TOKEN: u32 = 400;
const RCV_WND: u32 = 65_535;
const SCALE: u8 = 10;

/// A sender's socket, with the steering programs that every backend has.
struct Bed {
    pins: Pins,
    _backend: Backend,
    socket: OwnedFd,
    _host: Host,
}

fn us() -> SocketAddr {
    ([10, 1, 0, 1], PORT).into()
}

fn client() -> SocketAddr {
    "10.1.0.2:5000".parse().unwrap()
}

impl Bed {
    fn new() -> Self {
        let host = Host::new();
        // Sets the destination address of the tests' frames. When the address changes, the kernel forgets the
        // neighbours on the device.
        ip(&["link", "set", "backend0", "address", "02:00:00:00:00:01"]);
        ip(&["neigh", "replace", "10.1.0.2", "lladdr", "02:00:00:00:00:02", "nud", "permanent", "dev", "backend0"]);
        // Reno sends as much as the window has room for.
        std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno").expect("sysctl");
        let pins = Pins::new(&host, "predicted");
        let config = BackendConfig {
            pin_dir: pins.0.clone(),
            netns_cookie: 0,
            cgroup: cgroup(),
            interfaces: vec![host.backend_port],
            ports: 7000..=7009,
        };
        let mut backend = Backend::load(&config).expect("the backend loads");
        let slot = Slot {
            server: server().into(),
            live: true,
            start: START,
            seq_delta: 0,
            ts_delta: 0,
            rcv_nxt: TOKEN,
            ack: 90_000,
            snd_cwnd: 1000,
            ts_recent: 55,
            ahead: 0,
        };
        backend.write_slot(7, &slot);
        backend.insert(&SenderKey { client: client().into(), port: PORT }, 7).expect("a free sender");
        let restored = Restored {
            local: us(),
            remote: client(),
            snd_nxt: START,
            rcv_nxt: TOKEN,
            snd_wnd: 20_000,
            rcv_wnd: RCV_WND,
            mss: 1448,
            window_scale: Some((SCALE, SCALE)),
            sack: true,
            tsval: Some(clock_ms() & !1),
        };
        let (socket, _) = restore(&restored).expect("the socket is restored");
        sockopt::set_socket_send_buffer_size_force(&socket, 1 << 20).expect("SO_SNDBUFFORCE");
        Self { pins, _backend: backend, socket, _host: host }
    }

    /// Writes `bytes` bytes. Returns the number of bytes that then wait for room in the client's window.
    fn write(&self, bytes: usize) -> u32 {
        assert_eq!(send(&self.socket, &vec![7; bytes], SendFlags::DONTWAIT), Ok(bytes));
        self.unsent()
    }

    /// Delivers the client's ACK of the first `bytes` bytes, as a frontend passes it on. `left` is the number of bytes
    /// that are then unacknowledged.
    fn acknowledge(&self, bytes: u32, window: u16, left: u32) {
        let ack = Segment::ack(client(), us(), 90_000, START + bytes).timestamps(60, clock_ms());
        let frame = Segment { window, urgent: TOKEN as u16, ..ack }.to_frame();
        send_frame("backend1", &frame);
        let what = format!("the ACK leaves {left} bytes unacknowledged");
        wait_for(&what, || unacknowledged(&self.socket).is_ok_and(|now| now == left)).unwrap();
    }

    /// Number of bytes that wait for room in the client's window.
    fn unsent(&self) -> u32 {
        // This call waits for the socket's lock: an ACK that is being handled has then caused its bytes to be sent.
        sockopt::tcp_nodelay(&self.socket).expect("TCP_NODELAY");
        let mut bytes: libc::c_int = 0;
        // SAFETY: SIOCOUTQNSD writes one int, which lives in this frame.
        let status = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCOUTQNSD, &mut bytes) };
        assert_eq!(status, 0);
        bytes as u32
    }
}

/// Request for the number of unsent bytes (linux/sockios.h).
const SIOCOUTQNSD: libc::c_ulong = 0x894b;

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = detach_all(&self.pins.0);
    }
}

/// A window that was set on a socket between two payloads is replaced by that of the next ACK, even if this ACK has the
/// old window field.
#[test]
fn an_ack_with_the_window_of_before_is_believed_after_another_was_set() {
    let bed = Bed::new();
    bed.write(1000);
    bed.acknowledge(1000, 16, 0);
    set_window(&bed.socket, TOKEN, 60_000, RCV_WND).expect("TCP_REPAIR_WINDOW");
    let unsent = bed.write(200_000);
    assert!((140_000..144_000).contains(&unsent), "60,000 bytes have room: {unsent}");
    bed.acknowledge(31_000, 16, 170_000);
    assert_eq!(bed.unsent(), unsent, "what has been sent ends behind the client's window");
}

/// A socket that has just been restored predicts a closed window.
#[test]
fn a_window_that_closes_with_the_first_ack_is_closed() {
    let bed = Bed::new();
    let unsent = bed.write(100_000);
    assert!((80_000..84_000).contains(&unsent), "20,000 bytes have room: {unsent}");
    bed.acknowledge(10_000, 0, 90_000);
    assert_eq!(bed.unsent(), unsent, "there is no room");
}
