//! Processes that change their user: they get the right bytes on their connections, and keep no access to the states of
//! the old user's other connections. Memory is *absent* if it stands for bytes of a store, and gets them when somebody
//! touches it.

use shunt_odb::store::Limits;

use crate::bed::Bed;
use crate::processes::{receive, well};

/// A body in which no two parts are equal, so that lost or repeated bytes show.
const BODY: &str = "
import array
BODY = array.array('I', range(100_000)).tobytes()
";

const SENDS: &str = "
sock.sendall(BODY)
assert some(5) == b'again'
sock.sendall(BODY[::-1])
sock.recv(1)
";

/// Functions for the reading program. `table` returns the inode and the owner of the memory that holds the states of
/// the process's connections. It asserts that the inherited descriptor and the mapping are of the same memory.
const READS: &str = "
def name(fd):
    try:
        return os.readlink('/proc/self/fd/' + fd)
    except OSError:
        return ''
def table():
    number = dict(field.split('=') for field in os.environ['SHUNT_ODB'].split(';'))['table']
    there = os.fstat(int(number))
    mapped = {line.split()[4] for line in open('/proc/self/maps') if 'shunt-connections' in line}
    global open_now
    open_now = {os.fstat(int(fd)).st_ino for fd in os.listdir('/proc/self/fd') if 'shunt-connections' in name(fd)}
    assert mapped == {str(there.st_ino)}, (mapped, there.st_ino)
    return there.st_ino, there.st_uid
def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
def some(count):
    parts = []
    while count:
        parts.append(sock.recv(count))
        assert parts[-1], 'an end before the end'
        count -= len(parts[-1])
    return b''.join(parts)
def is_next(at, count):
    assert some(count) == BODY[at:][:count]
def goes_on(asks=b'again'):
    sock.sendall(asks)
    assert some(400_000) == BODY[::-1]
";

/// Runs a program that sends [`BODY`] by references, and the program `text`, which reads it.
fn reads(text: &str) {
    let bed = Bed::new(Limits::default());
    let begins = format!("READS = {READS:?}\nexec(READS)\n{BODY}");
    let (sends, receives) = (format!("{begins}{SENDS}"), format!("{begins}{text}\nprint('same')\n"));
    well(&receive(&bed, &sends, &receives), "same\n");
}

#[test]
fn a_process_of_another_user_has_separate_memory_and_keeps_its_connections() {
    reads(
        "
first = some(123_457)
before = table()
assert before[1] == 0
become(65534)
after = table()
assert before[0] not in open_now and after[1] == 65534, (before, after, open_now)
assert first + some(400_000 - len(first)) == BODY
goes_on()
",
    );
}

#[test]
fn a_process_without_descriptors_can_become_another_users() {
    reads(
        "
import resource
first = some(123_457)
before = table()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
become(65534)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert first + some(400_000 - len(first)) == BODY
goes_on()
assert not [line for line in open('/proc/self/maps') if 'shunt-connections' in line]
for fd in os.listdir('/proc/self/fd'):
    try:
        assert os.fstat(int(fd)).st_ino != before[0]
    except OSError:
        pass
",
    );
}

/// With seteuid(2), a process can take its privileges back. So its memory for the states of connections still belongs
/// to the user with more privileges.
#[test]
fn a_user_that_is_put_on_for_a_while_changes_nothing() {
    reads(
        "
first = some(123_457)
before = table()
os.seteuid(65534)
second = some(123_457)
os.seteuid(0)
assert table() == before
assert first + second + some(400_000 - len(first + second)) == BODY
goes_on()
",
    );
}

#[test]
fn a_child_of_another_user_continues_and_so_does_its_parent_after_it() {
    reads(
        "
is_next(0, 123_457)
child = os.fork()
if child == 0:
    become(65534)
    is_next(123_457, 200_001)
    sock.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
is_next(323_458, 76_542)
goes_on()
",
    );
}

