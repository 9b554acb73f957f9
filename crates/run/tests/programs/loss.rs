//! Bytes of a store that can no longer be fetched: the connection breaks or the process ends. No program gets wrong
//! bytes, or waits for ever. A *lease* is the time for which the store keeps bytes that nobody has asked for. A *store*
//! is the part of an agent that keeps the bodies of its machine's programs. Memory is *absent* if it stands for bytes
//! of a store, and gets them when somebody touches it.

use std::io::Read;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use shunt_odb::store::Limits;
use shunt_testbed::{assert_same_bytes, wait_for};

use crate::bed::{Bed, Program, bytes, free_address};
use crate::chain::{LARGE, chain};
use crate::http::Client;

/// If a client reads nothing for longer than the store keeps payloads, it gets a prefix of the body, and then the end
/// of the connection.
#[test]
fn a_body_that_is_gone_ends_its_connection_and_no_other() {
    let bed = Bed::new(Limits { lease_ms: 2000, ..Limits::default() });
    let tiers = chain(
        &bed,
        [true; 3],
        "sendfile off; output_buffers 4 256k;",
        "proxy_buffers 64 64k; proxy_max_temp_file_size 0;",
    );
    let mut slow = TcpStream::connect(tiers[0].address).unwrap();
    write!(slow, "GET /{LARGE} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_secs(8)); // the subject of the test: a pause of four leases
    slow.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut got = Vec::new();
    let _ = slow.read_to_end(&mut got);
    let head = got.windows(4).position(|end| end == b"\r\n\r\n").expect("a header") + 4;
    let body = &got[head..];
    assert!(body.len() < LARGE, "the lease has ended meanwhile");
    assert_same_bytes(body, &bytes(LARGE as u64, LARGE)[..body.len()], "a prefix of the body");
    assert!(bed.counted("gone") > 0, "it was asked for and gone");

    let (head, body) = Client::new(tiers[0].address).get("/65536");
    assert!(head.starts_with("HTTP/1.1 200"), "the tiers go on: {head}");
    assert_same_bytes(&body, &bytes(65_536, 65_536), "the next body");
}

/// Receives 200,000 bytes, waits for 2 s, and looks at some of them. By then, a store with a short lease no longer
/// keeps the bytes.
const TOUCHES_LATE: &str = "
import socket, sys, time
sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
sock.sendall(b'go')
buffer = bytearray(1 << 20)
view, at = memoryview(buffer), 0
while at < 200_000:
    at += sock.recv_into(view[at:])
time.sleep(2)
total = sum(buffer[:200_000:1000])
print('went on', total)
";

const SENDS: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
sock = listener.accept()[0]
assert sock.recv(2) == b'go'
sock.sendall(b'x' * 200_000)
sock.recv(1)
";

/// Waits until a program listens. It does not connect, because the program accepts only one connection.
fn until_listening(port: &str) {
    let port: u16 = port.parse().unwrap();
    let line = format!("0100007F:{port:04X} 00000000:0000 0A");
    let listens = || std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&line);
    wait_for(&format!("somebody listens at port {port}"), listens).unwrap();
}

/// Runs the program `sends`, which sends bytes, and the program `looks`, which looks at them 2 s later. Returns how the
/// second program ended, its output and its errors.
fn looks_late(bed: &Bed, sends: &str, looks: &str) -> (ExitStatus, String, String) {
    let port = free_address().port().to_string();
    let program = |text: &str| {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", text, &port]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Program(command.spawn().unwrap())
    };
    let _sends = program(sends);
    until_listening(&port);
    let mut looks = program(looks);
    let status = looks.0.wait().unwrap();
    let (mut said, mut why) = (String::new(), String::new());
    looks.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    looks.0.stderr.take().unwrap().read_to_string(&mut why).unwrap();
    (status, said, why)
}

