//! Agents that are stopped (SIGSTOP), together with their stores, while programs continue. A *holder* is the store that
//! has a program's bytes. A *store* is the part of an agent that keeps the bodies of its machine's programs. Memory is
//! *absent* if it stands for bytes of a store, and gets them when somebody touches it.

use std::time::Instant;

use rustix::process::Signal;
use shunt_odb::store::Limits;
use shunt_testbed::{PATIENCE, wait_for};

use crate::bed::{Bed, Machine, free_address};
use crate::stores::Talking;

/// Sends 40 bodies of 16 KiB on the first connection.
const SENDS: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
sock = listener.accept()[0]
assert sock.recv(2) == b'go'
for _ in range(40): sock.sendall(sys.argv[2].encode() * 16384)
print('sent', flush=True)
sock.recv(1)
";

/// Receives the bodies from two senders, each into a separate buffer.
const RECEIVES: &str = "
import ctypes, signal, socket, sys, threading, time
signal.alarm(100)
libc = ctypes.CDLL(None)
socks = []
def receive(port):
    sock = socket.create_connection(('127.0.0.1', int(port)))
    socks.append(sock)
    sock.sendall(b'go')
    bodies = []
    for _ in range(40):
        body, at = bytearray(16384), 0
        while at < len(body):
            at += sock.recv_into(memoryview(body)[at:])
        bodies.append(body)
    return bodies
first, second = receive(sys.argv[1]), receive(sys.argv[2])
print('received', flush=True)
def next_order():
    return sys.stdin.readline().strip()
";

/// One thread touches bytes of the first sender, without Python's global interpreter lock. Meanwhile the main thread
/// touches bytes of the second sender, and frees memory.
const TOUCHES: &str = "
if next_order() == 'reach': assert first[0] == b'x' * 16384
print('ready', flush=True)
next_order()
begun = threading.Event()
def touch():
    page = ctypes.addressof(ctypes.c_char.from_buffer(first[20])) + 8192
    begun.set()
    assert libc.memchr(ctypes.c_void_p(page), ord('!'), 1) == 0
    print('touched', flush=True)
toucher = threading.Thread(target=touch)
toucher.start()
begun.wait()
time.sleep(0.1)
for body in second[:3]: assert body == b'y' * 16384
print('others', flush=True)
del first[21:]
print('freed', flush=True)
toucher.join()
";

/// Writes the first sender's bytes to a pair of sockets whenever it is told to.
const WRITES: &str = "
one, other = socket.socketpair()
while next_order():
    try:
        sent = one.send(first[20])
        assert other.recv(16384, socket.MSG_WAITALL) == b'x' * 16384, sent
        print('sent', flush=True)
    except ConnectionResetError:
        print('reset', flush=True)
";

/// A machine's agent, stopped. Dropping this value makes the agent continue.
struct Stopped<'a>(&'a Machine);

impl<'a> Stopped<'a> {
    fn new(machine: &'a Machine) -> Self {
        machine.signal_agent(Signal::STOP);
        Self(machine)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal_agent(Signal::CONT);
    }
}

/// Starts programs on the second and third machines that send, and one on the first machine that receives.
fn received(bed: &Bed, then: &str) -> (Talking, [Talking; 2]) {
    let ports = [free_address(), free_address()].map(|address| address.port().to_string());
    let sender = |machine: usize, port: &str, byte: &str| {
        let mut sends = Talking::start(bed.machine(machine), SENDS, &[port, byte]);
        sends.says("listening");
        sends
    };
    let mut senders = [sender(1, &ports[0], "x"), sender(2, &ports[1], "y")];
    let mut receives = Talking::start(bed.machine(0), &format!("{RECEIVES}{then}"), &[&ports[0], &ports[1]]);
    senders.iter_mut().for_each(|sends| sends.says("sent"));
    receives.says("received");
    (receives, senders)
}

/// Reading memory cannot fail. So a thread that touches absent bytes of a silent holder waits for nearly a second, and
/// then the process ends. Until then, its other threads must be able to use other holders' bytes.
#[test]
fn a_thread_that_touches_a_silent_holders_bytes_keeps_nobody_else_waiting() {
    for order in ["reach", "do not"] {
        let bed = Bed::of(3, Limits::default());
        let (mut receives, _senders) = received(&bed, TOUCHES);
        receives.told(order);
        receives.says("ready");
        let _stopped = Stopped::new(bed.machine(1));
        receives.told("touch");
        receives.says("others");
        receives.says("freed");
        receives.ends_by_lost_bytes();
    }
}

#[test]
fn an_agent_that_is_stopped_for_a_moment_costs_no_bytes() {
    let bed = Bed::of(3, Limits::default());
    let (mut receives, _senders) = received(&bed, TOUCHES);
    receives.told("reach");
    receives.says("ready");
    let stopped = Stopped::new(bed.machine(1));
    receives.told("touch");
    drop(stopped);
    let mut said = [(); 3].map(|()| receives.says_something());
    said.sort();
    assert_eq!(said, ["freed", "others", "touched"]);
}

/// Only the first call waits for a silent holder. If each call waited for nearly a second, 200 writes would take about
/// three minutes. Otherwise they take less than a minute, even on a busy machine.
#[test]
fn a_silent_holder_is_waited_for_once_and_found_again() {
    let bed = Bed::of(3, Limits::default());
    let (mut receives, _senders) = received(&bed, WRITES);
    let began = Instant::now();
    {
        let _stopped = Stopped::new(bed.machine(1));
        for _ in 0..200 {
            receives.told("write");
            receives.says("reset");
        }
        assert!(began.elapsed() < PATIENCE, "it waits each time");
    }
    wait_for("it is found again", || {
        receives.told("write");
        let said = receives.says_something();
        assert!(matches!(said.as_str(), "sent" | "reset"), "{said:?}");
        said == "sent"
    })
    .unwrap();
}
