//! Programs that are executed by programs under `shunt run`, but into which the library is not loaded. Listeners that
//! they inherit must work as without Shunt.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use shunt_odb::store::Limits;

use crate::actors::built;
use crate::bed::{Bed, CONNECTS, Program, free_address};

/// Listens, and executes another program that accepts the connections.
const HANDS_ON: &str = "
import os, socket, subprocess, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
program, how = sys.argv[2:]
# Under another number, as spawners do it: the first one stays here.
number = os.dup2(listener.fileno(), 50)
arguments = [program, str(number)]
if how == 'execv':
    os.execv(program, arguments)
elif how == 'execvp':
    os.environ['PATH'] = '/nowhere:' + os.path.dirname(program)
    os.execvp(os.path.basename(program), arguments)
elif how == 'fexecve':
    os.execve(os.open(program, os.O_PATH), arguments, os.environ)
elif how == 'posix_spawn':
    os.waitpid(os.posix_spawn(program, arguments, os.environ), 0)
else:
    child = subprocess.Popen(arguments, close_fds=False)
    sys.exit(child.wait())
";

const TALKS: &str = "
for turn in range(3):
    sent = bytes(range(turn, 256)) * 1000
    sock.settimeout(60)
    sock.sendall(sent)
    sock.shutdown(socket.SHUT_WR)
    got = b''
    while part := sock.recv(100_000):
        got += part
    # Not the same bytes: whoever gives back frames has framed what it sends, too.
    assert got == bytes(255 - byte for byte in sent), (len(got), len(sent), got[:20])
    sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
";

#[test]
fn clients_of_a_static_program_get_plain_bytes() {
    let bed = Bed::new(Limits::default());
    let program = built(&bed.path(), "static.c", "static", "gcc", &["-static", "-O1", "-Wall"]);
    for how in ["execv", "execvp", "fexecve", "posix_spawn", "subprocess"] {
        let port = free_address().port().to_string();
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", HANDS_ON, &port]).arg(&program).arg(how);
        // `listens` may have a child, which is not the test's own. That child ends with the test's control group.
        let mut listens = Program(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
        // Waits until the other program runs. A connection that comes earlier is still negotiated as one of a program
        // under `shunt run`.
        let mut ready = String::new();
        BufReader::new(listens.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n", "{how}");
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", &format!("{CONNECTS}{TALKS}"), &port]).stdin(Stdio::null());
        let talked = Program(command.spawn().unwrap()).0.wait().unwrap();
        assert!(talked.success(), "{how}: {talked}");
    }
}