#[test]
fn a_process_that_touches_lost_bytes_ends() {
    let bed = Bed::new(Limits { lease_ms: 300, ..Limits::default() });
    let (status, said, why) = looks_late(&bed, SENDS, TOUCHES_LATE);
    assert_eq!(status.signal(), Some(7), "SIGBUS; it said {said:?} {why:?}");
    assert!(!said.contains("went on") && why.contains("cannot be fetched any more"), "{said:?} {why:?}");
}

/// The buffer still stands for lost bytes. The next bytes that the program receives are written into the same page.
#[test]
fn a_process_that_reuses_a_buffer_continues_though_its_old_bytes_are_lost() {
    let bed = Bed::new(Limits { lease_ms: 300, ..Limits::default() });
    let sends = SENDS.replace("sock.recv(1)", "assert sock.recv(4) == b'more'; sock.sendall(b'y' * 100); sock.recv(1)");
    let again = "sock.sendall(b'more'); total = sock.recv_into(view); assert buffer[:total] == b'y' * 100";
    let looks = TOUCHES_LATE.replace("total = sum(buffer[:200_000:1000])", again);
    let (status, said, why) = looks_late(&bed, &sends, &looks);
    assert!(status.success() && said == "went on 100\n", "{status}: {said:?} {why:?}");
}

/// A program may fill memory that stands for lost bytes, or copy other bytes over it. It needs nothing of what was
/// there, so it must continue.
#[test]
fn a_process_that_overwrites_lost_bytes_continues() {
    let bed = Bed::new(Limits { lease_ms: 300, ..Limits::default() });
    for over in ["ctypes.memset(at, 7, 200_000)", "ctypes.memmove(at, bytes([7]) * 200_000, 200_000)"] {
        let over = format!("import ctypes; at = ctypes.addressof(ctypes.c_char.from_buffer(buffer)); {over}");
        let looks = TOUCHES_LATE
            .replace("total =", &format!("{over}\nassert buffer[:200_000] == bytes([7]) * 200_000\ntotal ="));
        let (status, said, why) = looks_late(&bed, SENDS, &looks);
        assert!(status.success() && said == "went on 1400\n", "{over}: {status}: {said:?} {why:?}");
    }
}

/// Source and destination of the copy are absent memory. The source was not allocated by malloc, but the destination
/// was.
#[test]
fn a_copy_of_what_is_absent_over_what_is_absent_is_whole() {
    let bed = Bed::new(Limits::default());
    let sends =
        SENDS.replace("sock.recv(1)", "assert sock.recv(4) == b'more'; sock.sendall(b'y' * 200_000); sock.recv(1)");
    let copies = "
import ctypes, mmap
sock.sendall(b'more')
mapped, at = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
while at < 200_000:
    at += sock.recv_into(memoryview(mapped)[at:])
to, source = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (buffer, mapped))
ctypes.memmove(to, source, 200_000)
assert buffer[:200_000] == b'y' * 200_000
total = 0";
    let looks = TOUCHES_LATE.replace("total = sum(buffer[:200_000:1000])", copies);
    let (status, said, why) = looks_late(&bed, &sends, &looks);
    assert!(status.success() && said == "went on 0\n", "{status}: {said:?} {why:?}");
}

/// Sets `c` to the C library, and `at` to the address of the received bytes.
const FROM_C: &str = "
import ctypes, os, signal
signal.alarm(60)
c, at = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(buffer))
";

/// `_Fork(3)` calls no fork handlers, so the library does not notice it. The child has its own copy of memory. What it
/// writes must be in this copy, and not in its parent's memory.
#[test]
fn a_child_that_the_library_does_not_know_writes_into_separate_memory() {
    let bed = Bed::new(Limits::default());
    let forks = "
child = c._Fork()
if child == 0:
    ctypes.memset(at, 7, 200_000)
    c._exit(0 if buffer[:200_000] == bytes([7]) * 200_000 else 1)
assert os.waitpid(child, 0)[1] == 0, 'the child has what it has written'
assert buffer[:200_000] == b'x' * 200_000, 'so has its parent'
total = 0";
    let looks = TOUCHES_LATE.replace("total = sum(buffer[:200_000:1000])", &format!("{FROM_C}{forks}"));
    let (status, said, why) = looks_late(&bed, SENDS, &looks);
    assert!(status.success() && said == "went on 0\n", "{status}: {said:?} {why:?}");
}

