//! The kernel has no memory for bytes that a program has read: the program must end, and not continue with zeros.
//! Memory is *absent* if it stands for bytes of the agent's store, and gets them when somebody touches it.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use shunt_odb::store::Limits;

use crate::bed::{Bed, Program, free_address};

const SENDS: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
sock = listener.accept()[0]
assert sock.recv(2) == b'go'
for part in range(24):
    sock.sendall(b'x' * (1 << 20))
sock.recv(1)
";

/// Receives 24 MiB into absent memory, then may use only 4 MiB more, and looks at one byte of each page.
const LOOKS: &str = "
import os, signal, socket, sys
signal.alarm(60)
group = sys.argv[2]
def say(file, what):
    with open(file, 'w') as to: to.write(str(what))
say(f'{group}/cgroup.procs', os.getpid())
sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
sock.sendall(b'go')
parts = []
for part in range(24):
    parts.append(bytearray(1 << 20))
    view, at = memoryview(parts[-1]), 0
    while at < 1 << 20:
        at += sock.recv_into(view[at:])
assert parts[0] == b'x' * (1 << 20)
# Nobody is killed: who needs memory is refused it, or waits.
if os.path.exists(f'{group}/memory.oom_control'):
    say(f'{group}/memory.oom_control', 1)
    used, limit = 'memory.usage_in_bytes', 'memory.limit_in_bytes'
else:
    say('/proc/self/oom_score_adj', -1000)
    used, limit = 'memory.current', 'memory.max'
say(f'{group}/{limit}', int(open(f'{group}/{used}').read()) + (4 << 20))
print('looks', flush=True)
for part in parts:
    for at in range(0, len(part), 4096):
        if part[at] != 120:
            print('another byte', flush=True)
print('went on')
";

/// A control group whose memory can be limited, of cgroup v1 or v2.
struct Group(PathBuf);

impl Group {
    /// Makes a group. Returns `None`, and reports that `test` is skipped, where no hierarchy limits memory.
    fn new(test: &str, name: &str) -> Option<Self> {
        let first = Path::new("/sys/fs/cgroup/memory");
        let second = shunt_sys::cgroup::root().unwrap();
        let limits = |root: &Path| fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
        let root = if first.join("memory.limit_in_bytes").exists() {
            first
        } else if limits(&second).contains("memory") {
            &second
        } else {
            shunt_testbed::skipped(test, "no control group here limits memory");
            return None;
        };
        let group = root.join(name);
        fs::create_dir(&group).unwrap();
        Some(Self(group))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a program that looks at more bytes than it may have in memory. Returns how it ended, and its errors.
fn looks(bed: &Bed, group: &Group) -> (ExitStatus, String) {
    let port = free_address().port().to_string();
    let start = |text: &str, arguments: &[&str]| {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", text, &port]).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut sends = Program(start(SENDS, &[]));
    let mut line = [0; 10];
    std::io::Read::read_exact(sends.0.stdout.as_mut().unwrap(), &mut line).unwrap();
    let looks = start(LOOKS, &[&group.0.to_string_lossy()]).wait_with_output().unwrap();
    let (said, why) = (String::from_utf8_lossy(&looks.stdout), String::from_utf8_lossy(&looks.stderr));
    assert_eq!(said, "looks\n", "{}: {why}", looks.status);
    assert!(!looks.status.success(), "it went on");
    (looks.status, why.into_owned())
}

/// The test needs a turn in which the kernel refuses memory to the library first, as in nearly every turn. Sometimes
/// the kernel refuses memory to the Python interpreter first, which then waits until it is ended, or gives up.
#[test]
fn a_program_without_memory_for_what_it_has_read_ends() {
    let bed = Bed::new(Limits::default());
    let name = bed.path().file_name().unwrap().display().to_string();
    let mut others = Vec::new();
    for turn in 0..5 {
        let test = "a_program_without_memory_for_what_it_has_read_ends";
        let Some(group) = Group::new(test, &format!("{name}-scarce{turn}")) else { return };
        let (status, why) = looks(&bed, &group);
        if why.contains("no memory for bytes that this process has touched") {
            assert_eq!(status.signal(), Some(rustix::process::Signal::BUS.as_raw()), "{why}");
            return;
        }
        others.push((status, why));
    }
    panic!("{others:?}");
}
