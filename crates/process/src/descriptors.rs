//! Which of the process's descriptors lead to connections that both ends know to be between programs under Shunt.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::AddressFamily;
use shunt_sys::odb;

use crate::bypass;
use crate::connections::entries::{self, CONNECTING, FIRST_PLACE, FOREIGN, KEPT, LISTENING, entry, is_kept, known};
use crate::connections::runtime::{Runtime, runtime};
use crate::system::inside::{Inside, is_inside};
use crate::system::kernel;
use crate::system::program;
use crate::system::real::{self, errno, set_errno};

/// The place of the state of a connection between programs under Shunt. `None`: all calls are the kernel's.
#[inline]
pub fn place(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    match entry(fd)?.load(Ordering::Relaxed) {
        FOREIGN | LISTENING | KEPT => None,
        // In a signal's handler that has interrupted the library, whose thread may have the locks that this takes: its caller,
        // who goes by no place there, has the program come again.
        CONNECTING if is_inside() => Some(u32::MAX),
        CONNECTING => {
            let before = errno();
            let place = settle(runtime, fd);
            set_errno(before);
            place
        }
        place => {
            let place = place - FIRST_PLACE;
            if runtime.connections.is_away(place) && !is_inside() {
                let before = errno();
                runtime.connections.take_back(kernel::borrow(fd), place);
                set_errno(before);
            }
            Some(place)
        }
    }
}

/// Asks, once a connection is made, whether the other end speaks. Before, there is nothing to read or to write, and
/// nobody may: what is written between the question and the kernel's answer to the handshake would not be framed.
#[cold]
fn settle(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    let socket = kernel::borrow(fd);
    let waits = rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK));
    loop {
        // In this order: who is connected has settled.
        let connected = rustix::net::getpeername(socket).is_ok();
        if odb::speaks(socket) {
            return adopt(runtime, fd, true, true);
        }
        if connected {
            // From here on it is the kernel's; that this end has connected is not forgotten (crate::bypass).
            closing(fd);
            return None;
        }
        let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        let patience = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut ready, if waits { None } else { Some(&patience) }) {
            // The kernel's call says that there is no connection, or not yet: EAGAIN needs no bytes.
            Ok(0) => return None,
            Ok(_) if ready[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => return None,
            Ok(_) => {}
            // A signal, for the call to see.
            Err(_) => return None,
        }
    }
}

/// Enters a connection that is agreed on. `connected`: by this end, so that it frames what it sends.
/// `waits`: see [`crate::connections::states::Connections::enter`].
fn adopt(runtime: &Runtime, fd: RawFd, connected: bool, waits: bool) -> Option<u32> {
    let socket = kernel::borrow(fd);
    let Ok(place) = runtime.connections.enter(socket, connected, waits) else {
        refuse(fd);
        return None;
    };
    // A reference is a small segment for many bytes: one that waits for another's ACK (RFC 896) would hold up what the
    // program has sent as large ones.
    let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
    match entry(fd) {
        Some(entry) => entry.store(place + FIRST_PLACE, Ordering::Relaxed),
        None => refuse(fd),
    }
    Some(place)
}

/// The other end will frame, and this one has no room to keep track of it: better no connection than wrong bytes.
fn refuse(fd: RawFd) {
    let _ = rustix::net::shutdown(kernel::borrow(fd), rustix::net::Shutdown::Both);
}

/// Before connect(2). References are to come only where they can be fetched.
pub fn connecting(runtime: &Runtime, fd: RawFd) {
    if let Some(entry) = entry(fd)
        && entry.load(Ordering::Relaxed) == FOREIGN
        && !writes_into_syn(fd)
        && let Some(_inside) = Inside::enter()
        && runtime.memory.holders.is_ready()
        && odb::speak(kernel::borrow(fd)).is_ok()
    {
        entry.store(CONNECTING, Ordering::Relaxed);
    }
}

/// TCP_FASTOPEN_CONNECT: the first bytes leave before anybody can have agreed.
fn writes_into_syn(fd: RawFd) -> bool {
    let (mut value, mut length) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the value and its length, which are written.
    let asked = unsafe {
        let value = (&raw mut value).cast();
        real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, value, &raw mut length)
    };
    asked == 0 && value != 0
}

/// Before listen(2).
pub fn listening(fd: RawFd) {
    // Where nobody hands off now, the first handoff says it.
    let _ = odb::watch(kernel::borrow(fd));
    if let Some(entry) = entry(fd)
        && entry.load(Ordering::Relaxed) == FOREIGN
        && odb::speak(kernel::borrow(fd)).is_ok()
    {
        entries::listens(fd);
    }
}

