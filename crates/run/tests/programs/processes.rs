//! Programs with children, programs that execute others, and programs that close descriptors which they have not
//! opened. A *store* is the part of an agent that keeps the bodies of its machine's programs. Memory is *absent* if it
//! stands for bytes of a store, and gets them when somebody touches it.

use std::process::{Output, Stdio};
use std::time::Duration;

use shunt_odb::store::Limits;

use crate::bed::{Bed, CONNECTS, Program, free_address};

/// Runs two Python programs under `shunt run`: one that sends when it is told to, and one that receives. Returns the
/// receiver's output.
pub fn receive(bed: &Bed, sends: &str, receives: &str) -> Output {
    converse(bed, &format!("assert sock.recv(2) == b'go'\n{sends}"), &format!("sock.sendall(b'go')\n{receives}"))
}

/// Like `receive`, but the accepting program need not wait until it is told to send.
pub fn converse(bed: &Bed, accepts: &str, connects: &str) -> Output {
    let port = free_address().port().to_string();
    let program = |text: &str| {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", text, &port]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let _accepts = Program(program(&format!("{LISTENS}{accepts}")));
    let connects = program(&format!("{CONNECTS}{RECEIVED}{connects}"));
    connects.wait_with_output().unwrap()
}

pub fn well(output: &Output, expected: &str) {
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said == expected, "{}: {said:?} {why}", output.status);
}

const LISTENS: &str = "
import os, signal, socket, sys, time
signal.alarm(60)
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
sock = listener.accept()[0]
";

const RECEIVED: &str = "
def received(count):
    buffer = bytearray(1 << 20)
    view, at = memoryview(buffer), 0
    while at < count:
        at += sock.recv_into(view[at:])
    return buffer
";

#[test]
fn less_than_a_preamble_arrives_from_who_speaks_first() {
    let bed = Bed::new(Limits::default());
    let waits_for_an_answer = "time.sleep(0.2); sock.sendall(b'hi'); assert sock.recv(3) == b'yes'";
    let answers = "assert sock.recv(100) == b'hi'; sock.sendall(b'yes'); assert sock.recv(1) == b''; print('same')";
    well(&converse(&bed, waits_for_an_answer, answers), "same\n");
    let ends = "time.sleep(0.2); sock.sendall(b'hi'); sock.close()";
    let reads = "
read = b''
while part := sock.recv(100):
    read += part
print(read)
";
    well(&converse(&bed, ends, reads), "b'hi'\n");
}

const SENDS: &str = "sock.sendall(b'x' * 400_000); sock.recv(1)";

#[test]
fn a_program_that_closes_what_it_has_not_opened_reads_the_same() {
    let bed = Bed::new(Limits::default());
    let closes = "
buffer = received(400_000)
os.closerange(3, 4096)
others = [os.open('/dev/null', os.O_RDWR) for _ in range(100)]
assert buffer[:400_000] == b'x' * 400_000
print('same')
";
    well(&receive(&bed, SENDS, closes), "same\n");
}

#[test]
fn a_child_does_not_read_lost_bytes_and_its_parent_continues() {
    let bed = Bed::new(Limits { lease_ms: 300, ..Limits::default() });
    let forks = "
buffer = received(400_000)
time.sleep(2)
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, 'a child that looks at nothing'
child = os.fork()
if child == 0:
    os._exit(sum(buffer[:400_000:1000]) % 2)
print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV)
sys.stdout.flush()
os._exit(0)
";
    well(&receive(&bed, SENDS, forks), "True\n");
}

/// A program executes another one, with the connection as its standard streams and with an empty environment, as
/// inetd(8) does.
#[test]
fn a_program_that_gets_the_connection_as_its_standard_streams_speaks_the_same() {
    let bed = Bed::new(Limits::default());
    let executes = "
os.dup2(sock.fileno(), 0); os.dup2(sock.fileno(), 1)
text = 'read line; for ((i = 0; i < 20000; i++)); do echo \"$line $i\"; done; head -c 100000 /dev/zero; cat'
os.execve('/bin/bash', ['bash', '-c', text], {})
";
    let talks = "
sock.sendall(b'hello\\n' + b'z' * 100_000)
sock.shutdown(socket.SHUT_WR)
parts = []
while part := sock.recv(70_000):
    parts.append(part)
expected = b''.join(b'hello %d\\n' % i for i in range(20_000)) + bytes(100_000) + b'z' * 100_000
print(b''.join(parts) == expected)
";
    well(&receive(&bed, executes, talks), "True\n");
}

/// A process that is killed while it writes may leave the connection in the middle of a frame (the unit that the
/// library sends). Then its parent cannot use the connection any more. But the parent must get an error, and not wait
/// for ever, although the child is still a zombie.
#[test]
fn processes_that_share_a_connection_with_a_killed_writer_get_an_error() {
    let bed = Bed::new(Limits::default());
    let kills = "
child = os.fork()
if child == 0:
    while True:
        sock.sendall(b'y' * 3000)
time.sleep(1)
os.kill(child, signal.SIGKILL)
try:
    sock.sendall(b'z' * 100)
except (ConnectionResetError, BrokenPipeError):
    sock.close(); listener.close()
    os.waitpid(child, 0)
";
    let waits = "
time.sleep(3)
total = 0
while part := sock.recv(100_000):
    assert part == b'y' * len(part)
    total += len(part)
print(total > 0)
";
    well(&receive(&bed, kills, waits), "True\n");
}

/// There are more connections than the table of connections' states has places for. Nearly all belong to programs that
/// are killed, so their places must become free.
#[test]
fn connections_of_killed_programs_leave_no_room_taken() {
    let bed = Bed::new(Limits::default());
    const TURNS: usize = 90;
    let connects = "
import os, signal, socket
listener = socket.create_server(('127.0.0.1', 0), backlog=500)
pairs = []
for turn in range(400):
    one = socket.create_connection(listener.getsockname())
    pairs.append((one, listener.accept()[0]))
    one.sendall(b'question')
    assert pairs[-1][1].recv(100) == b'question'
    pairs[-1][1].sendall(b'answer' * 5000)
    assert one.recv(6, socket.MSG_WAITALL) == b'answer'
os.kill(os.getpid(), signal.SIGKILL)
";
    for turn in 0..TURNS {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", connects]).stdin(Stdio::null()).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(9), "turn {turn}: {why}");
    }
}

/// The store keeps bytes only for a time, their lease. Before the lease ends, the library fetches the bytes for memory
/// that has been absent for long.
#[test]
#[ignore = "waits for a minute and a half"]
fn a_program_that_reads_after_the_lease_finds_the_bytes() {
    let bed = Bed::new(Limits { lease_ms: 60_000, ..Limits::default() });
    let waits = format!(
        "buffer = received(400_000); signal.alarm(200); time.sleep({}); print(buffer[:400_000] == b'x' * 400_000)",
        Duration::from_secs(80).as_secs()
    );
    well(&receive(&bed, "signal.alarm(200); sock.sendall(b'x' * 400_000); sock.recv(1)", &waits), "True\n");
}
