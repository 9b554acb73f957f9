//! A machine outside the service says in its handshakes that its program is under `shunt run`, and sends frames. A
//! *reference* goes over a connection in place of bytes. The receiver fetches these bytes from the sender's machine if
//! it needs them.

use std::fs;
use std::process::Command;

use shunt_negotiation::{LOOPBACK, Negotiation};
use shunt_odb::frame::PREAMBLE;
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_odb::store::Limits;

use crate::bed::{Bed, free_address};
use crate::stores::Talking;

/// Listens, and prints the bytes that it gets, and how its connection ends.
const SAYS: &str = "
import signal, socket, sys
signal.alarm(60)
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
sock = listener.accept()[0]
got = b''
try:
    while part := sock.recv(1 << 16):
        got += part
        sock.sendall(b'answer')
except ConnectionResetError:
    got += b'reset'
print(got.hex(), flush=True)
";

/// Marks its connection as one of a program under `shunt run` (SHUNT_SPEAK in include/shunt.h). Then sends the bytes
/// that it is given, and prints what it gets.
const STRANGER: &str = "
import signal, socket, sys
signal.alarm(60)
sock = socket.socket()
sock.setsockopt(0x53485554, 16, 1)
sock.connect(('127.0.0.1', int(sys.argv[1])))
sock.sendall(bytes.fromhex(sys.argv[2]))
print(sock.recv(1000)[:6].hex(), flush=True)
sock.close()
";

/// Returns a connection's preamble, and a frame with one reference, to a payload that nobody has.
fn frames() -> Vec<u8> {
    const REFERENCE: u8 = 2;
    let payload = PayloadId { holder: Holder::named("nobody"), segment: 7, slot: 7, secret: 7 };
    let reference = Reference { payload, weight: Weight::WHOLE, offset: 0, length: 1 << 20 }.emit();
    let counts = [1];
    let header = [REFERENCE, 0, 0, 0, reference.len() as u8 + 1, 0, 0, 0];
    [&PREAMBLE[..], &header, &reference, &counts].concat()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lets a stranger whose handshake is made with this key talk to a program under `shunt run`. Returns what the program
/// got, and what the stranger got.
fn said(bed: &Bed, key: [u8; 16]) -> (String, String) {
    let group = bed.machine(0).group_beside("stranger");
    fs::create_dir(&group).unwrap();
    let negotiation = Negotiation::attach(&group).unwrap();
    negotiation.ends().set(LOOPBACK, &key).unwrap();
    let port = free_address().port().to_string();
    let mut says = Talking::start(bed.machine(0), SAYS, &[&port]);
    says.says("listening");
    let mut command = Command::new("python3");
    shunt_sys::cgroup::start_in(&mut command, &group).unwrap();
    let mut stranger = Talking::run(command, STRANGER, &[&port, &hex(&frames())]);
    let told = stranger.says_something();
    let got = says.says_something();
    drop((stranger, says));
    shunt_testbed::wait_for("the control group is empty", || Ok(fs::remove_dir(&group)?)).unwrap();
    (got, told)
}

#[test]
fn frames_of_a_stranger_are_bytes_like_any_other() {
    let bed = Bed::new(Limits::default());
    assert_eq!(said(&bed, [1; 16]), (hex(&frames()), hex(b"answer")));
    // With the right key, the same bytes are taken for frames. The program then breaks the connection, because nobody
    // has the payload of the reference. So the first stranger's frames were ordinary bytes only because of the key.
    let (got, told) = said(&bed, *crate::bed::SHARED_KEY);
    assert_eq!((got, told), (hex(b"reset"), String::new()));
}
