//! Stores of several machines: which programs may fetch from them, and what happens to programs whose agents end. A
//! *store* is the part of an agent that keeps its programs' bodies. The *entrance* is a connection to the store that
//! programs inherit. A *reference* goes over a connection in place of bytes. The receiver fetches these bytes from the
//! sender's machine if it needs them. Memory is *absent* if it stands for bytes of a store, and gets them when somebody
//! touches it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use shunt_odb::reference::Holder;
use shunt_odb::store::Limits;
use shunt_testbed::{wait_at_most, wait_for};

use crate::bed::{Bed, Machine, Program, free_address};
use crate::chain::{chain, load};
use crate::nginx::Tier;

/// Listens, and sends 400,000 bytes on the first connection.
const SENDS: &str = "
import os, socket, sys
if len(sys.argv) > 2: os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
sock = listener.accept()[0]
assert sock.recv(2) == b'go'
sock.sendall(b'x' * 400_000)
print('sent', flush=True)
sock.recv(1)
";

/// Receives the 400,000 bytes, and looks at a tenth of them for each line on its standard input. It does not call
/// `create_connection`, because in an empty root directory Python lacks a module for that.
const LOOKS: &str = "
import socket, sys
sock = socket.socket()
sock.connect(('127.0.0.1', int(sys.argv[1])))
sock.sendall(b'go')
buffer = bytearray(1 << 20)
view, at = memoryview(buffer), 0
while at < 400_000:
    at += sock.recv_into(view[at:])
print('received', flush=True)
for part in range(10):
    if not sys.stdin.readline(): break
    assert buffer[part * 40_000:(part + 1) * 40_000] == b'x' * 40_000
    print('good', flush=True)
";

