//! Handoffs on TLS connections, on which another machine then sends bytes to the client. That machine gets the keys for
//! the bytes with the handoff ([`crate::tls`]), and *seals* (encrypts) the bytes. *Absent* bytes are those for which
//! the program's memory only stands. A *run* is absent bytes in a row that one machine has.

use std::os::fd::RawFd;

use shunt_odb::absent::Piece;
use shunt_odb::store::usage::Counted;
use shunt_sys::erase::Erased;
use shunt_wire::local::Tls;

use super::handing::{REGION_MAX, bytes, is_long};
use super::handings::Handings;
use super::{may_be_client, prepare, unsent};
use crate::connections::runtime::Runtime;
use crate::system::counts::count;
use crate::system::kernel::borrow;

/// Answer to the question whether, and when, a run of absent bytes may be handed off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    Now,
    /// Now, as a part of a handoff that has begun since the program last waited for events. The run is sealed under
    /// that handoff's keys.
    Grows,
    /// Once the bytes that were written before the run have left.
    Later,
    Never,
}

/// A client's connection: the descriptor that is written to, and the socket's cookie (SO_COOKIE).
#[derive(Clone, Copy)]
pub struct Client {
    pub fd: RawFd,
    cookie: u64,
}

impl Client {
    /// Returns `None` if no other machine can send on the connection.
    pub fn of(fd: RawFd) -> Option<Self> {
        if fd < 0 || !may_be_client(fd) {
            return None;
        }
        let cookie = rustix::net::sockopt::socket_cookie(borrow(fd)).ok()?;
        Some(Self { fd, cookie })
    }

    /// Returns whether a run of absent bytes may be handed off: at once or later, in a new handoff or in the one that
    /// has begun on the connection.
    pub fn turn(self, runtime: &'static Runtime, run: &[Piece]) -> Turn {
        super::lock().turn(runtime, self, run)
    }
}

/// Whether anything can be handed off now: there is a connection to the agent, and no other thread uses it.
pub fn can_begin(runtime: &'static Runtime) -> bool {
    super::try_lock().is_some_and(|mut handings| handings.connect(runtime))
}

/// Orders the holder of a run of absent bytes to seal and send them. With `keys`, a handoff begins under these keys.
/// Without, the run is added to the handoff that has begun on the connection. `go_on` gets the handoff's keys and the
/// number of payload bytes under them, and returns whether the connection can continue.
pub fn seal(
    runtime: &'static Runtime,
    Client { fd, cookie }: Client,
    run: &[Piece],
    keys: Option<Erased<Tls>>,
    go_on: impl FnOnce(&Tls, u64) -> bool,
) -> Turn {
    let mut handings = super::lock();
    let begins = keys.is_some();
    let at = match keys {
        Some(_) => handings.begin(runtime, fd, cookie, run, keys),
        None => handings.begun_on(cookie).filter(|at| handings.begun(*at).is_sealed && handings.grow(*at, fd, run)),
    };
    let Some(at) = at else {
        // A handoff is possible later if written bytes have not left yet. It also is if another handoff is under way,
        // which cannot grow because the agent has been told of it.
        return if unsent(fd) || handings.is_under_way(cookie) { Turn::Later } else { Turn::Never };
    };
    let handing = handings.begun(at);
    if !handing.keys.as_ref().is_some_and(|keys| go_on(keys, handing.message.length)) {
        handings.give_up(at);
    } else if begins {
        handings.tell_if_waits(fd, 0);
    }
    drop(handings);
    count(Counted::HandedOff, bytes(run) as usize);
    runtime.memory.return_shares();
    Turn::Now
}

impl Handings {
    fn turn(&mut self, runtime: &Runtime, Client { fd, cookie }: Client, run: &[Piece]) -> Turn {
        self.settle();
        if let Some(at) = self.begun_on(cookie) {
            let begun = self.begun(at);
            return if begun.is_sealed && begun.can_take(run) { Turn::Grows } else { Turn::Later };
        }
        if !is_long(run) || bytes(run) > REGION_MAX || !self.sends(runtime, fd, run) {
            return Turn::Never;
        }
        prepare(fd);
        if self.is_under_way(cookie) || unsent(fd) { Turn::Later } else { Turn::Now }
    }
}
