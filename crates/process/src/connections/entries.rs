//! Table of the process's descriptors, by number: what is known of each. Some sockets are *marked* (SHUNT_SPEAK): their
//! handshakes say that this program is under Shunt (started by `shunt run`).

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use shunt_sys::own::is_own;

/// Length of the table. Descriptors beyond it have no entry: they are never marked, and a connection there whose ends
/// have agreed on frames (shunt_odb::frame) is refused.
const DESCRIPTORS: usize = 1 << 20;

/// Entry of a descriptor that is no connection between programs under Shunt: all calls on it go to the kernel.
pub const FOREIGN: u32 = 0;
/// Entry of a socket that was marked before connect(2), or that came from another process without a connection. Whether
/// the other end is under Shunt is not known yet.
pub const CONNECTING: u32 = 1;
/// Entry of a listener: a socket that was marked before listen(2), or a listening one that came from another process.
pub const LISTENING: u32 = 2;
/// Entry of the library's own descriptor, which the program is not allowed to close.
pub const KEPT: u32 = 3;
/// Entries from this value on are those of connections: the place of the connection's state, plus this value.
pub const FIRST_PLACE: u32 = 4;

/// Entries by descriptor. All are zero at first, so only the parts of the table that are used take memory.
static ENTRIES: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(FOREIGN) }; DESCRIPTORS];

/// Entry of a descriptor; `None` if it is beyond the table.
#[inline]
pub fn entry(fd: RawFd) -> Option<&'static AtomicU32> {
    ENTRIES.get(usize::try_from(fd).ok()?)
}

/// Place of the state of a descriptor's connection ([`super::states`]), if it is known already.
pub fn known(fd: RawFd) -> Option<u32> {
    entry(fd)?.load(Ordering::Relaxed).checked_sub(FIRST_PLACE)
}

/// All descriptors whose connection has a state, each with the state's place. Includes descriptors above the process's
/// limit (RLIMIT_NOFILE), which may have been lowered after they were opened.
pub fn used() -> impl Iterator<Item = (RawFd, u32)> {
    (0..DESCRIPTORS as RawFd).filter_map(|fd| Some((fd, known(fd)?)))
}

/// Number behind the highest descriptor that has ever been a listener. A search for listeners ends here, because the
/// table is long and most programs have no listener.
static LISTENERS_END: AtomicI32 = AtomicI32::new(0);

/// Notes that a descriptor is a listener ([`LISTENING`]).
pub fn listens(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        LISTENERS_END.fetch_max(fd + 1, Ordering::Relaxed);
        entry.store(LISTENING, Ordering::Relaxed);
    }
}

/// Descriptors of listeners ([`LISTENING`]).
pub fn listening() -> impl Iterator<Item = RawFd> {
    (0..LISTENERS_END.load(Ordering::Relaxed))
        .filter(|fd| entry(*fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == LISTENING))
}

/// Notes that a descriptor is the library's own.
pub fn keep(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        entry.store(KEPT, Ordering::Relaxed);
    }
}

/// Whether a descriptor is the library's own. The program is not allowed to close such descriptors.
#[inline]
pub fn is_kept(fd: RawFd) -> bool {
    is_own(fd) || entry(fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == KEPT)
}

/// Number behind the highest descriptor that may be open, by the process's limit (RLIMIT_NOFILE).
pub fn highest() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(DESCRIPTORS, |limit| usize::try_from(limit).unwrap_or(DESCRIPTORS).min(DESCRIPTORS)) as RawFd
}

/// Forgets a descriptor: its number stands for another file from now on.
pub fn forget(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        entry.store(FOREIGN, Ordering::Relaxed);
    }
}
