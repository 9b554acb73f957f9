//! A store for tests, and a substitute for its agent. A *store* has the payloads (bodies) of a machine's programs, and
//! is the *holder* of these payloads. A *share* is a part of the right to fetch a payload. A *wish* is a program's
//! request for a connection to another machine's store.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use shunt_odb::records::Sealing;
use shunt_odb::reference::{Holder, REFERENCE_BYTES, Reference};
use shunt_odb::sources::Known;
use shunt_odb::store::Limits;
use shunt_odb::store::caller::Caller;
use shunt_odb::store::client::Connection;
use shunt_odb::store::pinned::Shelf;
use shunt_odb::store::server::{Agent, Counters, Orders, Server};
use shunt_odb::store::usage::Usage;
use shunt_sys::lock::Mutex;
use zerocopy::{FromZeros, IntoBytes};

/// A store that runs in its own thread.
pub struct Bed {
    pub dir: tempfile::TempDir,
    pub orders: Orders,
    pub counters: Arc<Counters>,
    /// User as whom the store admits programs.
    pub user: Arc<Mutex<u32>>,
    pub wishes: mpsc::Receiver<(u64, Holder)>,
    pub usage: Arc<Mutex<Usage>>,
    pub shelf: Shelf,
    pub known: Mutex<Known>,
}

/// Stands for the agent: says who may connect, and tells the test which stores programs want to reach.
struct Door {
    user: Arc<Mutex<u32>>,
    wishes: mpsc::Sender<(u64, Holder)>,
}

/// User whose programs are not admitted.
pub const STRANGER: u32 = u32::MAX;

impl Agent for Door {
    fn admit(&mut self, _: &OwnedFd) -> Option<Caller> {
        let user = *self.user.lock();
        (user != STRANGER).then_some(Caller { user, group: user, process: 77 })
    }

    fn reach(&mut self, program: u64, holder: Holder) {
        self.wishes.send((program, holder)).unwrap();
    }

    fn hand_off(&mut self, _: u64, _: Caller) {
        unreachable!("nobody here has clients");
    }
}

impl Bed {
    pub fn new(limits: Limits) -> Self {
        Self::named("m0", limits)
    }

    pub fn named(name: &str, limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let programs = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&programs, &SocketAddrUnix::new(dir.path().join("store")).unwrap()).unwrap();
        listen(&programs, 16).unwrap();
        let user = Arc::new(Mutex::new(1000));
        let (give, wishes) = mpsc::channel();
        let door = Door { user: Arc::clone(&user), wishes: give };
        let (server, orders, known) = Server::new(limits, programs, Holder::named(name), door).unwrap();
        let (counters, usage, shelf) = (server.counters(), server.usage(), server.shelf());
        std::thread::spawn(move || server.run().unwrap());
        Self { dir, orders, counters, user, wishes, usage, shelf, known: Mutex::new(known) }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    pub fn program(&self) -> Connection {
        Connection::open(&self.path()).unwrap()
    }

    /// Answers the wish of the program with this number for a connection to a holder. The program gets one end of a new
    /// pair of sockets, and the other is returned.
    pub fn connects(&self, program: u64, holder: Holder) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.orders.reached(program, holder, Some((ours.into(), Sealing::new_zeroed())));
        theirs
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.orders.stop();
    }
}

/// Number of bytes that a holder has sent, and number of shares that it has got back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    pub bytes: usize,
    pub returns: usize,
}

/// Answers requests for bytes of `body` as a slow holder: 10,000 bytes every 10 ms. Stops when `most` bytes or more
/// were sent.
pub fn give_slowly(store: &mut UnixStream, body: &[u8], most: usize) -> Given {
    give(store, body, most, 10_000)
}

/// Length of a request in bytes: kind and zeros (8), reference, and report on the payload's bytes that were needed
/// (16).
const REQUEST_BYTES: usize = 8 + REFERENCE_BYTES + 16;

/// Answers requests for bytes of `body`, `at_a_time` bytes every 10 ms. Stops when `most` bytes or more were sent.
pub fn give(store: &mut UnixStream, body: &[u8], most: usize, at_a_time: usize) -> Given {
    const FETCH: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];
    let (mut request, mut given) = ([0; REQUEST_BYTES], Given::default());
    while store.read_exact(&mut request).is_ok() {
        // Shares that go back have no answer.
        if request[..8] != FETCH {
            given.returns += 1;
            continue;
        }
        let asked = Reference::parse(request[8..][..REFERENCE_BYTES].try_into().unwrap()).unwrap();
        let answer = [&[1, 0, 0, 0, 0, 0, 0, 0][..], asked.length.to_le_bytes().as_bytes()].concat();
        store.write_all(&answer).unwrap();
        for part in body[asked.offset as usize..][..asked.length as usize].chunks(at_a_time) {
            if given.bytes >= most {
                return given;
            }
            std::thread::sleep(Duration::from_millis(10));
            if store.write_all(part).is_err() {
                return given;
            }
            given.bytes += part.len();
        }
    }
    given
}
