//! Files that programs send with sendfile. The program sends references to the file's bytes. If the file changes before
//! the bytes are needed, the receiver must not get wrong ones. A *segment* is a part of the store's memory into which
//! one program writes. A *lease* is the time for which the store keeps a segment or body that nobody gives back. A
//! *reference* goes over a connection in place of bytes. The receiver fetches these bytes from the sender's machine if
//! it needs them.

use std::fs;
use std::process::{Command, Output, Stdio};

use shunt_odb::store::Limits;
use shunt_testbed::assert_same_bytes;

use crate::bed::{Bed, CONNECTS, Program, bytes, free_address, wait_until_settled};
use crate::chain::{LARGE, chain};
use crate::http::Client;

/// Limits of a store with hardly any memory. If programs copied files into the store, it would be full at once, and all
/// further bytes would be sent inline (in the connection).
fn small() -> Limits {
    Limits { bytes: 3 << 20, segment_bytes: 256 << 10, ..Limits::default() }
}

#[test]
fn a_large_file_skips_the_intermediate_and_takes_no_room() {
    let bed = Bed::of(3, small());
    let between = bed.machine_of("intermediate");
    let tiers = chain(&bed, [true; 3], "sendfile on;", "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    wait_until_settled(&bed.path().join("files").join(LARGE.to_string()));
    for _ in 0..3 {
        let before = between.program_counted("nginx", "passed_on");
        let (_, body) = Client::new(tiers[0].address).get(&format!("/{LARGE}"));
        assert_same_bytes(&body, &bytes(LARGE as u64, LARGE), "the body");
        let passed_on = between.program_counted("nginx", "passed_on") - before;
        assert!(passed_on * 100 > LARGE as u64 * 95, "{passed_on} of {LARGE} bytes were passed on");
    }
    assert!(bed.machine_of("backend").counted("files") > 0);
}

/// Makes a file, waits until its last change is so long ago that it is sent by reference, and sends it to the first
/// client.
const SENDS: &str = "
import os, signal, socket, sys, time
signal.alarm(100)
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
path = sys.argv[2]
with open(path, 'wb') as new:
    new.write(b'x' * 400_000)
time.sleep(3.2)
file = open(path, 'rb')
sock = listener.accept()[0]
assert sock.recv(2) == b'go'
assert os.sendfile(sock.fileno(), file.fileno(), 0, 1_000_000) == 400_000
";

/// Receives the file and one more byte, waits, and looks at the file's bytes. The sending program sends the additional
/// byte after it has changed the file.
const LOOKS: &str = "
sock.sendall(b'go')
buffer = bytearray(1 << 20)
view, at = memoryview(buffer), 0
while at < 400_001:
    got = sock.recv_into(view[at:400_001])
    assert got > 0
    at += got
time.sleep(float(sys.argv[2]))
print(buffer[:400_000] == b'x' * 400_000)
";

/// Runs the program `sends` on the second machine, and the program `looks` on the first. Returns the output of `looks`.
fn talk(bed: &Bed, sends: &str, looks: &str, then: &str) -> Output {
    let port = free_address().port().to_string();
    let program = |machine: usize, text: &str, more: &str| {
        let mut command = bed.machine(machine).under_shunt("python3");
        command.args(["-B", "-c", text, &port, more]).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    let path = bed.path().join("sent");
    let sends = Program(program(1, sends, path.to_str().unwrap()));
    let output = program(0, &format!("{CONNECTS}{looks}"), then).wait_with_output().unwrap();
    drop(sends);
    let _ = fs::remove_file(path);
    output
}

#[test]
fn a_file_that_changes_before_its_bytes_are_needed_is_lost_and_never_mixed() {
    // Each sending program takes a segment. Some do not give theirs back, and it stays taken until its lease ends. So
    // there must be room for a segment of each program.
    let bed = Bed::of(2, Limits { bytes: 1 << 30, ..Limits::default() });
    let fates = [
        ("", true),
        ("os.unlink(path)", true),
        ("open(path + '2', 'wb').write(b'y' * 400_000); os.rename(path + '2', path)", true),
        ("file.close()", true),
        ("os.truncate(path, 100_000)", false),
        ("open(path, 'wb').write(b'y' * 400_000)", false),
        ("open(path, 'r+b').write(b'y')", false),
        ("open(path, 'ab').write(b'y')", false),
    ];
    for (fate, stays) in fates {
        let output = talk(&bed, &format!("{SENDS}{fate}\nsock.sendall(b'!'); sock.recv(1)"), LOOKS, "0");
        let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if stays {
            assert!(output.status.success() && said == "True\n", "{fate:?}: {} {said:?} {why}", output.status);
        } else {
            assert_eq!(said, "", "{fate:?}: it went on with other bytes");
            assert!(why.contains("cannot be fetched any more"), "{fate:?}: {} {why}", output.status);
        }
    }
}

#[test]
fn a_program_that_closes_its_file_and_ends_has_sent_it() {
    let bed = Bed::of(2, Limits::default());
    let sends = format!("{SENDS}sock.sendall(b'!'); file.close(); os.unlink(path); os._exit(0)");
    let output = talk(&bed, &sends, LOOKS, "1");
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"True\n", "{} {why}", output.status);
    let fetched = bed.machine(1).counted("fetched_bytes");
    // All of the file comes from the store, except for its first bytes, which are sent inline.
    assert!(fetched > 400_000 - 4096, "{fetched} bytes came from the store");
}

/// Nearly all bytes of the file are never read, so sending it costs only the references.
#[test]
fn a_file_of_a_gib_and_a_half_passes_without_being_read() {
    let bed = Bed::of(2, small());
    let sends = SENDS
        .replace(
            "new.write(b'x' * 400_000)",
            "[(new.seek(at), new.write(b'mark')) for at in (0, 1 << 30, (3 << 29) - 4)]",
        )
        .replace(
            "assert os.sendfile(sock.fileno(), file.fileno(), 0, 1_000_000) == 400_000",
            "
at = 0
while at < 3 << 29:
    at += os.sendfile(sock.fileno(), file.fileno(), at, (3 << 29) - at)
sock.recv(1)",
        );
    let looks = LOOKS.replace("at < 400_001", "at < 3 << 29").replace("view[at:400_001]", "view").replace(
        "    at += got\n",
        "
    for mark in (0, 1 << 30, (3 << 29) - 4):
        if at <= mark < at + got:
            assert buffer[mark - at:mark - at + 4] == b'mark', mark
    at += got
",
    );
    let looks = looks.replace("print(buffer[:400_000] == b'x' * 400_000)", "print(at == 3 << 29)");
    let output = talk(&bed, &sends, &looks, "0");
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"True\n", "{} {why}", output.status);
    let fetched = bed.counted("fetched_bytes");
    assert!(fetched < 64 << 20, "{fetched} bytes were fetched, of which nobody looked at more than a few");
}

