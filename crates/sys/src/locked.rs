//! Memory for keys. It is locked (mlock(2)), so that it is never swapped to disk, and left out of core dumps
//! (MADV_DONTDUMP).
//!
//! The memory is divided into places of one size, which are given out and taken back. They lie in chunks of 64 places.
//! A chunk is added when no place is free, and no chunk is ever freed. If the kernel refuses to lock more memory
//! (RLIMIT_MEMLOCK), further chunks are only left out of dumps; [`Locked::unlocked_bytes`] counts their bytes.

use std::io;
use std::ptr::NonNull;
use std::sync::LazyLock;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous};

use crate::lock::{Mutex, MutexGuard};

/// Size of a place in bytes. It is a multiple of any alignment that cipher keys have.
pub(crate) const PLACE_BYTES: usize = 1024;
/// Number of places in a chunk, which one call locks: 64 KiB.
const PLACES_AT_ONCE: usize = 64;

/// Free places of this process.
static LOCKED: LazyLock<Mutex<Locked>> = LazyLock::new(Mutex::default);

/// Free places, and the number of bytes in chunks that are not locked.
#[derive(Debug, Default)]
pub struct Locked {
    free: Vec<NonNull<u8>>,
    unlocked_bytes: usize,
}

// SAFETY: the places are not tied to a thread, and each is in the list at most once.
unsafe impl Send for Locked {}

impl Locked {
    /// Returns the number of bytes for keys that the kernel has refused to lock in this process.
    pub fn unlocked_bytes() -> usize {
        places().unlocked_bytes
    }

    fn add_chunk(&mut self) -> io::Result<()> {
        let bytes = PLACES_AT_ONCE * PLACE_BYTES;
        // SAFETY: a new mapping at an address of the kernel's choice; it is never unmapped.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        // SAFETY: the range is the mapping just made, and neither call changes its contents.
        let locked = unsafe { madvise(base, bytes, Advice::LinuxDontDump).and_then(|()| mlock(base, bytes)) };
        if locked.is_err() {
            self.unlocked_bytes += bytes;
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        // SAFETY: each place is inside the mapping just made.
        self.free.extend((0..PLACES_AT_ONCE).rev().map(|place| unsafe { base.add(place * PLACE_BYTES) }));
        Ok(())
    }
}

/// Lock on the free places, held until this value is dropped ([`hold_still`]).
#[derive(Debug)]
pub struct Still(#[allow(dead_code, reason = "it is held")] MutexGuard<'static, Locked>);

/// Locks the free places until the returned value is dropped, so that no thread takes a place or gives one back. Hold
/// the value during a fork: otherwise another thread might hold the lock then, and the child, which lacks that thread,
/// would wait forever.
pub fn hold_still() -> Still {
    Still(places())
}

fn places() -> MutexGuard<'static, Locked> {
    // This mutex has no poisoning, and needs none: code that holds it does not panic between two writes that belong
    // together.
    LOCKED.lock()
}

/// Takes a place of [`PLACE_BYTES`] bytes, aligned to its size. It belongs to the caller until [`give_back`].
///
/// # Panics
/// Panics where the kernel gives no memory.
pub(crate) fn take() -> NonNull<u8> {
    let mut places = places();
    if places.free.is_empty() {
        places.add_chunk().expect("memory for keys");
    }
    places.free.pop().expect("a chunk has places")
}

/// Gives a place back, whose bytes the caller has overwritten.
///
/// # Safety
/// `place` comes from [`take`], and is not used any more.
pub(crate) unsafe fn give_back(place: NonNull<u8>) {
    places().free.push(place);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags of the mapping that contains an address (proc_pid_smaps(5)).
    fn flags_at(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let hex = |text| usize::from_str_radix(text, 16).ok();
            if let Some((Some(from), Some(to))) = range.map(|(from, to)| (hex(from), hex(to))) {
                inside = (from..to).contains(&address);
            }
            if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
                return flags.to_owned();
            }
        }
        panic!("no mapping at {address:#x}");
    }

    #[test]
    fn places_are_locked_and_in_no_dump() {
        let place = take();
        let flags = flags_at(place.as_ptr() as usize);
        assert!(flags.contains(" dd "), "{flags}");
        assert!(flags.contains(" lo ") || Locked::unlocked_bytes() > 0, "{flags}");
        // SAFETY: taken above, and not used after this.
        unsafe { give_back(place) };
    }

    #[test]
    fn no_place_is_given_twice() {
        let mut taken: Vec<_> = (0..3 * PLACES_AT_ONCE).map(|_| take()).collect();
        taken.sort();
        assert!(taken.windows(2).all(|two| two[0].as_ptr() as usize + PLACE_BYTES <= two[1].as_ptr() as usize));
        // SAFETY: each place was taken once, and is not used after this.
        taken.into_iter().for_each(|place| unsafe { give_back(place) });
    }
}
