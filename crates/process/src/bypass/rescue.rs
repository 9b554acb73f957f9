//! A handoff that nobody sends. Where not a byte of it was sent, its bytes are fetched and written after all, and whoever
//! writes on waits for that; else its client has a part of it, and the connection ends, as by a network that fails.

use std::collections::BTreeSet;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_odb::link::is_refusal;
use shunt_odb::reference::Reference;
use shunt_odb::store::usage::Counted;
use shunt_sys::odb;

use super::handing::Failed;
use crate::connections::runtime::Runtime;
use crate::system::counts::count;
use crate::system::inside::{Inside, Lock, outside};
use crate::system::kernel::borrow;
use crate::system::kernel::{self, own};
use crate::system::ranks::Rank;
use crate::system::threads;

/// How long a client may take nothing of it.
const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
const AT_ONCE: u64 = 256 << 10;

/// Descriptors where one is under way: nearly always, there are none.
static RESCUES: AtomicUsize = AtomicUsize::new(0);
static UNDER_WAY: Lock<BTreeSet<RawFd>> = Lock::new(Rank::Rescues, BTreeSet::new());

#[inline]
pub fn any() -> bool {
    RESCUES.load(Ordering::Acquire) > 0
}

#[cold]
pub fn wait(fd: RawFd) {
    let Some(_inside) = Inside::enter() else { return };
    let is_under_way = || UNDER_WAY.lock().contains(&fd);
    while is_under_way() {
        outside(|| std::thread::sleep(Duration::from_millis(1)));
    }
}

/// A descriptor's, until it is dropped.
struct UnderWay(RawFd);

impl UnderWay {
    fn new(fd: RawFd) -> Self {
        UNDER_WAY.lock().insert(fd);
        RESCUES.fetch_add(1, Ordering::Release);
        Self(fd)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.lock().remove(&self.0);
        RESCUES.fetch_sub(1, Ordering::Release);
    }
}

/// Does what is left to do, in a thread of its own: it may take as long as its client does.
pub fn start(runtime: &'static Runtime, failed: Failed) {
    let Some(connection) = connection(&failed) else {
        return super::lock().cancel(failed.handing.message.handoff);
    };
    let under_way = UnderWay::new(failed.handing.fd);
    let handoff = failed.handing.message.handoff;
    if failed.handing.is_sealed || !is_refusal(failed.reason) || odb::undo(&connection, handoff).is_err() {
        return reset(&connection);
    }
    count(Counted::TakenBack, failed.handing.message.length as usize);
    let copy = rustix::io::fcntl_dupfd_cloexec(&connection, 512);
    let started = threads::start("shunt-rescue", move || {
        let _under_way = under_way;
        if write_all(runtime, &connection, &failed).is_none() {
            reset(&connection);
        }
    });
    if !started && let Ok(copy) = copy {
        reset(&copy);
    }
}

/// A copy of its descriptor, if that is its connection's still.
fn connection(failed: &Failed) -> Option<OwnedFd> {
    let copy = rustix::io::fcntl_dupfd_cloexec(borrow(failed.handing.fd), 512).ok()?;
    let cookie = rustix::net::sockopt::socket_cookie(&copy).ok()?;
    (cookie == failed.handing.cookie).then_some(copy)
}

fn reset(connection: &OwnedFd) {
    let _ = odb::cancel(connection);
    let _ = odb::disconnect(connection);
}

/// `None`: it cannot be had, or the client takes no more.
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
    use std::os::fd::AsRawFd;
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
