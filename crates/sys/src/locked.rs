//! Memory for keys: locked (mlock(2)), so that it is never swapped to a disk, and in no core dump (MADV_DONTDUMP).
//!
//! Places of one size in chunks that are never given back: as many as were in use at one time. Where the kernel locks
//! no more (RLIMIT_MEMLOCK), what is beyond is left out of dumps only; [`Locked::unlocked_bytes`] says how much.

use std::io;
use std::ptr::NonNull;
use std::sync::LazyLock;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous};

use crate::lock::{Mutex, MutexGuard};

/// Bytes of a place. A multiple of any alignment that keys of ciphers have.
pub(crate) const PLACE_BYTES: usize = 1024;
/// Places that are locked with one call: 64 KiB.
const PLACES_AT_ONCE: usize = 64;

/// The places of this process.
static LOCKED: LazyLock<Mutex<Locked>> = LazyLock::new(Mutex::default);

/// Places that nobody uses, and how many there are.
#[derive(Debug, Default)]
pub struct Locked {
    free: Vec<NonNull<u8>>,
    unlocked_bytes: usize,
}

// SAFETY: the places belong to no thread, and each is in the list once.
unsafe impl Send for Locked {}

impl Locked {
    /// Bytes for keys of this process that the kernel has refused to lock.
    pub fn unlocked_bytes() -> usize {
        places().unlocked_bytes
    }

    fn add_chunk(&mut self) -> io::Result<()> {
        let bytes = PLACES_AT_ONCE * PLACE_BYTES;
        // SAFETY: new memory at an address of the kernel's choice, never unmapped.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        // SAFETY: the mapping just made; neither call changes what is in it.
        let locked = unsafe { madvise(base, bytes, Advice::LinuxDontDump).and_then(|()| mlock(base, bytes)) };
        if locked.is_err() {
            self.unlocked_bytes += bytes;
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        // SAFETY: each place is inside the mapping.
        self.free.extend((0..PLACES_AT_ONCE).rev().map(|place| unsafe { base.add(place * PLACE_BYTES) }));
        Ok(())
    }
}

/// [`hold_still`].
#[derive(Debug)]
pub struct Still(#[allow(dead_code, reason = "it is held")] MutexGuard<'static, Locked>);

/// Until the value is dropped no key gets a place or gives one back: before a fork, so that the child can.
pub fn hold_still() -> Still {
    Still(places())
}

fn places() -> MutexGuard<'static, Locked> {
    // Nothing here panics between two writes that belong together.
    LOCKED.lock()
}

/// A place of [`PLACE_BYTES`], aligned to them: the caller's alone until [`give_back`].
///
/// # Panics
/// Where there is no memory, as other allocations.
pub(crate) fn take() -> NonNull<u8> {
    let mut places = places();
    if places.free.is_empty() {
        places.add_chunk().expect("memory for keys");
    }
    places.free.pop().expect("a chunk has places")
}

/// Whoever took it has overwritten it.
///
/// # Safety
/// `place` is from [`take`], and nobody uses it any more.
pub(crate) unsafe fn give_back(place: NonNull<u8>) {
    places().free.push(place);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping that an address is in (proc_pid_smaps(5)).
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
        // SAFETY: just taken.
        unsafe { give_back(place) };
    }

    #[test]
    fn no_place_is_given_twice() {
        let mut taken: Vec<_> = (0..3 * PLACES_AT_ONCE).map(|_| take()).collect();
        taken.sort();
        assert!(taken.windows(2).all(|two| two[0].as_ptr() as usize + PLACE_BYTES <= two[1].as_ptr() as usize));
        // SAFETY: each was taken once.
        taken.into_iter().for_each(|place| unsafe { give_back(place) });
    }
}
