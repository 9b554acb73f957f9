//! The interposed symbols. Most only call functions of crates/process, or the function that they replace.

/// Defines symbols that are other names of functions in the file that calls this macro.
macro_rules! same {
    ($($name:ident is $of:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $result {
            // SAFETY: passes the caller's arguments on to the same function under its other name.
            unsafe { $of($($argument),*) }
        }
    )*};
}

mod arguments;
mod copy;
mod descriptor;
mod direct;
pub mod exec;
mod file;
pub mod heap;
pub mod openssl;
mod socket;
pub mod stream;
pub mod thread;
mod user;
mod variadic;
mod wait;

use std::os::fd::RawFd;

use shunt_process::connections::runtime::{Runtime, runtime};
use shunt_process::descriptors;
use shunt_process::system::kernel::Errno;
use shunt_process::system::real::{self, errno, set_errno};

/// Returns an outcome as glibc's functions do: a count, or -1 with errno set.
fn returned(outcome: Result<usize, Errno>) -> isize {
    match outcome {
        Ok(count) => count as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Returns the library's state, and the place in it of the connection that a descriptor leads to. `None` where the
/// connection does not lie between two programs under `shunt run`.
#[inline]
fn connection(fd: RawFd) -> Option<(&'static Runtime, u32)> {
    if fd < 0 {
        return None;
    }
    let runtime = runtime()?;
    Some((runtime, descriptors::place(runtime, fd)?))
}
