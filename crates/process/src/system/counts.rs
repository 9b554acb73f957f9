//! Counters of this process, for `shunt stats` (shunt_odb::store::usage). They are in the process's own memory, and
//! also in a page of the store once the process is connected to it.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use shunt_odb::store::client::Connection;
use shunt_odb::store::usage::{self, COUNTED, Counted};
use shunt_sys::shared::SharedMemory;

static VALUES: [AtomicU64; COUNTED.len()] = [const { AtomicU64::new(0) }; COUNTED.len()];
/// Page of the store; null until there is one. It is never freed, because another thread may be writing there.
static PAGE: AtomicPtr<SharedMemory> = AtomicPtr::new(std::ptr::null_mut());

/// Adds `by` to a counter.
pub fn count(counted: Counted, by: usize) {
    let value = VALUES[counted as usize].fetch_add(by as u64, Ordering::Relaxed) + by as u64;
    // SAFETY: null or leaked by `begin`.
    if let Some(page) = unsafe { PAGE.load(Ordering::Acquire).as_ref() } {
        usage::write_count(page, counted, value);
    }
}

/// Makes [`count`] write to a new page of the store, too, until another page replaces it. The store reads the page as
/// long as `connection` is open. Does nothing if the store gives no page.
pub fn begin(connection: &Connection) {
    let Ok(Some(page)) = connection.counts() else { return };
    usage::write_name(&page, &name());
    usage::write_counts(&page, &VALUES.each_ref().map(|value| value.load(Ordering::Relaxed)));
    PAGE.store(Box::into_raw(Box::new(page)), Ordering::Release);
}

unsafe extern "C" {
    static program_invocation_short_name: *const c_char;
}

/// Name of the process, read by the library's own system calls. In another root directory without /proc it is the
/// program's name.
fn name() -> String {
    let mut bytes = [0; 16];
    let read = rustix::fs::open("/proc/self/comm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|file| rustix::io::read(file, &mut bytes));
    let name = match read {
        Ok(length) => &bytes[..length],
        // SAFETY: glibc's string, which is valid from the process's start on.
        Err(_) => unsafe { CStr::from_ptr(program_invocation_short_name) }.to_bytes(),
    };
    String::from_utf8_lossy(name.trim_ascii_end()).into_owned()
}

/// Resets the counters in the child of a fork, which gets another page when it connects to the store.
pub fn after_fork() {
    PAGE.store(std::ptr::null_mut(), Ordering::Release);
    VALUES.iter().for_each(|value| value.store(0, Ordering::Relaxed));
}
