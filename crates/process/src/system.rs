//! The kernel, glibc and the process, as the rest of the library finds them: system calls that no symbol stands between, glibc's
//! own functions, locks, memory and threads of the library's own.

pub mod counts;
pub mod ending;
pub mod inside;
pub mod kernel;
pub mod parts;
pub mod process;
pub mod program;
pub mod ranks;
pub mod real;
pub mod scarce;
pub mod signals;
pub mod stack;
pub mod threads;