/// A program may have given pages back to the kernel (madvise(2)) in the middle of a range that it then writes over.
#[test]
fn a_program_writes_over_pages_that_it_has_emptied_itself() {
    let bed = Bed::new(Limits::default());
    let empties = "
page = (at + 100_000) // 4096 * 4096
assert buffer[page - at] == ord('x')
assert c.madvise(ctypes.c_void_p(page), 4096, 4) == 0
ctypes.memset(at, 7, 200_000)
assert buffer[:200_000] == bytes([7]) * 200_000
total = 0";
    let looks = TOUCHES_LATE.replace("total = sum(buffer[:200_000:1000])", &format!("{FROM_C}{empties}"));
    let (status, said, why) = looks_late(&bed, SENDS, &looks);
    assert!(status.success() && said == "went on 0\n", "{status}: {said:?} {why:?}");
}

/// Waits for edges (EPOLLET), as nginx does: after a short read it reads again only at the next event. Its buffers are
/// so small that nothing in them is absent.
const READS_ON_EDGES: &str = "
import select, socket, sys, time
sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
sock.setblocking(False)
edges = select.epoll()
edges.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
assert edges.poll(10)
sock.sendall(b'go')
time.sleep(2)
got = b''
while True:
    assert [ready for ready in edges.poll(10) if ready[1] & select.EPOLLIN], f'no edge after {len(got)} bytes'
    try:
        while True:
            now = sock.recv(3000)
            assert now, 'the end'
            got += now
            if len(now) < 3000: break
    except BlockingIOError:
        pass
    except ConnectionResetError:
        break
assert got == b'y' * 100, len(got)
print('reset')
";

#[test]
fn a_program_that_waits_for_edges_learns_of_lost_bytes_behind_a_read() {
    let bed = Bed::new(Limits { lease_ms: 300, ..Limits::default() });
    let port = free_address().port().to_string();
    let program = |text: &str| {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", text, &port]).stdin(Stdio::null()).stdout(Stdio::piped());
        Program(command.spawn().unwrap())
    };
    let sends = SENDS.replace("sock.sendall(b'x'", "sock.sendall(b'y' * 100); sock.sendall(b'x'");
    let _sends = program(&sends);
    until_listening(&port);
    let mut reads = program(READS_ON_EDGES);
    let mut said = String::new();
    reads.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "reset\n", "{}", reads.0.wait().unwrap());
}

/// Bytes that a program has sent can be fetched after its end.
#[test]
fn a_program_that_is_killed_has_sent_what_it_has_sent() {
    let bed = Bed::of(2, Limits::default());
    let port = free_address().port().to_string();
    let sends = SENDS
        .replace("sock.recv(1)", "print('sent', flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)");
    let receives = TOUCHES_LATE
        .replace("time.sleep(2)", "assert buffer[:200_000] == b'x' * 200_000")
        .replace("sock.sendall(b'go')", "sock.sendall(b'go'); time.sleep(1)");
    let program = |machine: usize, text: &str| {
        let mut command = bed.machine(machine).under_shunt("python3");
        command.args(["-B", "-c", text, &port]).stdin(Stdio::null()).stdout(Stdio::piped());
        Program(command.spawn().unwrap())
    };
    let mut sends = program(1, &sends);
    until_listening(&port);
    let mut receives = program(0, &receives);
    assert!(receives.0.wait().unwrap().success());
    assert_eq!(sends.0.wait().unwrap().signal(), Some(9));
    assert!(bed.counted("fetched_bytes") > 100_000, "most of it came from the store");
}
