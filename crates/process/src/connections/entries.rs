//! A table of the process's descriptors, by number: what is known of each.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use shunt_sys::own::is_own;

/// Descriptors beyond have no entry: they are never marked, and a connection that is agreed on is refused there.
const DESCRIPTORS: usize = 1 << 20;

/// Not ours: all calls are the kernel's.
pub const FOREIGN: u32 = 0;
/// Marked before it connected; whether the other end speaks is not known yet.
pub const CONNECTING: u32 = 1;
/// Marked before it listened.
pub const LISTENING: u32 = 2;
/// The library's own, which the program may not close.
pub const KEPT: u32 = 3;
/// From here on: the place of the connection's state.
pub const FIRST_PLACE: u32 = 4;

/// By descriptor. Zeros until touched: the kernel gives pages only for those that are in use.
static ENTRIES: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(FOREIGN) }; DESCRIPTORS];

/// `None`: beyond.
#[inline]
pub fn entry(fd: RawFd) -> Option<&'static AtomicU32> {
    ENTRIES.get(usize::try_from(fd).ok()?)
}

/// The place of a descriptor's state, where that is known already.
pub fn known(fd: RawFd) -> Option<u32> {
    entry(fd)?.load(Ordering::Relaxed).checked_sub(FIRST_PLACE)
}

/// All descriptors of connections that have a state, and its place: also those beyond a limit that was lowered since.
pub fn used() -> impl Iterator<Item = (RawFd, u32)> {
    (0..DESCRIPTORS as RawFd).filter_map(|fd| Some((fd, known(fd)?)))
}

/// Marked listeners have ever been below this: most programs have none, and the table is long.
static LISTENERS_END: AtomicI32 = AtomicI32::new(0);

/// A descriptor is a marked listener's.
pub fn listens(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        LISTENERS_END.fetch_max(fd + 1, Ordering::Relaxed);
        entry.store(LISTENING, Ordering::Relaxed);
    }
}

/// Those that listen and are marked.
pub fn listening() -> impl Iterator<Item = RawFd> {
    (0..LISTENERS_END.load(Ordering::Relaxed))
        .filter(|fd| entry(*fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == LISTENING))
}

/// A descriptor is the library's.
pub fn keep(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        entry.store(KEPT, Ordering::Relaxed);
    }
}

/// Whether a descriptor is the library's, and not the program's to close.
#[inline]
pub fn is_kept(fd: RawFd) -> bool {
    is_own(fd) || entry(fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == KEPT)
}

/// One more than the highest descriptor that may be open: as many as the process may have.
pub fn highest() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(DESCRIPTORS, |limit| usize::try_from(limit).unwrap_or(DESCRIPTORS).min(DESCRIPTORS)) as RawFd
}

/// The number stands for something else from here on.
pub fn forget(fd: RawFd) {
    if let Some(entry) = entry(fd) {
        entry.store(FOREIGN, Ordering::Relaxed);
    }
}
