//! Entrances: connections that programs inherit, and by which they reach the store if they cannot find its socket. The
//! *store* has the bodies that a machine's programs have written.

use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use shunt_odb::store::Limits;
use shunt_odb::store::client::entrance;

use crate::Bed;

/// Python functions for programs whose standard input is an entrance. The messages are those of src/store/messages.rs.
const BEGINS: &str = "
import os, socket, struct
HELLO, LEASE, ENTER = 1, 2, 10
def ask(kind): return struct.pack('<I', kind).ljust(32, b'\\0')
def pair(): return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
def enter(end):
    socket.send_fds(door, [ask(ENTER)], [end.fileno()])
    end.close()
def is_served(end):
    try:
        end.send(ask(HELLO))
        return len(end.recv(1000)) > 0
    except (BrokenPipeError, ConnectionResetError):
        return False
door = socket.socket(fileno=0)
own, theirs = pair()
";

/// Runs a program with this entrance as its standard input. Returns what it prints.
fn at(entrance: &OwnedFd, text: &str) -> String {
    let mut program = Command::new("python3");
    program.args(["-B", "-c", &format!("{BEGINS}{text}")]).stdin(Stdio::from(entrance.try_clone().unwrap()));
    let output = program.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn an_entrance_lets_in_and_does_nothing_else() {
    let bed = Bed::new(Limits::default());
    let entrance = entrance(&bed.path()).unwrap();
    // Invalid packets at an entrance do not close it for others.
    let nonsense = "
for packet in (ask(HELLO), ask(LEASE), ask(ENTER), ask(99), b'', b'?', ask(ENTER) + b'?'): door.send(packet)
socket.send_fds(door, [ask(LEASE)], [theirs.fileno()])
socket.send_fds(door, [ask(ENTER)], [0])
stream = socket.socketpair()
socket.send_fds(door, [ask(ENTER)], [stream[0].fileno()])
";
    assert_eq!(at(&entrance, nonsense), "");
    assert_eq!(at(&entrance, "enter(theirs); print(is_served(own))"), "True");
    let silent = "
door.setblocking(False)
try: print(door.recv(1))
except BlockingIOError: print('nothing')
";
    assert_eq!(at(&entrance, silent), "nothing");
}

/// The store serves a program as the user whose process made the pair of sockets. So it refuses a pair that another
/// process made.
#[test]
fn nobody_enters_with_the_sockets_of_another() {
    let bed = Bed::new(Limits::default());
    let entrance = entrance(&bed.path()).unwrap();
    let anothers = "
way = socket.socketpair()
if os.fork() == 0:
    ends = pair()
    socket.send_fds(way[1], [b'?'], [end.fileno() for end in ends])
    os._exit(0)
_, fds, _, _ = socket.recv_fds(way[0], 1, 2)
own, theirs = (socket.socket(fileno=fd) for fd in fds)
enter(theirs)
print(is_served(own))
";
    assert_eq!(at(&entrance, anothers), "False");
}

/// A program that has become another user cannot enter with a pair of sockets that it made before.
#[test]
fn a_process_enters_as_its_present_user() {
    shunt_testbed::needs_root();
    let bed = Bed::new(Limits::default());
    let entrance = entrance(&bed.path()).unwrap();
    const GAMES: u32 = 5;
    let becomes = format!("os.setgid({GAMES}); os.setuid({GAMES})");
    assert_eq!(
        at(&entrance, &format!("{becomes}; own, theirs = pair(); enter(theirs); print(is_served(own))")),
        "True"
    );
    assert_eq!(at(&entrance, &format!("{becomes}; enter(theirs); print(is_served(own))")), "False");
}
