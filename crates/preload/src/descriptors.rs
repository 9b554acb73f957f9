//! Which of the process's descriptors lead to connections that both ends know to be between programs under Shunt.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use shunt_sys::odb;

use crate::runtime::Runtime;

/// Descriptors beyond have no entry: they are never marked, and a connection that is agreed on is refused there.
const DESCRIPTORS: usize = 1 << 20;

/// Not ours: all calls are the kernel's.
const FOREIGN: u32 = 0;
/// Marked before it connected; whether the other end speaks is not known yet.
const CONNECTING: u32 = 1;
/// Marked before it listened.
const LISTENING: u32 = 2;
/// From here on: the place of the connection's state.
const FIRST_PLACE: u32 = 3;

/// By descriptor. Zeros until touched: the kernel gives pages only for those that are in use.
static ENTRIES: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(FOREIGN) }; DESCRIPTORS];

fn entry(fd: RawFd) -> Option<&'static AtomicU32> {
    ENTRIES.get(usize::try_from(fd).ok()?)
}

/// Borrows a descriptor that the program has given in a call, for that call.
pub fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    debug_assert!(fd >= 0);
    // SAFETY: only used during the call that the program makes with it; a number that is closed meanwhile makes calls
    // fail, as they would without us.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// The place of the state of a connection between programs under Shunt. `None`: all calls are the kernel's.
#[inline]
pub fn place(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    match entry(fd)?.load(Ordering::Relaxed) {
        FOREIGN | LISTENING => None,
        CONNECTING => settle(runtime, fd),
        place => Some(place - FIRST_PLACE),
    }
}

/// Asks, once a connection is made, whether the other end speaks.
#[cold]
fn settle(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    let socket = borrow(fd);
    if odb::speaks(socket) {
        return adopt(runtime, fd, true);
    }
    if rustix::net::getpeername(socket).is_ok() {
        forget_entry(fd);
    }
    None
}

/// Enters a connection that is agreed on. `connected`: by this end, so that it frames what it sends.
fn adopt(runtime: &Runtime, fd: RawFd, connected: bool) -> Option<u32> {
    let socket = borrow(fd);
    let place = match runtime.connections.find(socket) {
        Some(place) => place,
        None => {
            let Ok(place) = runtime.connections.add(socket, connected) else {
                refuse(fd);
                return None;
            };
            place
        }
    };
    // A reference is a small segment for many bytes: one that waits for another's ACK (RFC 896) would hold up what the
    // program has sent as large ones.
    let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
    runtime.connections.used(place);
    match entry(fd) {
        Some(entry) => entry.store(place + FIRST_PLACE, Ordering::Relaxed),
        None => refuse(fd),
    }
    Some(place)
}

/// The other end will frame, and this one has no room to keep track of it: better no connection than wrong bytes.
fn refuse(fd: RawFd) {
    let _ = rustix::net::shutdown(borrow(fd), rustix::net::Shutdown::Both);
}

/// Before connect(2).
pub fn connecting(fd: RawFd) {
    if let Some(entry) = entry(fd)
        && entry.load(Ordering::Relaxed) == FOREIGN
        && odb::speak(borrow(fd)).is_ok()
    {
        entry.store(CONNECTING, Ordering::Relaxed);
    }
}

/// Before listen(2).
pub fn listening(fd: RawFd) {
    if let Some(entry) = entry(fd)
        && entry.load(Ordering::Relaxed) == FOREIGN
        && odb::speak(borrow(fd)).is_ok()
    {
        entry.store(LISTENING, Ordering::Relaxed);
    }
}

/// After accept(2).
pub fn accepted(runtime: &Runtime, listener: RawFd, fd: RawFd) {
    forget_entry(fd);
    let is_ours = entry(listener).is_none_or(|entry| entry.load(Ordering::Relaxed) == LISTENING);
    if is_ours && odb::speaks(borrow(fd)) {
        adopt(runtime, fd, false);
    }
}

/// A descriptor that has come from elsewhere: inherited through exec, or passed.
pub fn arrived(runtime: &Runtime, fd: RawFd) {
    forget_entry(fd);
    let socket = borrow(fd);
    if rustix::net::sockopt::socket_type(socket) != Ok(rustix::net::SocketType::STREAM) {
        return;
    }
    if odb::speaks(socket) {
        let accepted = runtime.connections.find(socket).is_none();
        adopt(runtime, fd, !accepted);
    } else if rustix::net::sockopt::socket_acceptconn(socket) == Ok(true)
        && let Some(entry) = entry(fd)
    {
        entry.store(LISTENING, Ordering::Relaxed);
    }
}

/// When the library is loaded: descriptors that were open before.
pub fn adopt_inherited(runtime: &Runtime) {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<RawFd> = open.filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok()).collect();
    for fd in numbers {
        arrived(runtime, fd);
    }
}

/// After dup(2) and its like.
pub fn duplicated(runtime: &Runtime, from: RawFd, to: RawFd) {
    if from == to {
        return;
    }
    let (Some(from), Some(to)) = (entry(from), entry(to)) else { return };
    let value = from.load(Ordering::Relaxed);
    if value >= FIRST_PLACE {
        runtime.connections.used(value - FIRST_PLACE);
    }
    to.store(value, Ordering::Relaxed);
}

/// Before a descriptor is closed or replaced.
pub fn closing(runtime: &Runtime, fd: RawFd) {
    let Some(entry) = entry(fd) else { return };
    if entry.load(Ordering::Relaxed) == FOREIGN {
        return;
    }
    let value = entry.swap(FOREIGN, Ordering::Relaxed);
    if value >= FIRST_PLACE {
        runtime.connections.unused(value - FIRST_PLACE);
    }
}

/// The child has its own descriptors that lead to the same states.
pub fn after_fork(runtime: &Runtime) {
    for fd in 0..highest() {
        let value = entry(fd).map_or(FOREIGN, |entry| entry.load(Ordering::Relaxed));
        if value >= FIRST_PLACE {
            runtime.connections.used(value - FIRST_PLACE);
        }
    }
}

/// One more than the highest descriptor that may be open: as many as the process may have.
pub fn highest() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(DESCRIPTORS, |limit| usize::try_from(limit).unwrap_or(DESCRIPTORS).min(DESCRIPTORS)) as RawFd
}

fn forget_entry(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        entry.store(FOREIGN, Ordering::Relaxed);
    }
}
