//! Memory and descriptors that a process and a connection take under `shunt run`, in addition to those that they take
//! without it.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use shunt_odb::states::STATE_BYTES;
use shunt_odb::store::Limits;

use crate::bed::{Bed, CONNECTS, Program, free_address};

const CONNECTIONS: i64 = 2000;

/// Beginning of both Python programs. Its function `says` prints the number of the process's descriptors and the
/// process's memory (Pss) in KiB.
const LOOKS: &str = "
import os, resource, socket, sys
def says():
    looks()
    print(len(os.listdir('/proc/self/fd')), looks(), flush=True)
def looks():
    with open('/proc/self/smaps_rollup') as maps:
        return next(line.split()[1] for line in maps if line.startswith('Pss:'))
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
held = []
";

const ACCEPTS: &str = "
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=600)
print('listening', flush=True)
for number in range(int(sys.argv[2])):
    held.append(listener.accept()[0])
    held[-1].sendall(held[-1].recv(100))
    if number == 0:
        says()
says()
sys.stdin.read()
";

const ASKS: &str = "
sock.sendall(b'x' * 100)
assert len(sock.recv(100)) == 100
says()
for number in range(int(sys.argv[2]) - 1):
    held.append(socket.create_connection(('127.0.0.1', int(sys.argv[1]))))
    held[-1].sendall(b'x' * 100)
    assert len(held[-1].recv(100)) == 100
says()
sys.stdin.read()
";

/// Makes a program inherit only its standard streams and the library's descriptors. Other tests run in this process,
/// too, and their open descriptors must not be counted.
fn with_none_of_ours(mut command: Command) -> Command {
    let settings = command.get_envs().find(|(name, _)| *name == "SHUNT_ODB").and_then(|(_, value)| value?.to_str());
    let numbers = settings.into_iter().flat_map(|value| value.split(';')).filter_map(|one| one.split_once('='));
    let mut kept: Vec<u32> = numbers.filter_map(|(_, value)| value.parse().ok()).collect();
    kept.sort_unstable();
    let none = move || {
        let mut from = 3;
        for kept in kept.iter().copied().chain([u32::MAX]) {
            if from < kept {
                // SAFETY: close_range(2) takes numbers, and with CLOSE_RANGE_CLOEXEC no descriptor closes before exec.
                unsafe { libc::close_range(from, kept - 1, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
            }
            from = kept.saturating_add(1);
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, and its memory was allocated before the fork.
    unsafe { command.pre_exec(none) };
    command
}

/// Number of descriptors, and memory in KiB, of one end: first with one connection, then with all of them.
type Held = [[i64; 2]; 2];

fn held(start: impl Fn() -> Command) -> [Held; 2] {
    let port = free_address().port().to_string();
    let one = |script: &str| {
        let mut command = with_none_of_ours(start());
        command.args(["-B", "-c", &format!("{LOOKS}{script}"), &port, &CONNECTIONS.to_string()]);
        let mut program = Program(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let said = BufReader::new(program.0.stdout.take().unwrap()).lines();
        (program, said)
    };
    let (_accepts, mut accepted) = one(ACCEPTS);
    assert_eq!(accepted.next().unwrap().unwrap(), "listening");
    let (_asks, mut asked) = one(&format!("{CONNECTS}{ASKS}"));
    let number = |line: Option<std::io::Result<String>>| {
        let line = line.expect("it says nothing more").unwrap();
        let numbers: Vec<i64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        [numbers[0], numbers[1]]
    };
    [&mut accepted, &mut asked].map(|said| [number(said.next()), number(said.next())])
}

#[test]
fn a_connection_takes_no_descriptor_more_and_little_memory() {
    let bed = Bed::new(Limits::default());
    let plain = held(|| bed.plain("python3"));
    let ours = held(|| bed.under_shunt("python3"));
    for (end, plain, ours) in [("accepts", plain[0], ours[0]), ("connects", plain[1], ours[1])] {
        let more = |at: usize, of: usize| ours[at][of] - plain[at][of];
        let [descriptors, memory] = [0, 1].map(|of| more(0, of));
        let bytes = (more(1, 1) - memory) * 1024 / CONNECTIONS;
        println!("who {end}: a process {descriptors} descriptors and {memory} KiB, a connection {bytes} bytes more");
        assert_eq!(more(1, 0), descriptors, "connections take descriptors of their own");
        assert!((1..=16).contains(&descriptors), "{descriptors} descriptors for a process");
        assert!(memory < 8 << 10, "{memory} KiB for a process");
        // The bound leaves room for the connection's state, and for free places in the table of states. A connection's
        // place follows from its socket cookie. Other sockets use up cookies, too, so some places stay free.
        assert!(bytes < 8 * STATE_BYTES as i64, "{bytes} bytes for a connection");
    }
}
