//! Access to the kernel, glibc and the process for the rest of the library. System calls that are not interposed,
//! glibc's own functions, and the library's own locks, memory and threads are here.

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
