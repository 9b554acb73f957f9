//! What this process counts of itself, for `shunt stats` (shunt_odb::store::usage): in its own memory, and in a page of the
//! store's once it is connected.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use shunt_odb::store::client::Connection;
use shunt_odb::store::usage::{self, COUNTED, Counted};
use shunt_sys::shared::SharedMemory;

static VALUES: [AtomicU64; COUNTED.len()] = [const { AtomicU64::new(0) }; COUNTED.len()];
/// Null until there is one; never freed, because another thread may be writing there.
static PAGE: AtomicPtr<SharedMemory> = AtomicPtr::new(std::ptr::null_mut());

/// Counts something.
pub fn count(counted: Counted, by: usize) {
    let value = VALUES[counted as usize].fetch_add(by as u64, Ordering::Relaxed) + by as u64;
    // SAFETY: null or leaked by `begin`.
    if let Some(page) = unsafe { PAGE.load(Ordering::Acquire).as_ref() } {
        usage::write_count(page, counted, value);
    }
}

/// Goes on counting where the store sees it, as long as a connection lives.
pub fn begin(connection: &Connection) {
    let Ok(Some(page)) = connection.counts() else { return };
    usage::write_name(&page, &name());
    usage::write_counts(&page, &VALUES.each_ref().map(|value| value.load(Ordering::Relaxed)));
    PAGE.store(Box::into_raw(Box::new(page)), Ordering::Release);
}

unsafe extern "C" {
    static program_invocation_short_name: *const c_char;
}

/// The process's, by system calls of our own; in another root directory, where there is no /proc, the program's.
fn name() -> String {
    let mut bytes = [0; 16];
    let read = rustix::fs::open("/proc/self/comm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|file| rustix::io::read(file, &mut bytes));
    let name = match read {
        Ok(length) => &bytes[..length],
        // SAFETY: glibc's, a string from the start on.
        Err(_) => unsafe { CStr::from_ptr(program_invocation_short_name) }.to_bytes(),
    };
    String::from_utf8_lossy(name.trim_ascii_end()).into_owned()
}

/// The child counts from 0, in a page of its own.
pub fn after_fork() {
    PAGE.store(std::ptr::null_mut(), Ordering::Release);
    VALUES.iter().for_each(|value| value.store(0, Ordering::Relaxed));
}
