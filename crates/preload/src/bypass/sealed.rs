//! Handoffs on TLS connections: under keys that are given away with them ([`crate::tls`]).

use std::os::fd::RawFd;

use shunt_odb::absent::Piece;
use shunt_odb::store::usage::Counted;
use shunt_sys::erase::Erased;
use shunt_wire::local::Tls;

use super::handing::{REGION_MAX, bytes};
use super::handings::Handings;
use super::{LONG, may_be_client, prepare, unsent};
use crate::counts::count;
use crate::descriptors::borrow;
use crate::runtime::Runtime;

/// When something may be handed off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    Now,
    /// When what is before it has left.
    Later,
    Never,
}

/// Whether anything can be handed off at all.
pub fn can_begin(runtime: &'static Runtime) -> bool {
    runtime.bypass.handings.try_lock().is_ok_and(|mut handings| handings.connect(runtime))
}

/// Whether a run of absent bytes may go out on a connection, behind what has begun there or by itself.
pub fn turn(runtime: &'static Runtime, fd: RawFd, run: &[Piece]) -> Turn {
    let cookie = rustix::net::sockopt::socket_cookie(borrow(fd));
    let Some(cookie) = cookie.ok().filter(|_| may_be_client(fd)) else { return Turn::Never };
    runtime.bypass.lock().turn(runtime, fd, cookie, run)
}

/// Whether a handoff under keys that were given away in this turn may grow.
pub fn is_growing(runtime: &'static Runtime, fd: RawFd) -> bool {
    let cookie = rustix::net::sockopt::socket_cookie(borrow(fd));
    cookie.is_ok_and(|cookie| runtime.bypass.lock().begun_on(cookie).is_some())
}

/// Has the holder of a run of absent bytes seal and send them: under keys that are given away now; without keys, behind what
/// has begun under some. `go_on` is told how much is under these keys now, and says whether the connection can go on.
pub fn seal(
    runtime: &'static Runtime,
    fd: RawFd,
    run: &[Piece],
    keys: Option<Erased<Tls>>,
    go_on: impl FnOnce(&Tls, u64) -> bool,
) -> Turn {
    let Ok(cookie) = rustix::net::sockopt::socket_cookie(borrow(fd)) else { return Turn::Never };
    let mut handings = runtime.bypass.lock();
    let at = match keys {
        Some(_) => handings.begin(runtime, fd, cookie, run, keys),
        None => handings.begun_on(cookie).filter(|at| handings.begun(*at).is_sealed && handings.grow(*at, fd, run)),
    };
    let Some(at) = at else { return if unsent(fd) { Turn::Later } else { Turn::Never } };
    let handing = handings.begun(at);
    if handing.keys.as_ref().is_some_and(|keys| go_on(keys, handing.message.length)) {
        handings.tell_if_waits(fd, 0);
    } else {
        handings.give_up(at);
    }
    drop(handings);
    count(Counted::HandedOff, bytes(run) as usize);
    runtime.memory.return_shares();
    Turn::Now
}

impl Handings {
    fn turn(&mut self, runtime: &Runtime, fd: RawFd, cookie: u64, run: &[Piece]) -> Turn {
        self.settle();
        let Some(first) = run.first() else { return Turn::Never };
        if let Some(at) = self.begun_on(cookie) {
            let begun = self.begun(at);
            return if begun.is_sealed && begun.can_take(run) { Turn::Now } else { Turn::Later };
        }
        let is_long = bytes(run) >= LONG || run.iter().any(|piece| piece.hold.of_bytes() >= LONG);
        if !is_long || bytes(run) > REGION_MAX || !self.sends(runtime, first.hold.payload().holder) {
            return Turn::Never;
        }
        prepare(fd);
        if self.is_under_way(cookie) || unsent(fd) { Turn::Later } else { Turn::Now }
    }
}