/// Once the sender has learned that the receiver reads all of each file, it sends files inline. Only a few payloads
/// still go by reference, as probes of whether the receiver still reads them.
#[test]
fn a_file_that_is_read_goes_as_bytes_except_short_probes() {
    const MESSAGES: usize = 60;
    let bed = Bed::of(2, Limits::default());
    let sends = SENDS
        .replace("new.write(b'x' * 400_000)", "new.write(b'x' * (8 << 20))")
        .replace("b'go'", "b'go'\nfor turn in range(MESSAGES):\n  at = 0")
        .replace(
            "assert os.sendfile(sock.fileno(), file.fileno(), 0, 1_000_000) == 400_000",
            "  while at < 8 << 20: at += os.sendfile(sock.fileno(), file.fileno(), at, 8 << 20)\n  sock.recv(2)",
        );
    let sends = sends.replace("MESSAGES", &MESSAGES.to_string());
    let looks = format!(
        "
sock.sendall(b'go')
for turn in range({MESSAGES}):
    at = 0
    while at < 8 << 20:
        part = sock.recv(100_000)
        assert part and part == b'x' * len(part), at
        at += len(part)
    sock.sendall(b'go')
print(at == 8 << 20)"
    );
    let output = talk(&bed, &sends, &looks, "0");
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"True\n", "{} {why}", output.status);
    let (fetched, probes) = (bed.counted("fetched_bytes"), bed.machine(1).program_counted("python3", "probes"));
    println!("{fetched} bytes fetched, {probes} probes");
    // Until the sender has learned that the file is read, some payloads go by reference. It learns this separately for
    // payloads that begin a message and for those that follow.
    assert!(probes > 0 && fetched < (6 * 8 + probes) << 20, "{fetched} bytes were fetched, {probes} probes");
}

/// Python program that calls sendfile in many ways, and prints the results.
const CALLS: &str = "
import os, socket, sys, threading
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
sock = listener.accept()[0]
client.sendall(b'go'); assert sock.recv(2) == b'go'
sock.sendall(b'go'); assert client.recv(2) == b'go'
got = []
def reads():
    while part := client.recv(70_000): got.append(part)
thread = threading.Thread(target=reads); thread.start()
path = sys.argv[1]
file = os.open(path, os.O_RDWR)
pipe, into = os.pipe()
os.write(into, b'piped')
def call(name, source, offset, count):
    try: result = os.sendfile(sock.fileno(), source, offset, count)
    except OSError as error: result = error.errno
    where = os.lseek(file, 0, os.SEEK_CUR)
    print(name, result, where)
for size in (0, 1, 20_000, 300_000, 1 << 40):
    for offset in (0, 7, 299_999, 500_000, None):
        call(f'{size} at {offset}', file, offset, size)
    os.lseek(file, 100, os.SEEK_SET)
call('negative', file, -1, 10)
call('pipe', pipe, None, 5)
call('pipe at 0', pipe, 0, 5)
call('directory', os.open('/', os.O_RDONLY), None, 5)
call('write-only', os.open(path, os.O_WRONLY), 0, 5)
call('closed', 999, None, 5)
call('closed at 0', 999, 0, 5)
call('from zero', os.open('/dev/zero', os.O_RDONLY), None, 20_000)
sock.close(); thread.join()
import hashlib
print(len(b''.join(got)), hashlib.sha256(b''.join(got)).hexdigest())
";

#[test]
fn sendfile_returns_what_it_would_without() {
    let bed = Bed::new(Limits::default());
    let path = bed.path().join("file");
    fs::write(&path, bytes(1, 300_000)).unwrap();
    wait_until_settled(&path);
    let run = |mut command: Command| {
        let output = command.args(["-B", "-c", CALLS]).arg(&path).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run(bed.under_shunt("python3")), run(bed.plain("python3")));
}