/// Before execve(2) of the program of this file. Into some the library does not come, and who connects to their listeners would
/// speak to nobody: these say nothing more of Shunt, also where this process goes on to accept there.
pub fn executing(file: impl FnOnce() -> Option<OwnedFd>) {
    let mut listeners = entries::listening().filter(|fd| is_inherited(*fd)).peekable();
    if listeners.peek().is_some() && file().is_some_and(|file| !program::is_covered(file)) {
        listeners.for_each(|fd| odb::speak_no_more(kernel::borrow(fd)));
    }
}

fn is_inherited(fd: RawFd) -> bool {
    let flags = rustix::io::fcntl_getfd(kernel::borrow(fd));
    flags.is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
}

/// After accept(2).
pub fn accepted(runtime: &Runtime, listener: RawFd, fd: RawFd) {
    forget_entry(fd);
    let is_ours = entry(listener).is_none_or(|entry| entry.load(Ordering::Relaxed) == LISTENING);
    if is_ours && odb::speaks(kernel::borrow(fd)) {
        adopt(runtime, fd, false, true);
    }
}

/// A descriptor that has come from another process.
pub fn arrived(runtime: &Runtime, fd: RawFd) {
    came(runtime, fd, true);
}

/// A descriptor that has come from elsewhere: passed, or inherited through exec.
fn came(runtime: &Runtime, fd: RawFd, waits: bool) {
    if is_kept(fd) {
        return;
    }
    forget_entry(fd);
    let socket = kernel::borrow(fd);
    if rustix::net::sockopt::socket_type(socket) != Ok(rustix::net::SocketType::STREAM) {
        return;
    }
    if odb::speaks(socket) {
        // Of one that nobody has used yet it is not known who has connected: what is sent is framed once the other end frames.
        adopt(runtime, fd, false, waits);
    } else if rustix::net::sockopt::socket_domain(socket)
        .is_ok_and(|domain| matches!(domain, AddressFamily::INET | AddressFamily::INET6))
        && let Some(entry) = entry(fd)
    {
        if rustix::net::sockopt::socket_acceptconn(socket) == Ok(true) {
            entries::listens(fd);
        } else if rustix::net::getpeername(socket).is_err() {
            entry.store(CONNECTING, Ordering::Relaxed);
        }
    }
}

/// When the library is loaded: descriptors that were open before.
pub fn adopt_inherited(runtime: &Runtime) {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<RawFd> = open.filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok()).collect();
    for fd in numbers {
        // The program that has executed this one has left its states by now, or never will.
        came(runtime, fd, false);
    }
}

/// After dup(2) and its like.
pub fn duplicated(from: RawFd, to: RawFd) {
    if from == to {
        return;
    }
    bypass::duplicated(from, to);
    let number = to;
    let (Some(from), Some(to)) = (entry(from), entry(to)) else { return };
    let value = from.load(Ordering::Relaxed);
    match value {
        LISTENING => entries::listens(number),
        KEPT => to.store(FOREIGN, Ordering::Relaxed),
        value => to.store(value, Ordering::Relaxed),
    }
}

/// A descriptor is about to be closed or replaced: from here on it is the kernel's. Its place is for [`closed`].
pub fn closing(fd: RawFd) -> Option<u32> {
    let entry = entry(fd)?;
    if entry.load(Ordering::Relaxed) == FOREIGN {
        return None;
    }
    let place = entry.swap(FOREIGN, Ordering::Relaxed).checked_sub(FIRST_PLACE)?;
    if let Some(runtime) = runtime()
        && runtime.connections.has_come(place)
    {
        runtime.connections.leave(kernel::borrow(fd), place);
    }
    Some(place)
}

/// A descriptor is about to be passed to another process, which may be another user's.
pub fn passing(runtime: &Runtime, fd: RawFd) {
    if let Some(place) = known(fd) {
        runtime.connections.leave(kernel::borrow(fd), place);
    }
}

/// After a descriptor was closed or replaced.
pub fn closed(runtime: &Runtime, place: Option<u32>) {
    if let Some(place) = place {
        runtime.connections.closed(place);
    }
}

/// The socket of a descriptor has no connection any more, and may get another.
pub fn dissolved(runtime: &Runtime, fd: RawFd) {
    if let Some(place) = closing(fd) {
        runtime.connections.dissolved(place);
    }
}

/// A descriptor is new, whatever its number stood for: glibc closes some by itself.
pub fn forget_entry(fd: RawFd) {
    bypass::forget(fd);
    entries::forget(fd);
}
