//! Calls that fail on a connection between two programs under `shunt run`. After that, the connection works as before.

use std::process::Stdio;

use shunt_odb::store::Limits;

use crate::bed::{Bed, CONNECTS, Program, free_address};

const SERVES: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
sock = listener.accept()[0]
while got := sock.recv(65536):
    sock.sendall(got)
";

const ASKS: &str = "
import errno
def echo():
    sock.sendall(b'x' * 50000)
    got = 0
    while got < 50000:
        some = sock.recv(65536)
        assert some.strip(b'x') == b'', 'other bytes'
        got += len(some)
def refuses(call, error):
    try:
        call()
    except OSError as refused:
        assert refused.errno == error, refused
        return
    raise SystemExit('it is not refused')
TCP_ULP, SO_ZEROCOPY = 31, 60
echo()
# A protocol between the program and TCP would take frames for its own bytes: as on a kernel that has none.
refuses(lambda: sock.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b'tls'), errno.ENOENT)
refuses(lambda: sock.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b'mptcp'), errno.ENOENT)
refuses(lambda: sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1), errno.EOPNOTSUPP)
refuses(lambda: sock.send(b'x', socket.MSG_OOB), errno.EOPNOTSUPP)
echo()
";

#[test]
fn calls_that_frames_do_not_allow_are_refused_and_cost_no_byte() {
    let bed = Bed::new(Limits::default());
    let port = free_address().port().to_string();
    let start = |script: &str| {
        let mut command = bed.under_shunt("python3");
        command.args(["-B", "-c", script, &port]).stdin(Stdio::null());
        Program(command.spawn().unwrap())
    };
    let _serves = start(SERVES);
    let asked = start(&format!("{CONNECTS}{ASKS}")).0.wait().unwrap();
    assert!(asked.success(), "{asked}");
}