/// A running program that takes orders by its standard input and reports on its standard output.
pub struct Talking {
    program: Program,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Talking {
    pub fn start(machine: &Machine, text: &str, arguments: &[&str]) -> Self {
        Self::run(machine.under_shunt("python3"), text, arguments)
    }

    fn unshunted(text: &str, arguments: &[&str]) -> Self {
        Self::run(Command::new("python3"), text, arguments)
    }

    pub fn run(mut command: Command, text: &str, arguments: &[&str]) -> Self {
        command.args(["-B", "-c", text]).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Program(command.stderr(Stdio::piped()).spawn().unwrap());
        let (to, from) = (program.0.stdin.take().unwrap(), BufReader::new(program.0.stdout.take().unwrap()));
        Self { program, to, from }
    }

    pub fn says(&mut self, expected: &str) {
        let said = self.says_something();
        assert_eq!(said, expected, "{}", if said.is_empty() { self.error() } else { String::new() });
    }

    pub fn says_something(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn looks(&mut self) {
        self.told("");
    }

    fn looks_at_all(&mut self) {
        for _ in 0..10 {
            self.looks();
            self.says("good");
        }
    }

    pub fn told(&mut self, order: &str) {
        writeln!(self.to, "{order}").unwrap();
    }

    fn error(&mut self) -> String {
        let mut text = String::new();
        self.program.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    pub fn ends_by_lost_bytes(mut self) {
        let status = self.program.0.wait().unwrap();
        let why = self.error();
        assert_eq!(status.signal(), Some(Signal::BUS.as_raw()), "{why}");
        assert!(why.contains("cannot be fetched any more"), "{why}");
    }
}

/// Starts a program on the second machine that sends, and one on the first machine that receives. Returns when the
/// receiver has received everything, before it looks at any of it.
fn sent(bed: &Bed, sender: &[&str]) -> (Talking, Talking) {
    let (sends, mut looks) = begun(bed, sender);
    looks.says("received");
    (sends, looks)
}

/// Like `sent`, but returns before the receiver has received anything.
fn begun(bed: &Bed, sender: &[&str]) -> (Talking, Talking) {
    begun_on(bed, 0, sender)
}

/// Like `begun`, with the receiver on the machine with the index `receives`.
fn begun_on(bed: &Bed, receives: usize, sender: &[&str]) -> (Talking, Talking) {
    let port = free_address().port().to_string();
    let mut sends = Talking::start(bed.machine(1), SENDS, &[&[port.as_str()], sender].concat());
    sends.says("listening");
    let looks = Talking::start(bed.machine(receives), LOOKS, &[&port]);
    sends.says("sent");
    (sends, looks)
}

#[test]
fn bytes_that_are_read_come_from_the_other_machine() {
    let bed = Bed::of(2, Limits::default());
    let (_sends, mut looks) = sent(&bed, &[]);
    assert_eq!(bed.counted("fetched_bytes"), 0, "nobody has looked at anything yet");
    looks.looks_at_all();
    let fetched = bed.machine(1).counted("fetched_bytes");
    assert!((380_000..=410_000).contains(&fetched), "{fetched}");
}

#[test]
fn an_agent_that_is_told_to_stop_gives_first_what_its_store_has() {
    let mut bed = Bed::draining(2, Limits::default());
    let (_sends, mut looks) = sent(&bed, &[]);
    let sender = bed.machine_mut(1);
    sender.signal_agent(Signal::TERM);
    // An agent whose store is empty would end within this time.
    let _ = wait_at_most(Duration::from_secs(2), "the agent ends", || !sender.has_agent());
    looks.looks_at_all();
    assert!(sender.has_agent(), "some of it may still be asked for");
    wait_for("the agent ends, because all is read", || !sender.has_agent()).unwrap();
}

#[test]
fn a_user_who_is_in_no_list_gets_nothing() {
    let bed = Bed::of(2, Limits::default());
    let (_sends, mut looks) = sent(&bed, &[GAMES]);
    looks.looks_at_all();
    assert_eq!(bed.counted("fetched_bytes"), 0, "all bytes came over the connection");
}

#[test]
fn only_readers_of_the_configuration_fetch() {
    let bed = Bed::with(2, Limits::default(), "readers = []");
    let (_sends, mut looks) = begun(&bed, &[]);
    // The sender's store refuses the receiving program before any memory of this program is absent. So only the
    // program's connection ends, and not the program.
    let error = looks.error();
    assert!(error.contains("ConnectionResetError"), "{error}");
    assert!(bed.machine(0).counted("unreached") > 0);
    assert_eq!(bed.counted("fetched_bytes"), 0);
}

/// The store refuses a program for which it has no place, before the program's memory becomes absent. So only the
/// program's connection ends.
#[test]
fn a_process_without_a_place_in_a_store_loses_a_connection_and_continues() {
    let bed = Bed::with(3, Limits::default(), "reader_connections = 1");
    // The first program has reached the store. It looks at nothing, because otherwise the next body would be sent
    // inline.
    let (_sends, _first) = sent(&bed, &[]);
    let (_sends_again, mut second) = begun_on(&bed, 2, &[]);
    let error = second.error();
    assert!(error.contains("ConnectionResetError"), "{error}");
}

#[test]
fn a_revoked_agents_programs_fetch_nothing_more() {
    let bed = Bed::of(2, Limits::default());
    let (_sends, mut looks) = sent(&bed, &[]);
    looks.looks();
    looks.says("good");
    bed.authority.revoke("m0").unwrap();
    bed.machine(1).signal_agent(Signal::HUP);
    wait_for("its connections end", || bed.machine(1).counted("readers") == 0).unwrap();
    // The program looks at the nine other tenths. One of them could be there already, because its first look has
    // fetched more than the page that it touched.
    (0..9).for_each(|_| looks.looks());
    looks.ends_by_lost_bytes();
}

#[test]
fn an_agent_may_read_its_certificates_again_under_load() {
    let bed = Bed::of(3, Limits::default());
    for backend in ["sendfile off;", "sendfile on;"] {
        let tiers = chain(&bed, [true; 3], backend, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
        std::thread::scope(|scope| {
            let loaded = scope.spawn(|| load(tiers[0].address, 300, 1));
            while !loaded.is_finished() {
                (0..3).for_each(|index| bed.machine(index).signal_agent(Signal::HUP));
                std::thread::sleep(Duration::from_millis(100)); // the pace of the signals
            }
        });
    }
}

/// Loads the tiers until they use the store of a new agent. Programs look for a new agent only at intervals, and send
/// the bytes themselves until they have found it.
fn until_store_is_used(bed: &Bed, tiers: &[Tier], seed: u64, when: &str) {
    wait_for(&format!("{when}: the new store is used"), || {
        load(tiers[0].address, 100, seed);
        bed.machine(2).counted("fetched_bytes") > 1_000_000
    })
    .unwrap();
}

/// Without a store, programs send bytes inline. Once the next agent runs, they leave bytes in its store again.
#[test]
fn programs_outlive_their_agent_and_use_the_next() {
    let mut bed = Bed::of(3, Limits::default());
    let tiers = chain(&bed, [true; 3], "sendfile off;", "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    for (turn, signal) in [Signal::TERM, Signal::KILL].into_iter().enumerate() {
        load(tiers[0].address, 50, 10 * turn as u64);
        for index in 0..3 {
            bed.machine_mut(index).end_agent(signal);
        }
        // Programs ask for a store again within this time, and there is none: the next load begins without one.
        std::thread::sleep(Duration::from_secs(3));
        load(tiers[0].address, 50, 100 + turn as u64);
        for index in 0..3 {
            bed.machine_mut(index).start_agent();
        }
        until_store_is_used(&bed, &tiers, 200 + turn as u64, &format!("{signal:?}"));
    }
}

/// `shuntd --check` prints the store's name (a hash of the agent's name). Another agent logs this name if none of its
/// peers has this store.
#[test]
fn an_agent_that_is_checked_says_which_store_it_has() {
    let bed = Bed::new(Limits::default());
    let said = bed.machine(0).checked();
    assert!(said.contains(&format!("store    {:?}", Holder::named("m0"))), "{said}");
}

/// The agents become the user `daemon` after their start. They do everything that needs root's privileges before that.
#[test]
fn agents_that_are_not_root_keep_bodies_and_begin_again() {
    let mut bed = Bed::of_user(3, Limits::default(), "daemon");
    let tiers = chain(&bed, [true; 3], "sendfile off;", "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    for turn in 0..2 {
        until_store_is_used(&bed, &tiers, 10 * turn, &format!("turn {turn}"));
        for index in 0..3 {
            bed.machine_mut(index).end_agent(Signal::TERM);
            bed.machine_mut(index).start_agent();
        }
    }
}

/// User ID of a user (Debian's `games`) that is in no agent's list `users` here.
const GAMES: &str = "5";

/// Makes an empty directory of this name, to be a root directory.
fn empty(bed: &Bed, name: &str) -> String {
    let root = bed.path().join(name);
    std::fs::create_dir(&root).unwrap();
    root.to_str().unwrap().to_owned()
}

/// Waits for a line on standard input. Then changes the root directory and the user to those that its arguments name.
/// Runs before [`LOOKS`].
const MOVES: &str = "
import os, socket, sys
root, user = sys.argv[2], int(sys.argv[3])
print('started', flush=True)
sys.stdin.readline()
if root: os.chroot(root); os.chdir('/')
if user: os.setgid(user); os.setuid(user)
";

/// Runs a program that runs the code `first` and [`MOVES`], and looks at all bytes that it is sent. Calls `meanwhile`
/// before the program changes its root directory and user. Returns how many bytes the sender's store has given so far.
fn moved(bed: &mut Bed, first: &str, root: &str, user: &str, meanwhile: impl FnOnce(&mut Bed)) -> u64 {
    let port = free_address().port().to_string();
    let mut moves = Talking::start(bed.machine(0), &format!("{first}{MOVES}{LOOKS}"), &[&port, root, user]);
    moves.says("started");
    meanwhile(bed);
    let mut sends = Talking::start(bed.machine(1), SENDS, &[&port]);
    sends.says("listening");
    moves.told("go");
    sends.says("sent");
    moves.says("received");
    moves.looks_at_all();
    bed.machine(1).counted("fetched_bytes")
}

/// Connects, becomes another user, runs further code (if the test adds some), and then receives what the sender sends.
const BECOMES: &str = "
import os, signal, socket, sys
sock = socket.socket()
sock.connect(('127.0.0.1', int(sys.argv[1])))
socket.socket.connect = lambda *_: None
socket.socket.sendall, says = lambda *_: None, socket.socket.sendall
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
def becomes():
    says(sock, b'go')
    return sock
socket.socket = becomes
";

/// Runs a program that makes a connection as root, and then becomes a user that is in no list of the agent. It must
/// still be able to fetch the bytes that come on this connection. Returns how many bytes were fetched.
fn became(bed: &Bed, more: &str) -> u64 {
    let port = free_address().port().to_string();
    let mut sends = Talking::start(bed.machine(1), SENDS, &[&port]);
    sends.says("listening");
    let mut becomes = Talking::start(bed.machine(0), &format!("{BECOMES}{more}{LOOKS}"), &[&port, GAMES]);
    sends.says("sent");
    becomes.says("received");
    becomes.looks_at_all();
    bed.machine(1).counted("fetched_bytes")
}

#[test]
fn a_process_that_becomes_an_unlisted_user_still_fetches() {
    let bed = Bed::of(2, Limits::default());
    let fetched = became(&bed, "");
    assert!(fetched >= 380_000, "{fetched}");
}

/// The program could fetch, but its user is in no list of its agent. So its new connections do not say that it is under
/// `shunt run`.
#[test]
fn a_process_of_an_unlisted_user_gets_bytes() {
    const CONNECTS: &str = "
import socket
server = socket.create_server(('127.0.0.1', 0))
first = socket.create_connection(server.getsockname())
";
    let mut bed = Bed::of(2, Limits::default());
    let root = empty(&bed, "games");
    for root in ["", root.as_str()] {
        assert_eq!(moved(&mut bed, CONNECTS, root, GAMES, |_| ()), 0);
    }
}

/// Takes as many connections to a store as it gets, and then closes as many as it is told to.
const FILLS: &str = "
import resource, socket, struct, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
HELLO, held = 1, []
while True:
    store = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store.connect(sys.argv[1])
    try:
        store.send(struct.pack('<I', HELLO).ljust(32, bytes(1)))
        if not store.recv(1000): break
    except (BrokenPipeError, ConnectionResetError):
        break
    held.append(store)
print(len(held), flush=True)
for line in sys.stdin:
    for _ in range(int(line)): held.pop().close()
    print('fewer', flush=True)
";

/// A signal may interrupt the library while it checks whether a connection to the store is still open. The library must
/// not take the connection for closed because of that.
#[test]
fn a_process_that_becomes_an_unlisted_user_fetches_though_signals_come() {
    const SIGNALS: &str = "
import _socket
server = _socket.socket()
server.bind(('127.0.0.1', 0))
server.listen()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 50e-6, 50e-6)
for _ in range(3000):
    client = _socket.socket()
    client.connect(server.getsockname())
    client.close()
    os.close(server._accept()[0])
signal.setitimer(signal.ITIMER_REAL, 0)
";
    let bed = Bed::of(2, Limits::default());
    let fetched = became(&bed, SIGNALS);
    assert!(fetched >= 380_000, "{fetched}");
}

/// Another process has taken nearly all connections to the store that a user may have. A program that gets a first
/// connection, but none by which to fetch, is sent no references.
#[test]
fn a_program_of_a_user_who_has_too_many_gets_the_bytes() {
    for free in 0..4 {
        let mut bed = Bed::of(2, Limits::default());
        let path = bed.path().join("m0.store");
        let mut fills = None;
        moved(&mut bed, "", "", "0", |_| {
            let program = Talking::unshunted(FILLS, &[path.to_str().unwrap()]);
            let fills = fills.insert(program);
            let held: usize = fills.says_something().parse().unwrap();
            assert!(held > Limits::default().programs_of_a_user / 2, "{held}");
            fills.told(&free.to_string());
            fills.says("fewer");
        });
    }
}

/// A program that changes its root directory, as HAProxy does with Debian's configuration, can still fetch.
#[test]
fn a_process_in_another_root_directory_fetches() {
    let mut bed = Bed::of(2, Limits::default());
    for (turn, user) in ["0", "65534"].into_iter().enumerate() {
        let root = empty(&bed, user);
        let fetched = moved(&mut bed, "", &root, user, |_| ());
        assert!(fetched >= 380_000 * (turn as u64 + 1), "{fetched}");
    }
    assert!(bed.machine(0).program_counted("python3", "received_absent") >= 760_000, "counted by its name");
}

/// The program has closed the entrance's descriptor, and its own socket got the number. The library must not take this
/// socket for the entrance.
#[test]
fn a_process_that_has_closed_the_entrance_gets_bytes_and_no_message() {
    const REPLACES: &str = "
import os, re, socket, sys, threading
if len(sys.argv) == 4:
    entrance = int(re.search('entrance=([0-9]+)', os.environ['SHUNT_ODB'])[1])
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.set_inheritable(True)
    arguments = sys.orig_argv + [str(other.fileno())]
    places = [(os.POSIX_SPAWN_DUP2, own.fileno(), entrance)]
    child = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=places)
    os._exit(os.waitpid(child, 0)[1] != 0)
other = socket.socket(fileno=int(sys.argv[4]))
def tells():
    other.recv(1000)
    print('got a message', flush=True)
threading.Thread(target=tells, daemon=True).start()
";
    let mut bed = Bed::of(2, Limits::default());
    let root = empty(&bed, "empty");
    assert_eq!(moved(&mut bed, REPLACES, &root, "0", |_| ()), 0);
}

/// The agent to which the program's entrance led has ended, and the program cannot find the next agent's socket.
#[test]
fn a_process_that_has_lost_its_store_gets_bytes() {
    let mut bed = Bed::of(2, Limits::default());
    let root = empty(&bed, "empty");
    let again = |bed: &mut Bed| {
        bed.machine_mut(0).end_agent(Signal::TERM);
        bed.machine_mut(0).start_agent();
    };
    assert_eq!(moved(&mut bed, "", &root, "65534", again), 0);
}

/// The program cannot fetch, so it is sent no references.
#[test]
fn a_reader_who_is_in_no_list_gets_the_bytes() {
    let mut bed = Bed::of(2, Limits::default());
    let root = empty(&bed, "games");
    for root in ["", root.as_str()] {
        assert_eq!(moved(&mut bed, "", root, GAMES, |_| ()), 0);
    }
    assert!(bed.machine(0).counted("refused") > 0, "it asked");
}
