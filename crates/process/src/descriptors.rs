//! Keeps account of the descriptors whose connections lie between two programs under Shunt (started by `shunt run`)
//! that know this of each other. Such a connection is *framed*: it carries frames of real bytes and of *references* to
//! bytes in a store. Connections with clients may have *handoffs*: another machine then sends bytes on them.

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

/// Returns the place of the state of a descriptor's connection between programs under Shunt. `None`: all calls on the
/// descriptor go to the kernel.
#[inline]
pub fn place(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    match entry(fd)?.load(Ordering::Relaxed) {
        FOREIGN | LISTENING | KEPT => None,
        // A signal handler has interrupted the library in this thread, which may hold the locks that are needed here.
        // The caller does not use the place in this case, but tells the program to try again (EAGAIN).
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

/// Asks the kernel whether the other end is under Shunt, and returns the place of the connection's state if it is. The
/// kernel knows this when the handshake has ended. A descriptor that blocks waits for that here. On one that does not
/// block, the program's call goes to the kernel, which refuses it. Bytes that left before the answer is known would not
/// be framed.
#[cold]
fn settle(runtime: &Runtime, fd: RawFd) -> Option<u32> {
    let socket = kernel::borrow(fd);
    let waits = rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK));
    loop {
        // This is asked before SHUNT_SPEAKS: once the socket is connected, the handshake has settled whether the other
        // end is under Shunt.
        let connected = rustix::net::getpeername(socket).is_ok();
        if odb::speaks(socket) {
            return adopt(runtime, fd, true, true);
        }
        if connected {
            // From now on all calls on the descriptor go to the kernel. [`crate::bypass`] still remembers that this end
            // has connected.
            closing(fd);
            return None;
        }
        let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        let patience = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut ready, if waits { None } else { Some(&patience) }) {
            // There is no connection, or none yet. The kernel gets the program's call now. The call fails, and moves no
            // bytes.
            Ok(0) => return None,
            Ok(_) if ready[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => return None,
            Ok(_) => {}
            // A signal came. The kernel gets the program's call now, and handles the signal in it.
            Err(_) => return None,
        }
    }
}

/// Enters a connection whose ends have agreed on frames. `connected`: this end has connected to the other one, so it
/// frames what it sends. `waits`: whether to wait for a process that may be about to make the connection's state.
fn adopt(runtime: &Runtime, fd: RawFd, connected: bool, waits: bool) -> Option<u32> {
    let socket = kernel::borrow(fd);
    let Ok(place) = runtime.connections.enter(socket, connected, waits) else {
        refuse(fd);
        return None;
    };
    // A reference is a small TCP segment that stands for many bytes. Without TCP_NODELAY it would wait for the ACK of
    // the one before (RFC 896). The bytes themselves would have left in large segments, without a wait.
    let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
    match entry(fd) {
        Some(entry) => entry.store(place + FIRST_PLACE, Ordering::Relaxed),
        None => refuse(fd),
    }
    Some(place)
}

/// Shuts down a connection, because this process has no room for its state. The other end will send frames, which the
/// program would take for its own bytes.
fn refuse(fd: RawFd) {
    let _ = rustix::net::shutdown(kernel::borrow(fd), rustix::net::Shutdown::Both);
}

/// Marks a socket before connect(2), so that its handshake says that this program is under Shunt. Does nothing if this
/// process cannot fetch, because it must get no references then.
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

/// Whether TCP_FASTOPEN_CONNECT is set. Then the first bytes leave before the ends can have agreed on frames.
fn writes_into_syn(fd: RawFd) -> bool {
    let (mut value, mut length) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the value and its length are writable during the call.
    let asked = unsafe {
        let value = (&raw mut value).cast();
        real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, value, &raw mut length)
    };
    asked == 0 && value != 0
}

/// Marks a socket before listen(2), so that its handshakes say that this program is under Shunt.
pub fn listening(fd: RawFd) {
    // Makes the kernel note the clients' handshakes. If no handoffs are possible now, the first handoff later does
    // that.
    let _ = odb::watch(kernel::borrow(fd));
    if let Some(entry) = entry(fd)
        && entry.load(Ordering::Relaxed) == FOREIGN
        && odb::speak(kernel::borrow(fd)).is_ok()
    {
        entries::listens(fd);
    }
}

/// Takes the mark from listeners that another program will inherit, if the library does not get into that program.
/// Clients that connect to the program would send frames, which it does not understand. Called before execve(2); `file`
/// opens the program's file. The listeners lose their mark even if this process still accepts from them.
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

/// Notes a new connection, after accept(2).
pub fn accepted(runtime: &Runtime, listener: RawFd, fd: RawFd) {
    forget_entry(fd);
    let is_ours = entry(listener).is_none_or(|entry| entry.load(Ordering::Relaxed) == LISTENING);
    if is_ours && odb::speaks(kernel::borrow(fd)) {
        adopt(runtime, fd, false, true);
    }
}

/// Notes a descriptor that has come from another process.
pub fn arrived(runtime: &Runtime, fd: RawFd) {
    came(runtime, fd, true);
}

/// Notes a descriptor that was passed to this process, or inherited through exec. `waits`: whether to wait for a
/// process that may be about to make the connection's state.
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
        // If nobody has used the connection yet, it is not known which end has connected to the other. This end sends
        // frames once it has got frames.
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

/// Notes the descriptors that are open when the library is loaded.
pub fn adopt_inherited(runtime: &Runtime) {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<RawFd> = open.filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok()).collect();
    for fd in numbers {
        // Does not wait: the program that has executed this one has left its states by now, or never will.
        came(runtime, fd, false);
    }
}

/// Copies what is known of a descriptor, after dup(2) and similar calls.
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

/// Notes that a descriptor is about to be closed or replaced: from now on all calls on it go to the kernel. Returns the
/// place of its connection's state, for [`closed`].
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

/// Leaves the state of a descriptor's connection with the socket, where another process finds it. Call it before the
/// descriptor is passed to another process, which may be another user's.
pub fn passing(runtime: &Runtime, fd: RawFd) {
    if let Some(place) = known(fd) {
        runtime.connections.leave(kernel::borrow(fd), place);
    }
}

/// Frees the state at a place if its socket has ended. Called after a descriptor was closed or replaced.
pub fn closed(runtime: &Runtime, place: Option<u32>) {
    if let Some(place) = place {
        runtime.connections.closed(place);
    }
}

/// Notes that the socket of a descriptor has no connection any more, and may get another.
pub fn dissolved(runtime: &Runtime, fd: RawFd) {
    if let Some(place) = closing(fd) {
        runtime.connections.dissolved(place);
    }
}

/// Forgets what a descriptor's number stood for, because the descriptor is new. The library may not know that the old
/// one was closed: glibc closes some descriptors by itself.
pub fn forget_entry(fd: RawFd) {
    bypass::forget(fd);
    entries::forget(fd);
}
