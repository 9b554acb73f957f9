//! Rescue of a handoff that nobody sends. If not a byte of the handoff was sent, its bytes are fetched and written
//! after all, and further writes wait for that. If the client may have a part of the bytes, the connection is reset, as
//! if the network had failed. So is every TLS connection. In a *handoff*, another machine sends bytes on the connection
//! of one of this program's clients.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_odb::link::is_refusal;
use shunt_odb::reference::Reference;
use shunt_odb::store::usage::Counted;
use shunt_sys::odb;

use super::handing::Failed;
use crate::connections::runtime::Runtime;
use crate::connections::waiting::{announce_room, waits};
use crate::system::counts::count;
use crate::system::inside::{Held, Inside, Lock, outside};
use crate::system::kernel::{self, borrow, own};
use crate::system::ranks::Rank;
use crate::system::threads;

/// Longest time for which a client may take none of a rescue's bytes before its connection is reset.
const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
const AT_ONCE: u64 = 256 << 10;

/// Number of connections where a rescue is under way. It is nearly always 0.
static RESCUES: AtomicUsize = AtomicUsize::new(0);
/// Cookies (SO_COOKIE) of the connections where a rescue is under way. Descriptors cannot be used for this: a program
/// may close one and get its number again, or have several for one connection.
static UNDER_WAY: Lock<BTreeSet<u64>> = Lock::new(Rank::Rescues, BTreeSet::new());

#[inline]
pub fn any() -> bool {
    RESCUES.load(Ordering::Acquire) > 0
}

/// Whether a rescue is under way on a descriptor's connection. If the program's call may wait, waits for the rescue's
/// end and returns false ([`super::is_full_of_rescue`]).
#[cold]
pub fn is_full(fd: RawFd, flags: i32) -> bool {
    let Some(_inside) = Inside::enter() else { return false };
    let Ok(cookie) = rustix::net::sockopt::socket_cookie(borrow(fd)) else { return false };
    let is_under_way = || UNDER_WAY.lock().contains(&cookie);
    while is_under_way() {
        if !waits(fd, flags) {
            return true;
        }
        outside(|| std::thread::sleep(Duration::from_millis(1)));
    }
    false
}

/// Marks a connection as being rescued, until this value is dropped.
struct UnderWay(u64);

impl UnderWay {
    fn new(cookie: u64) -> Self {
        UNDER_WAY.lock().insert(cookie);
        RESCUES.fetch_add(1, Ordering::Release);
        Self(cookie)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.lock().remove(&self.0);
        RESCUES.fetch_sub(1, Ordering::Release);
    }
}

/// Holds the lock for a fork: no rescue begins or ends until the value is dropped.
pub fn hold_still() -> Held<'static, BTreeSet<u64>> {
    UNDER_WAY.lock()
}

/// Forgets all rescues in the child of a fork: the parent's threads do them.
pub fn forget(under_way: &mut BTreeSet<u64>) {
    under_way.clear();
    RESCUES.store(0, Ordering::Release);
}

/// Rescues a failed handoff: takes it back and writes its bytes, or resets the connection. If the program no longer has
/// the connection, the agent is told to cancel the handoff. A separate thread writes the bytes, because the client may
/// take them slowly.
pub fn start(runtime: &'static Runtime, failed: Failed) {
    let Some(connection) = connection(&failed) else {
        return super::lock().cancel(failed.handing.message.handoff);
    };
    let under_way = UnderWay::new(failed.handing.cookie);
    let handoff = failed.handing.message.handoff;
    if failed.handing.is_sealed || !is_refusal(failed.reason) || odb::undo(&connection, handoff).is_err() {
        return reset(&connection);
    }
    count(Counted::TakenBack, failed.handing.message.length as usize);
    let copy = rustix::io::fcntl_dupfd_cloexec(&connection, 512);
    let started = threads::start("shunt-rescue", move || {
        if write_all(runtime, &connection, &failed).is_none() {
            reset(&connection);
        }
        drop(under_way);
        announce_room(&connection);
    });
    if !started && let Ok(copy) = copy {
        reset(&copy);
    }
}

/// A copy of the handoff's descriptor, if the descriptor still leads to the handoff's connection.
fn connection(failed: &Failed) -> Option<OwnedFd> {
    let copy = rustix::io::fcntl_dupfd_cloexec(borrow(failed.handing.fd), 512).ok()?;
    let cookie = rustix::net::sockopt::socket_cookie(&copy).ok()?;
    (cookie == failed.handing.cookie).then_some(copy)
}

fn reset(connection: &OwnedFd) {
    let _ = odb::cancel(connection);
    let _ = odb::disconnect(connection);
}

/// Writes all bytes of the handoff. Returns `None` if they cannot be fetched, or the client takes no more.
fn write_all(runtime: &'static Runtime, connection: &OwnedFd, failed: &Failed) -> Option<()> {
    for reference in failed.handing.references() {
        let mut done = 0;
        while done < reference.length {
            let length = (reference.length - done).min(AT_ONCE);
            let mut bytes = runtime.memory.scratch.buffer(length as usize);
            let now = Reference { offset: reference.offset + done, length, ..reference };
            runtime.memory.holders.fetch(&now, &mut bytes).ok()?;
            write(connection, &mut bytes)?;
            done += length;
        }
    }
    Some(())
}

fn write(connection: &OwnedFd, mut bytes: &mut [u8]) -> Option<()> {
    while !bytes.is_empty() {
        match kernel::send(connection.as_raw_fd(), &own(bytes), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
            Ok(sent) => bytes = &mut bytes[sent..],
            Err(libc::EAGAIN) => {
                let mut wanted = [PollFd::new(connection, PollFlags::OUT)];
                if poll(&mut wanted, Some(&PATIENCE)) == Ok(0) {
                    return None;
                }
            }
            Err(libc::EINTR) => {}
            Err(_) => return None,
        }
    }
    Some(())
}