/// Processes of two users use the same connection, without passing it from one to the other. The second one that uses
/// it gets an error.
#[test]
fn the_second_of_two_users_of_a_connection_gets_an_error() {
    reads(
        "
first = some(123_457)
ready, done = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    become(65534)
    os.close(done[1])
    is_next(123_457, 1000)
    os.write(ready[1], b'1')
    os.read(done[0], 1)
    # The child's is whole, whatever its parent has tried.
    is_next(124_457, 1000)
    os._exit(0)
os.read(ready[0], 1)
for use in lambda: sock.recv(1000), lambda: sock.sendall(b'again'):
    try:
        use()
        sys.exit('the parent reads or writes what the child reads')
    except ConnectionResetError:
        pass
os.close(done[1])
assert os.waitpid(child, 0)[1] == 0
",
    );
}

/// A child process changes its user. With this change, the states of all its connections move to other memory, also the
/// state of the connection on which its parent waits.
#[test]
fn a_parent_that_waits_for_bytes_gets_them_though_its_child_becomes_another_users() {
    reads(
        "
import threading
assert some(400_000) == BODY
got = []
reader = threading.Thread(target=lambda: got.append(some(400_000)))
reader.start()
def waits():
    return open(f'/proc/self/task/{reader.native_id}/stat').read().rsplit(')')[1].split()[0] == 'S'
for turn in range(5):
    while not waits():
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        become(65534)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
sock.sendall(b'again')
reader.join()
assert got == [BODY[::-1]]
",
    );
}

/// A process passes its connection to a process of another user, and gets it back, as processes of a mail server do.
#[test]
fn a_connection_is_passed_to_another_users_process_and_back() {
    reads(
        "
here, there = socket.socketpair()
child = os.fork()
if child == 0:
    sock.close()
    become(65534)
    _, [number], _, _ = socket.recv_fds(there, 10, 1)
    sock = socket.socket(fileno=number)
    is_next(123_457, 200_001)
    sock.sendall(b'aga')
    socket.send_fds(there, [b'back'], [number])
    os._exit(0)
first = some(123_457)
socket.send_fds(here, [b'there'], [sock.fileno()])
_, [number], _, _ = socket.recv_fds(here, 10, 1)
sock.close()
sock = socket.socket(fileno=number)
assert os.waitpid(child, 0)[1] == 0
is_next(323_458, 76_542)
goes_on(b'in')
",
    );
}

#[test]
fn a_descriptor_that_is_taken_from_another_process_leads_to_the_connection() {
    reads(
        "
import ctypes
first = some(123_457)
child = os.fork()
if child == 0:
    number = sock.fileno()
    sock.close()
    copy = ctypes.CDLL(None).pidfd_getfd(os.pidfd_open(os.getppid()), number, 0)
    sock = socket.socket(fileno=copy)
    is_next(123_457, 200_001)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
is_next(323_458, 76_542)
goes_on()
",
    );
}

/// The library does not see a change of user that a program makes by system call number.
#[test]
fn a_program_of_another_user_does_not_take_what_it_inherits() {
    reads(
        "
assert some(400_000) == BODY
before = table()
import ctypes, subprocess
def become():
    ctypes.CDLL(None).syscall(117, 65534, 65534, 65534)
text = 'import os, sys' + READS + f'''
there = table()
assert there[1] == 65534 and {before[0]} not in open_now, (there, open_now)
'''
subprocess.run(['/usr/bin/python3', '-c', text], check=True, preexec_fn=become)
assert table() == before
goes_on()
",
    );
}

/// With a descriptor of its parent's absent memory (userfaultfd), a child could put bytes into that memory.
#[test]
fn a_child_has_no_descriptor_of_its_parents_memory() {
    reads(
        "
absent = bytearray(400_000)
view, at = memoryview(absent), 0
while at < len(absent):
    at += sock.recv_into(view[at:])
def memories():
    return [fd for fd in os.listdir('/proc/self/fd') if 'anon_inode:[userfaultfd]' in name(fd)]
assert len(memories()) == 1, memories()
child = os.fork()
if child == 0:
    os._exit(len(memories()))
assert os.waitpid(child, 0)[1] == 0
assert bytes(absent) == BODY
goes_on()
",
    );
}
